"""Rewriting of a function's syntax tree: every read, write and call becomes a call of an evaluator's method.

Names in code: those it looks up or stores globally, and those it binds.

Nodes of a syntax tree that call an evaluator's methods.
"""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

# -- Names in code ------------------------------------------------------------------------------------------


def loaded_globally(code: types.CodeType) -> set[str]:
    """Return the names looked up in globals by ``code`` or by code defined in it."""
    return _names_of(code, ("LOAD_GLOBAL", "LOAD_NAME"))


def stored_globally(code: types.CodeType) -> set[str]:
    """Return the names stored or deleted in globals by ``code`` or by code defined in it."""
    return _names_of(code, ("STORE_GLOBAL", "DELETE_GLOBAL"))


def _names_of(code: types.CodeType, instructions: Collection[str]) -> set[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname in instructions}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names.union(*(_names_of(each, instructions) for each in inner))


def bound_names(tree: ast.AST) -> set[str]:
    """Return the names bound anywhere in ``tree``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not tree:
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return found


def assigns_names_only(target: ast.AST) -> bool:
    """Check whether ``target`` assigns to names alone, not to attributes or items."""
    return not any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in ast.walk(target))


def raises_again(handler: ast.ExceptHandler) -> bool:
    """Check whether a handler of a ``try`` statement raises an exception in the end."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and not any(isinstance(each, ast.Return) for each in ast.walk(handler))


# -- Nodes of a syntax tree that call an evaluator's methods ------------------------------------------------


HERE = "__here__"


class NoSource(Exception):
    """Error for a function without readable source, or with syntax not supported by the instrumentation."""


def _line(node: Any) -> int:
    """Return the line number of a frame while it computes ``node``: for ``x.view(…)``, the line of ``view``."""
    named = node.func if isinstance(node, ast.Call) else node
    line: int = (named.end_lineno if isinstance(named, ast.Attribute) else None) or node.lineno
    return line


