"""Generated functions: compiled once for like sources, with code, name and source lines of their own."""

from __future__ import annotations

import gc
import linecache
import traceback
import weakref

import pytest

from schedule.util.generated_code import code_of, generated

SOURCE = "def outer(x):\n    def inner():\n        return scale / x\n    return inner()\n"


def test_like_functions_have_their_own_globals_code_and_file() -> None:
    first, second = (generated(SOURCE, "outer", {"scale": scale}, "test") for scale in (2, 3))
    assert (first(4), second(4)) == (0.5, 0.75)
    assert first.__code__ is not second.__code__
    assert first.__code__.co_filename != second.__code__.co_filename


def test_tracebacks_show_the_source_of_nested_functions() -> None:
    function = generated(SOURCE, "outer", {"scale": 1}, "test")
    with pytest.raises(ZeroDivisionError) as caught:
        function(0)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [frame.line for frame in frames] == ["return inner()", "return scale / x"]
    assert {frame.filename for frame in frames} == {function.__code__.co_filename}


def test_nothing_stays_of_a_function_that_is_freed() -> None:
    function = generated(SOURCE, "outer", {"scale": 1}, "test")
    filename, code = function.__code__.co_filename, weakref.ref(function.__code__)
    assert filename in linecache.cache
    del function
    gc.collect()
    assert code() is None
    assert filename not in linecache.cache


def test_code_has_the_given_file_throughout() -> None:
    code = code_of(SOURCE, "<here>")
    (outer,) = (each for each in code.co_consts if hasattr(each, "co_code"))
    (inner,) = (each for each in outer.co_consts if hasattr(each, "co_code"))
    assert {code.co_filename, outer.co_filename, inner.co_filename} == {"<here>"}
