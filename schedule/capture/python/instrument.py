"""Instrumented copies of Python functions: every read, write and call goes through an evaluator.

::

    y = self.act(x) if self.config.flag else x        # as written
    y = here.call(here.attr(self, "act"), x) if here.truth(here.attr(here.attr(self, "config"), "flag")) else x

The user's function, its module and its class are not changed: a copy of the function is made from its source, with the
same file, lines, defaults and closure. Only the tracing thread calls the copy.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import types
import weakref
from typing import Any

from schedule.capture.python.transform import HERE, NoSource, Transformer

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_PYTEST = "@pytest_ar"  # a name in functions whose assert statements pytest has replaced
_codes: weakref.WeakKeyDictionary[types.CodeType, types.CodeType] = weakref.WeakKeyDictionary()
_originals: weakref.WeakKeyDictionary[types.CodeType, weakref.ref[types.CodeType]] = weakref.WeakKeyDictionary()


def instrumented(function: types.FunctionType, here: Any) -> types.FunctionType:
    """Copy ``function`` with its code instrumented to go through ``here``.

    Raises:
        NoSource: its source cannot be read.
    """
    code = function.__code__
    if code not in _codes:
        _codes[code] = _instrumented_code(function)
        _originals[_codes[code]] = weakref.ref(code)
    made = _codes[code]
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) | {HERE: types.CellType(here)}
    closure = tuple(cells[name] for name in made.co_freevars)
    copy = types.FunctionType(made, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy


def is_instrumented(function: types.FunctionType) -> bool:
    """Check whether ``function`` is an instrumented copy, or defined inside one."""
    return HERE in function.__code__.co_freevars


def original_code(code: types.CodeType) -> types.CodeType:
    """Return the user's code for an instrumented copy, or ``code`` itself."""
    found = _originals.get(code)
    return code if found is None else (found() or code)


# -- finding the source -------------------------------------------------------------------------------------


def _instrumented_code(function: types.FunctionType) -> types.CodeType:
    code = function.__code__
    try:
        definition = _definition(function)
    except (OSError, SyntaxError, IndexError, TypeError) as error:
        raise NoSource(f"its source cannot be read ({type(error).__name__})") from error
    class_name = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    transformed = Transformer(code, definition, class_name).result()
    parameters = [ast.arg(name) for name in (*code.co_freevars, HERE)]
    arguments = ast.arguments([], parameters, None, [], [], None, [])
    given = ast.Return(ast.Name(transformed.name, ast.Load()))
    outer = _function("outer", arguments, [transformed, given])
    module = ast.fix_missing_locations(ast.Module([outer], []))
    compiled = compile(module, code.co_filename, "exec", code.co_flags & _FUTURE, dont_inherit=True)
    made = _nested(_nested(compiled, "outer"), transformed.name)
    return made.replace(co_name=code.co_name, co_qualname=code.co_qualname)


def _nested(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _definition(function: types.FunctionType) -> ast.FunctionDef:
    code = function.__code__
    frozen = code.co_filename.startswith("<frozen")
    file = str(function.__globals__.get("__file__", "")) if frozen else code.co_filename
    lines = linecache.getlines(file, function.__globals__)
    if not lines:
        raise OSError("no source")
    flags, first = code.co_flags & _FUTURE, code.co_firstlineno
    block = inspect.getblock(lines[first - 1 :])
    indented = block[0][:1].isspace()
    try:
        codes = _codes_in("".join(lines), flags)
    except SyntaxError:  # a page with code in it
        codes = _codes_in("\n" * (first - 1 - indented) + "".join(["if 1:\n"] * indented + block), flags)
    name = next((each.co_name for each in codes.get(first, ()) if _are_same(each, code)), None)
    if name is None and _PYTEST not in code.co_names:
        raise NoSource("its source has changed since it was loaded")
    if code.co_name == "<lambda>":
        return _lambda(code, lines)
    tree = ast.parse("".join([*(["if 1:\n"] if indented else []), *block]))
    ast.increment_lineno(tree, first - 1 - indented)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == (name or code.co_name):
            return node
    raise OSError("no definition")


@functools.lru_cache(maxsize=64)
def _codes_in(source: str, flags: int) -> dict[int, list[types.CodeType]]:
    """Return first line → code of the functions in a source, compiled with these flags of ``__future__``."""
    found, by_line = [compile(source, "", "exec", flags, dont_inherit=True)], dict[int, list[types.CodeType]]()
    for code in found:
        by_line.setdefault(code.co_firstlineno, []).append(code)
        found += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return by_line


def _are_same(source: types.CodeType, code: types.CodeType) -> bool:
    """Check whether ``code`` is the code in a source, up to names and flags.

    torch 2.15 renames its wrappers, and a flag of Python 3.14 tells whether a function was defined in a class.
    """
    return source == code.replace(co_name=source.co_name, co_qualname=source.co_qualname, co_flags=source.co_flags)


def _lambda(code: types.CodeType, lines: list[str]) -> ast.FunctionDef:
    """Find a lambda by the line and columns of its code, and return it as a function definition."""
    found = [
        node
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
    ]
    columns = {(line, column) for line, _, column, end in code.co_positions() if line and column is not None and end}
    inside = [node for node in found if (node.body.lineno, node.body.col_offset) in columns]
    if len(inside) != 1 and len(found) != 1:
        raise OSError("several lambdas")
    node = inside[0] if len(inside) == 1 else found[0]
    returned = ast.copy_location(ast.Return(node.body), node.body)
    return ast.copy_location(_function("_lambda_", node.args, [returned]), node)


def _function(name: str, arguments: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    later: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}  # Python 3.12
    return ast.FunctionDef(name=name, args=arguments, body=body, decorator_list=[], **later)