class NodeMaker(ast.NodeTransformer):
    """Part of the instrumentation that makes nodes.

    Args:
        written: names of outside variables that the code may bind.
    """

    def __init__(self, written: Collection[str]) -> None:
        self._written = written
        self._count = 0

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

    @staticmethod
    def _loaded(name: str, at: Any) -> ast.expr:
        return ast.copy_location(ast.Name(name, ast.Load()), at)

    @staticmethod
    def _stored(name: str, value: ast.expr, at: Any) -> ast.stmt:
        """Return ``name = value``, for a local."""
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), at)

    def _local(self) -> str:
        self._count += 1
        return f"__here_{self._count}__"

    def _truth(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, ast.Constant) else self._here("truth", node, node)

    def _hashed(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, (ast.Constant, ast.Starred)) else self._here("key", node, node)

    def _written_to(self, name: str, value: ast.expr, at: Any) -> ast.expr:
        """Return ``value`` to be bound to ``name``, refused at run time for an outside variable."""
        return self._here("write_name", at, ast.Constant(name), value) if name in self._written else value

    def _statements(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            made = self.visit(statement)
            yield from made if isinstance(made, list) else [made]

    def _refuse(self, node: Any) -> Any:
        raise NoSource(f"line {node.lineno} holds a {type(node).__name__}")


def at_attribute(attribute: ast.Attribute, node: ast.expr | None = None) -> ast.expr:
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


# -- Rewriting of a function's syntax tree ------------------------------------------------------------------


_CALLED_AS_WRITTEN = {"locals"}  # it reads the caller's frame
_AUGMENTED = {
    ast.Add: "iadd", ast.Sub: "isub", ast.Mult: "imul", ast.Div: "itruediv", ast.FloorDiv: "ifloordiv",
    ast.Mod: "imod", ast.Pow: "ipow", ast.LShift: "ilshift", ast.RShift: "irshift", ast.BitOr: "ior",
    ast.BitXor: "ixor", ast.BitAnd: "iand", ast.MatMult: "imatmul",
}  # fmt: skip
_COMPARED = {ast.Is: "is_", ast.IsNot: "is_not", ast.Eq: "eq", ast.NotEq: "ne", ast.In: "in_", ast.NotIn: "not_in"}


def _is_formatted(part: ast.expr) -> bool:
    return isinstance(part, ast.FormattedValue)


class Transformer(NodeMaker):
    """Instrumentation of one definition and of all code defined in it."""

    def __init__(self, code: types.CodeType, definition: ast.FunctionDef, class_name: str) -> None:
        self._definition, self._class = definition, class_name.lstrip("_")
        bound, read = bound_names(definition), loaded_globally(code)
        self._globals, self._free = read - bound, {*code.co_freevars} - bound - {"__class__"}
        self._noted = (read & bound, {*code.co_freevars} & bound)
        declared = (node.names for node in ast.walk(definition) if isinstance(node, (ast.Global, ast.Nonlocal)))
        super().__init__({*chain(*declared)} & ({*code.co_freevars} | read | stored_globally(code)))
        self._first: list[str] = []

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

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        decorators, node.decorator_list = [self.visit(each) for each in node.decorator_list], []
        made: list[ast.stmt] = [*self._checked(node.name, node), self._function(node)]
        for decorator in reversed(decorators):
            call = self._here("call", node, decorator, self._loaded(node.name, node))
            made.append(self._stored(node.name, call, node))
        return made

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return self._function(node)

    visit_AsyncFunctionDef = visit_ClassDef = visit_Await = visit_AsyncFor = visit_AsyncWith = NodeMaker._refuse
    visit_Match = NodeMaker._refuse

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
        return self._here("attr", at_attribute(node), owner, ast.Constant(self._mangled(node.attr)))

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

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _CALLED_AS_WRITTEN or (name in ("vars", "dir") and not node.args):
            return node
        if name == "super" and not node.args:
            own = self._loaded("__class__", node)
            return self._here("super", node, own, self._loaded(self._first[-1], node))
        arguments = [self.visit(each) for each in node.args]
        keywords = [
            ast.keyword(k.arg, self.visit(k.value) if k.arg else self._here("mapping", k.value, self.visit(k.value)))
            for k in node.keywords
        ]
        at = at_attribute(node.func, node) if isinstance(node.func, ast.Attribute) else node
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
        if isinstance(node.op, ast.Invert):
            return self._here("inverted", node, operand)
        made = self._truth(operand) if isinstance(node.op, ast.Not) else self._operand(operand)
        return ast.copy_location(ast.UnaryOp(node.op, made), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        *tested, last = [self.visit(each) for each in node.values]
        return ast.copy_location(ast.BoolOp(node.op, [*map(self._truth, tested), last]), node)

    def _tested(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = self._truth(node.test)
        return node

    visit_If = visit_While = visit_IfExp = visit_Assert = _tested

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        node.value = self._here("displayed", node, self.visit(node.value))
        if node.format_spec is not None:
            self.generic_visit(node.format_spec)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        self.generic_visit(node)
        return self._here("formatted", node, node) if any(map(_is_formatted, node.values)) else node

    def visit_comprehension(self, node: ast.comprehension) -> list[ast.comprehension]:
        if not assigns_names_only(node.target):
            raise NoSource("a comprehension assigns to an attribute or item")
        made = self._clauses(node.target, self._here("iterate", node.iter, self.visit(node.iter)))
        made[0].is_async = node.is_async
        made[-1].ifs = [self._truth(self.visit(each)) for each in node.ifs]
        return made

    def _clauses(self, target: Any, items: ast.expr) -> list[ast.comprehension]:
        """Return the clauses for ``for target in items``: one more for each part to unpack, over a list of it alone."""
        if isinstance(target, ast.Name):
            return [ast.comprehension(target, items, [], 0)]
        whole, inner = self._local(), list[ast.comprehension]()
        bare = type(target)([self._part(each, inner) for each in target.elts], ast.Store())
        first = ast.comprehension(ast.Name(whole, ast.Store()), items, [], 0)
        unpacked = self._alone(self._here("iterate", target, self._loaded(whole, target)))
        return [first, ast.comprehension(bare, unpacked, [], 0), *inner]

    def _part(self, target: Any, inner: list[ast.comprehension]) -> Any:
        """Return a name or starred name to unpack to instead of ``target``, and add the clauses that unpack it."""
        if isinstance(target, ast.Starred):
            return ast.Starred(self._part(target.value, inner), ast.Store())
        if isinstance(target, ast.Name):
            return target
        name = self._local()
        inner += self._clauses(target, self._alone(self._loaded(name, target)))
        return ast.Name(name, ast.Store())

    @staticmethod
    def _alone(value: ast.expr) -> ast.expr:
        return ast.copy_location(ast.List([value], ast.Load()), value)

    # -- imports ----------------------------------------------------------------------------------------------

    def _imported(self, node: Any, file: str, level: int, names: Sequence[str]) -> ast.expr:
        return self._here("imported", node, *map(self._constant, (file, level, tuple(names))))

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for alias in node.names:
            value, (first, *below) = self._imported(node, alias.name, 0, ()), alias.name.split(".")
            for name in below if alias.asname else ():
                value = self._here("import_from", node, value, ast.Constant(name))
            made += self._assigned(ast.Name(alias.asname or first, ast.Store()), value, node)
        return made

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        module = self._local()
        file = self._imported(node, node.module or "", node.level, [alias.name for alias in node.names])
        made = [self._stored(module, file, node)]
        for alias in node.names:
            value = self._here("import_from", node, self._loaded(module, node), ast.Constant(alias.name))
            made += self._assigned(ast.Name(alias.asname or alias.name, ast.Store()), value, node)
        return made

    # -- writes -----------------------------------------------------------------------------------------------

    def _assigned(self, target: Any, value: ast.expr, at: Any) -> list[ast.stmt]:
        """Return the statements for ``target = value``."""
        if isinstance(target, ast.Attribute):
            name = ast.Constant(self._mangled(target.attr))
            return [self._statement("set_attr", at, self.visit(target.value), name, value)]
        if isinstance(target, ast.Subscript):
            return [self._statement("set_item", at, self.visit(target.value), self._key(target.slice), value)]
        if isinstance(target, ast.Name):
            return [self._stored(target.id, self._written_to(target.id, value, at), at)]
        later: list[ast.stmt] = []
        bare = type(target)([self._name_only(each, later, at) for each in target.elts], ast.Store())
        return [ast.copy_location(ast.Assign([bare], self._here("iterate", at, value)), at), *later]

    def _name_only(self, target: Any, later: list[ast.stmt], at: Any) -> Any:
        """Return a name or starred name to assign instead of ``target``, and add the assignment from it to ``later``.

        Names of the function's own variables are returned as they are.
        """
        if isinstance(target, ast.Starred):
            return ast.Starred(self._name_only(target.value, later, at), ast.Store())
        if isinstance(target, ast.Name) and target.id not in self._written:
            return target
        name = self._local()
        later += self._assigned(target, self._loaded(name, at), at)
        return ast.copy_location(ast.Name(name, ast.Store()), at)

    def visit_Assign(self, node: ast.Assign) -> Any:
        value = self.visit(node.value)
        if len(node.targets) == 1 and not isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            return self._assigned(node.targets[0], value, node)
        name = self._local()  # the value is computed before the object to set a part of is looked up
        made = [self._stored(name, value, node)]
        for target in node.targets:
            made += self._assigned(target, self._loaded(name, node), node)
        return made

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))
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
        bound = [self._stored(owner, self.visit(target.value), node)]
        loaded = self._loaded(owner, node)
        if isinstance(target, ast.Attribute):
            methods, name = ("attr", "set_attr"), self._constant(self._mangled(target.attr))
        else:
            methods, name = ("item", "set_item"), self._loaded(key, node)
            bound.append(self._stored(key, self._key(target.slice), node))
        made = self._here("augmented", node, operation, self._here(methods[0], node, loaded, name), value)
        return [*bound, self._statement(methods[1], node, loaded, name, made)]

    def visit_Delete(self, node: ast.Delete) -> Any:
        made: list[ast.stmt] = []
        for target in _flat(node.targets):
            if isinstance(target, ast.Attribute):
                name = ast.Constant(self._mangled(target.attr))
                made.append(self._statement("del_attr", node, self.visit(target.value), name))
            elif isinstance(target, ast.Subscript):
                made.append(self._statement("del_item", node, self.visit(target.value), self._key(target.slice)))
            else:
                made += [*self._checked(target.id, node), ast.copy_location(ast.Delete([target]), node)]
        return made

    def _checked(self, name: str, at: Any) -> list[ast.stmt]:
        """Return a statement that refuses to bind or delete ``name``, for an outside variable."""
        written = self._written_to(name, none := ast.copy_location(ast.Constant(None), at), at)
        return [] if written is none else [ast.copy_location(ast.Expr(written), at)]

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        node.value = self._written_to(node.target.id, self.visit(node.value), node)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        if node.type is not None:
            node.type = self.visit(node.type)
            node.type = self._written_to(node.name, node.type, node) if node.name else node.type
        node.body = list(self._statements(node.body))
        return node

    def visit_YieldFrom(self, node: ast.YieldFrom) -> Any:
        node.value = self._here("iterate", node, self.visit(node.value))
        return node

    def visit_For(self, node: ast.For) -> Any:
        node.iter = self._here("iterate", node.iter, self.visit(node.iter))
        later: list[ast.stmt] = []
        node.target = self._name_only(node.target, later, node)
        node.body = [*later, *self._statements(node.body)]
        node.orelse = list(self._statements(node.orelse))
        return node

    def visit_Try(self, node: Any) -> Any:
        """Mark the body of a ``try`` statement with a handler that does not raise the exception again."""
        self.generic_visit(node)
        if not all(map(raises_again, node.handlers)):
            entered = ast.withitem(self._here("protected", node))
            node.body = [ast.copy_location(ast.With([entered], node.body), node)]
        return node

    visit_TryStar = visit_Try

    def visit_With(self, node: ast.With) -> Any:
        """Return one statement for each item, in another, as what an item binds may be read by the next."""
        made: list[ast.stmt] = []
        entered: list[tuple[ast.withitem, list[ast.stmt]]] = []
        for item in node.items:
            later: list[ast.stmt] = []
            item.context_expr = self._here("context", item.context_expr, self.visit(item.context_expr))
            if item.optional_vars is not None:
                item.optional_vars = self._name_only(item.optional_vars, later, node)
            entered.append((item, later))
        made = list(self._statements(node.body))
        for item, later in reversed(entered):
            made = [ast.copy_location(ast.With([item], [*later, *made]), node)]
        return made


def _flat(targets: Sequence[ast.expr]) -> Iterator[Any]:
    for target in targets:
        yield from _flat(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]
