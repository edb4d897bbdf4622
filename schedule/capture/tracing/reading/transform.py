"""Rewriting of a function's syntax tree: every read, write and call becomes a call of an evaluator's method."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Sequence
from typing import Any

from schedule.capture.tracing.reading.names import (
    assigned_names,
    assigns_names_only,
    bound_names,
    loaded_globally,
    stored_globally,
)

HERE = "__here__"
_CALLED_AS_WRITTEN = {"locals"}  # it reads the caller's frame
_AUGMENTED = {
    ast.Add: "iadd", ast.Sub: "isub", ast.Mult: "imul", ast.Div: "itruediv", ast.FloorDiv: "ifloordiv",
    ast.Mod: "imod", ast.Pow: "ipow", ast.LShift: "ilshift", ast.RShift: "irshift", ast.BitOr: "ior",
    ast.BitXor: "ixor", ast.BitAnd: "iand", ast.MatMult: "imatmul",
}  # fmt: skip
_COMPARED = {ast.Is: "is_", ast.IsNot: "is_not", ast.Eq: "eq", ast.NotEq: "ne", ast.In: "in_", ast.NotIn: "not_in"}


def _is_formatted(part: ast.expr) -> bool:
    return isinstance(part, ast.FormattedValue)


class NoSource(Exception):
    """Error for a function without readable source, or with syntax not supported by the instrumentation."""


def _line(node: Any) -> int:
    """Return the line number of a frame while it computes ``node``: for ``x.view(…)``, the line of ``view``."""
    named = node.func if isinstance(node, ast.Call) else node
    line: int = (named.end_lineno if isinstance(named, ast.Attribute) else None) or node.lineno
    return line


class Transformer(ast.NodeTransformer):
    """Instrumentation of one definition and of all code defined in it."""

    def __init__(self, code: types.CodeType, definition: ast.FunctionDef, class_name: str) -> None:
        self._definition, self._class = definition, class_name.lstrip("_")
        bound, read = bound_names(definition), loaded_globally(code)
        self._globals, self._free = read - bound, {*code.co_freevars} - bound - {"__class__"}
        self._noted = (read & bound, {*code.co_freevars} & bound)
        self._written = {
            name for node in ast.walk(definition) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
        } & ({*code.co_freevars} | read | stored_globally(code))
        self._first: list[str] = []
        self._count = 0

    def result(self) -> ast.FunctionDef:
        """Return the definition, instrumented and without decorators."""
        definition = self._definition
        definition.decorator_list = []
        made: ast.FunctionDef = self._function(definition)
        ambiguous, cells = self._noted
        notes = [self._statement("note_global", definition, ast.Constant(name)) for name in sorted(ambiguous)]
        notes += [self._statement("note_cell", definition, ast.Constant(name)) for name in sorted(cells)]
        made.body[:0] = notes
        return made

    # -- making nodes ---------------------------------------------------------------------------------------

    def _here(self, method: str, at: Any, *arguments: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.Call:
        def located(node: Any) -> Any:
            return ast.copy_location(node, at)

        function = located(ast.Attribute(located(ast.Name(HERE, ast.Load())), method, ast.Load()))
        function.lineno = function.end_lineno = _line(at)
        function.end_col_offset = function.col_offset
        filled = [located(each) if isinstance(each, ast.Constant) else each for each in arguments]
        return located(ast.Call(function, filled, list(keywords)))

    def _statement(self, method: str, at: Any, *arguments: ast.expr) -> ast.stmt:
        return ast.copy_location(ast.Expr(self._here(method, at, *arguments)), at)

    @staticmethod
    def _constant(value: Any) -> ast.expr:
        return ast.Constant(value)

    def _local(self) -> str:
        self._count += 1
        return f"__here_{self._count}__"

    def _mangled(self, name: str) -> str:
        private = name.startswith("__") and not name.endswith("__") and self._class
        return f"_{self._class}{name}" if private else name

    # -- functions --------------------------------------------------------------------------------------------

    def _function(self, node: Any) -> Any:
        arguments = node.args
        if self._first:
            arguments.defaults = [self.visit(each) for each in arguments.defaults]
            arguments.kw_defaults = [each and self.visit(each) for each in arguments.kw_defaults]
        else:  # the copy gets the defaults of the original function
            arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
            arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in filter(None, every):
            argument.annotation = None
        positional = [*arguments.posonlyargs, *arguments.args]
        self._first.append(positional[0].arg if positional else "")
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            node.returns = None
            node.body = list(self._statements(node.body))
        self._first.pop()
        return node

    def _statements(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            made = self.visit(statement)
            yield from made if isinstance(made, list) else [made]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        decorators, node.decorator_list = [self.visit(each) for each in node.decorator_list], []
        made: list[ast.stmt] = [self._function(node)]
        for decorator in reversed(decorators):
            call = self._here("call", node, decorator, ast.copy_location(ast.Name(node.name, ast.Load()), node))
            made.append(ast.copy_location(ast.Assign([ast.Name(node.name, ast.Store())], call), node))
        return made

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return self._function(node)

    def _refuse(self, node: Any) -> Any:
        raise NoSource(f"line {node.lineno} holds a {type(node).__name__}")

    visit_AsyncFunctionDef = visit_ClassDef = visit_Await = visit_AsyncFor = visit_AsyncWith = _refuse

    # -- reads ------------------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id in self._free:
            return self._here("cell", node, ast.Constant(node.id), node)
        if node.id in self._globals:
            return self._here("name", node, ast.Constant(node.id))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner = self.visit(node.value)
        if not isinstance(node.ctx, ast.Load):
            raise NoSource(f"line {node.lineno} assigns an attribute in a way that is not followed")
        return self._here("attr", _at_attribute(node), owner, ast.Constant(self._mangled(node.attr)))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if not isinstance(node.ctx, ast.Load):
            raise NoSource(f"line {node.lineno} assigns an item in a way that is not followed")
        return self._here("item", node, self.visit(node.value), self._key(node.slice))

    def _key(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Slice):
            bounds = [self.visit(each) if each else ast.Constant(None) for each in (node.lower, node.upper, node.step)]
            return self._here("slice", node, *bounds)
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple([self._key(each) for each in node.elts], ast.Load()), node)
        key: ast.expr = self.visit(node)
        return key

    def visit_Starred(self, node: ast.Starred) -> Any:
        if isinstance(node.ctx, ast.Load):
            node.value = self._here("iterate", node, self.visit(node.value))
        return node

    def visit_Dict(self, node: ast.Dict) -> Any:
        values = [
            self.visit(value) if key else self._here("mapping", value, self.visit(value))
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        keys = [key and self._hashed(self.visit(key)) for key in node.keys]
        return ast.copy_location(ast.Dict(keys, values), node)

    def visit_Set(self, node: ast.Set) -> Any:
        return ast.copy_location(ast.Set([self._hashed(self.visit(each)) for each in node.elts]), node)

    def _hashed(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, (ast.Constant, ast.Starred)) else self._here("key", node, node)

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _CALLED_AS_WRITTEN or (name in ("vars", "dir") and not node.args):
            return node
        if name == "super" and not node.args:
            own = ast.copy_location(ast.Name("__class__", ast.Load()), node)
            return self._here("super", node, own, ast.copy_location(ast.Name(self._first[-1], ast.Load()), node))
        arguments = [self.visit(each) for each in node.args]
        keywords = [
            ast.keyword(k.arg, self.visit(k.value) if k.arg else self._here("mapping", k.value, self.visit(k.value)))
            for k in node.keywords
        ]
        at = _at_attribute(node.func, node) if isinstance(node.func, ast.Attribute) else node
        return self._here("call", at, self.visit(node.func), *arguments, keywords=keywords)

    def visit_Compare(self, node: ast.Compare) -> Any:
        operands = [self.visit(each) for each in (node.left, *node.comparators)]
        method = _COMPARED.get(type(node.ops[0]))
        if len(node.ops) == 1 and method is not None:
            return self._here(method, node, *operands)
        left, *others = [self._operand(each) for each in operands]
        return ast.copy_location(ast.Compare(left, node.ops, others), node)

    def _operand(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, ast.Constant) else self._here("operand", node, node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        left, right = self._operand(self.visit(node.left)), self._operand(self.visit(node.right))
        made = ast.copy_location(ast.BinOp(left, node.op, right), node)
        return self._here("formatted", node, made) if isinstance(node.op, ast.Mod) else made

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        operand = self.visit(node.operand)
        made = self._truth(operand) if isinstance(node.op, ast.Not) else self._operand(operand)
        return ast.copy_location(ast.UnaryOp(node.op, made), node)

    def _truth(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, ast.Constant) else self._here("truth", node, node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        *tested, last = [self.visit(each) for each in node.values]
        return ast.copy_location(ast.BoolOp(node.op, [*map(self._truth, tested), last]), node)

    def _tested(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = self._truth(node.test)
        return node

    visit_If = visit_While = visit_IfExp = visit_Assert = _tested

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        node.value = self._here("shown", node, self.visit(node.value))
        if node.format_spec is not None:
            self.generic_visit(node.format_spec)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        self.generic_visit(node)
        return self._here("formatted", node, node) if any(map(_is_formatted, node.values)) else node

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        node.iter = self._here("iterate", node.iter, self.visit(node.iter))
        node.ifs = [self._truth(self.visit(each)) for each in node.ifs]
        if not assigns_names_only(node.target):
            raise NoSource("a comprehension assigns to an attribute or item")
        return node

    def visit_Match(self, node: ast.Match) -> Any:
        node.subject = self._operand(self.visit(node.subject))
        for case in node.cases:
            case.guard = case.guard and self._truth(self.visit(case.guard))
            case.body = list(self._statements(case.body))
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        made: list[ast.stmt] = [node]
        for alias in node.names:
            name = alias.asname or alias.name
            where = [ast.Constant(node.module or ""), ast.Constant(node.level), ast.Constant(alias.name)]
            read = self._here("imported", node, *where, ast.copy_location(ast.Name(name, ast.Load()), node))
            made.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], read), node))
        return made

    # -- writes -----------------------------------------------------------------------------------------------

    def _assigned(self, target: Any, value: ast.expr, at: Any) -> list[ast.stmt]:
        """Return the statements for ``target = value``."""
        if isinstance(target, ast.Attribute):
            name = ast.Constant(self._mangled(target.attr))
            return [self._statement("set_attr", at, self.visit(target.value), name, value)]
        if isinstance(target, ast.Subscript):
            return [self._statement("set_item", at, self.visit(target.value), self._key(target.slice), value)]
        checks = [
            self._statement("write_name", at, ast.Constant(name)) for name in assigned_names(target) & self._written
        ]
        if isinstance(target, ast.Name):
            return [*checks, ast.copy_location(ast.Assign([target], value), at)]
        later: list[ast.stmt] = []
        bare = self._with_locals(target, later, at)
        return [*checks, ast.copy_location(ast.Assign([bare], self._here("iterate", at, value)), at), *later]

    def _with_locals(self, target: Any, later: list[ast.stmt], at: Any) -> Any:
        """Replace each attribute and item in ``target`` with a local, and add its assignment to ``later``."""
        if isinstance(target, (ast.Tuple, ast.List)):
            return type(target)([self._with_locals(each, later, at) for each in target.elts], ast.Store())
        if isinstance(target, ast.Starred):
            return ast.Starred(self._with_locals(target.value, later, at), ast.Store())
        if isinstance(target, ast.Name):
            return target
        name = self._local()
        later += self._assigned(target, ast.copy_location(ast.Name(name, ast.Load()), at), at)
        return ast.copy_location(ast.Name(name, ast.Store()), at)

    def visit_Assign(self, node: ast.Assign) -> Any:
        value = self.visit(node.value)
        if len(node.targets) == 1:
            return self._assigned(node.targets[0], value, node)
        name = self._local()
        made: list[ast.stmt] = [ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), node)]
        for target in node.targets:
            made += self._assigned(target, ast.copy_location(ast.Name(name, ast.Load()), node), node)
        return made

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            return self._assigned(node.target, self.visit(node.value), node)
        if isinstance(node.target, ast.Name):
            node.annotation = ast.copy_location(ast.Constant(None), node)
            return node
        return ast.copy_location(ast.Pass(), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        value, operation = self.visit(node.value), ast.Constant(_AUGMENTED[type(node.op)])
        target = node.target
        if isinstance(target, ast.Name):
            read = self.visit_Name(ast.copy_location(ast.Name(target.id, ast.Load()), node))
            return self._assigned(target, self._here("augmented", node, operation, read, value), node)
        owner, key = self._local(), self._local()
        bound = [ast.copy_location(ast.Assign([ast.Name(owner, ast.Store())], self.visit(target.value)), node)]
        loaded = ast.copy_location(ast.Name(owner, ast.Load()), node)
        if isinstance(target, ast.Attribute):
            methods, name = ("attr", "set_attr"), self._constant(self._mangled(target.attr))
        else:
            methods, name = ("item", "set_item"), ast.copy_location(ast.Name(key, ast.Load()), node)
            bound.append(ast.copy_location(ast.Assign([ast.Name(key, ast.Store())], self._key(target.slice)), node))
        made = self._here("augmented", node, operation, self._here(methods[0], node, loaded, name), value)
        return [*bound, self._statement(methods[1], node, loaded, name, made)]

    def visit_Delete(self, node: ast.Delete) -> Any:
        made: list[ast.stmt] = []
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                name = ast.Constant(self._mangled(target.attr))
                made.append(self._statement("del_attr", node, self.visit(target.value), name))
            elif isinstance(target, ast.Subscript):
                made.append(self._statement("del_item", node, self.visit(target.value), self._key(target.slice)))
            else:
                made.append(ast.copy_location(ast.Delete([target]), node))
        return made

    def visit_YieldFrom(self, node: ast.YieldFrom) -> Any:
        node.value = self._here("iterate", node, self.visit(node.value))
        return node

    def visit_For(self, node: ast.For) -> Any:
        node.iter = self._here("iterate", node.iter, self.visit(node.iter))
        later: list[ast.stmt] = []
        if not assigns_names_only(node.target):
            node.target = self._with_locals(node.target, later, node)
        node.body = [*later, *self._statements(node.body)]
        node.orelse = list(self._statements(node.orelse))
        return node

    def visit_With(self, node: ast.With) -> Any:
        for item in node.items:
            item.context_expr = self._here("context", item.context_expr, self.visit(item.context_expr))
            if item.optional_vars is not None and not assigns_names_only(item.optional_vars):
                raise NoSource("a with statement assigns to an attribute or item")
        node.body = list(self._statements(node.body))
        return node


def _at_attribute(attribute: ast.Attribute, node: ast.expr | None = None) -> ast.expr:
    """Return a node at Python's location of an attribute read or call: the line of its name."""
    whole = node or attribute
    if attribute.lineno == attribute.end_lineno:
        return whole
    at = ast.Constant(None)
    ast.copy_location(at, whole)
    at.lineno, at.col_offset = attribute.end_lineno or attribute.lineno, attribute.end_col_offset or 0
    at.end_lineno = max(at.lineno, whole.end_lineno or at.lineno)
    at.end_col_offset = whole.end_col_offset
    if at.end_lineno == at.lineno:
        at.end_col_offset = max(whole.end_col_offset or 0, at.col_offset)
    return at
