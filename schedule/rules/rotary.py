"""Rotary position embedding in one pass, of queries and keys together if they share cos and sin.

::

    before:  q = q * cos + torch.cat((-q[..., 32:], q[..., :32]), dim=-1) * sin;  k = …
    after:   q, k = fused.rotary_embedding(q, k, cos, sin, unsqueeze_dim=None, turned=(None, 32))

It covers half-split (LLaMA) and interleaved (GPT-J, Cohere) pairs, of the whole head or of its first part (GPT-NeoX,
Phi), in the dtype of the model or in float32. A query or key rotated alone becomes one operation too. The sizes at
which the code takes the tensors apart are passed on: where they are not the parts of pairs, the op computes what is
written.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import fused
from fused.checks import agrees
from fused.rotary import HALF
from schedule.capture import TensorSpec, leaves
from schedule.patterns import GraphMatch, any_of, scalar
from schedule.rules import rotary_forms as forms
from schedule.rules.casts import Dtypes, Value, cast, cast_node, floating
from schedule.rules.constant_sizes import is_half, operation, reads_any
from schedule.rules.rule import DEFAULT, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "rotary_embedding"

# -- patterns -----------------------------------------------------------------------------------------------

Turn = Callable[[Value, str], Value]


def _half_turned(x: Value, name: str) -> Value:
    parts, half = torch.chunk(x, 2, dim=-1), f"{name}_half"
    halves = _apart(x, name, (2, -1)).unbind(-2)
    first = any_of(x[..., : scalar(half)], parts[0], halves[0], name="first")
    second = any_of(x[..., scalar(half) :], parts[1], halves[1], name="second")
    return torch.cat((-second, first), dim=-1)


def _apart(x: Value, name: str, parts: tuple[int, int]) -> Value:
    """Match a view with the last dimension taken apart into these parts, one of them 2."""

    def are_parts(sizes: Any) -> bool:
        return isinstance(sizes, (tuple, list)) and tuple(sizes) == parts

    shape, sizes = scalar(f"{name}_viewed"), scalar(f"{name}_parts", where=are_parts)
    return any_of(x.reshape(shape), x.view(shape), x.unflatten(-1, sizes), name="apart")


def _every_second(x: Value, starts: tuple[int | None, ...]) -> Value:
    ways = [x[..., slice(start, None, 2)] for start in starts]
    return any_of(*ways, *(x[:, :, :, slice(start, None, 2)] for start in starts), name="every_second")


def _pairs_turned(x: Value, name: str) -> Value:
    both = _apart(x, name, (-1, 2)).unbind(-1)
    first = any_of(_every_second(x, (None, 0)), both[0], name="first")
    second = any_of(_every_second(x, (1,)), both[1], name="second")
    pairs = torch.stack((-second, first), dim=-1)
    return any_of(pairs.flatten(-2), pairs.reshape(scalar(f"{name}_joined")), name="joined")


def _turned(turn: Turn, x: Value, name: str) -> Value:
    """Match ``x * cos + turned(x) * sin`` with the casts of x in models."""
    wide = cast(f"{name}_before")(x)
    across = any_of(
        turn(wide, name),
        cast(f"{name}_turned")(turn(x, name)),
        turn(cast(f"{name}_apart")(x), name),
        name="across",
    )
    return cast(f"{name}_after")(wide * floating("cos") + across * floating("sin"))


def _partly(turn: Turn, name: str) -> Value:
    """Match the first part turned, and the rest passed through."""
    x, width = floating(name), f"{name}_width"
    first = any_of(x[..., : scalar(width)], x[:, :, :, : scalar(width)], name="turned_part")
    rest = any_of(x[..., scalar(width) :], x[:, :, :, scalar(width) :], name="passed_part")
    return torch.cat((_turned(turn, first, name), rest), dim=-1)


def _whole(turn: Turn, name: str) -> Value:
    return _turned(turn, floating(name), name)


def _patterns(turn: Turn) -> tuple[Callable[..., Value], ...]:
    def both_partly_turned(q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return _partly(turn, "q"), _partly(turn, "k")

    def both_turned(q: Value, k: Value, cos: Value, sin: Value) -> Value:
        return _whole(turn, "q"), _whole(turn, "k")

    def partly_turned(q: Value, cos: Value, sin: Value) -> Value:
        return _partly(turn, "q")

    def turned(q: Value, cos: Value, sin: Value) -> Value:
        return _whole(turn, "q")

    return both_partly_turned, both_turned, partly_turned, turned


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(interleaved: bool, graph_match: GraphMatch) -> str:
    dtypes = Dtypes.of(graph_match)
    cos, sin = dtypes.spec("cos"), dtypes.spec("sin")
    if cos is None or sin is None or (cos.shape, cos.dtype, cos.device) != (sin.shape, sin.dtype, sin.device):
        return "cos and sin are not alike"
    for name, out in zip(_turning(graph_match.inputs), graph_match.outputs, strict=True):
        x = dtypes.spec(name)
        if x is None or x.device != cos.device or not _broadcasts(cos, x, spec_of(out)):
            return f"cos and sin do not broadcast to {name}"
        reason = (
            _no_split(graph_match, name, x, cos.shape[-1])
            or _not_apart(graph_match.scalars, name, (*x.shape[:-1], cos.shape[-1]), interleaved)
            or _unlike(dtypes, name, x, spec_of(out))
        )
        if reason:
            return reason
    return ""


def _turning(inputs: dict[str, Any]) -> list[str]:
    return [name for name in ("q", "k") if name in inputs]


def _broadcasts(cos: TensorSpec, x: TensorSpec, out: TensorSpec | None) -> bool:
    leading = zip(reversed(cos.shape[:-1]), reversed(x.shape[:-1]), strict=False)
    fits = cos.ndim <= x.ndim and all(a in (1, b) for a, b in leading)
    return fits and cos.shape[-1] % 2 == 0 and out is not None and out.shape == x.shape


def _no_split(graph_match: GraphMatch, name: str, x: TensorSpec, turned: int) -> str:
    """Return the reason if the turned part or its swapped halves do not fit the fused op, else ""."""
    inputs, scalars = graph_match.inputs, graph_match.scalars
    width, half = scalars.get(f"{name}_width"), scalars.get(f"{name}_half")
    if turned != (x.shape[-1] if width is None else _size(width)):
        return "cos and sin are not as wide as what is turned"
    if half is not None and _size(half) != turned // 2:
        return "the parts that change places are not halves"
    if any(reads_any(size, set(graph_match.nodes)) for _, size in leaves(_turned_parts(inputs, scalars, name))):
        return "the sizes of the parts are read from values that the fused op does not compute"
    return ""


def _not_apart(scalars: dict[str, Any], name: str, shape: tuple[int, ...], interleaved: bool) -> str:
    """Return the reason if what is viewed as pairs or halves of the turned part is anything else, else ""."""
    *leading, width = shape
    parts = (width // 2, 2) if interleaved else (2, width // 2)
    for step, wanted in (("viewed", (*leading, *parts)), ("joined", shape)):
        view = _size(scalars.get(f"{name}_{step}"))
        if view is not None and not agrees([_size(size) for size in view], wanted):
            return f"{name} is not viewed as the {'pairs' if interleaved else 'halves'} of what is turned"
    return ""


def _turned_parts(inputs: dict[str, Any], scalars: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Return the width of the part that is turned and where its halves are split, as the fused op takes them."""
    width, half = scalars.get(f"{name}_width"), scalars.get(f"{name}_half")
    views = scalars.get(f"{name}_viewed"), scalars.get(f"{name}_joined")
    if views != (None, None) or scalars.get(f"{name}_parts") is not None:
        return width, views
    return width, HALF if is_half(half, lambda tensor: _is_part(tensor, inputs[name], width)) else half


def _is_part(value: Any, x: Any, width: Any) -> bool:
    """Check whether ``value`` is ``x`` up to ``width``, or all of it if this is None, perhaps cast."""
    while value is not x and operation(value) in ("cast", "to", "type_as"):
        value = value.args[0]
    if width is None or value is x:
        return width is None and value is x
    index = value.args[1] if operation(value) == "getitem" and value.args[0] is x else None
    return isinstance(index, tuple) and index[-1] == slice(None, width, None) and not _cuts(index[:-1])


def _cuts(index: tuple[Any, ...]) -> bool:
    return any(each is not Ellipsis and each != slice(None) for each in index)


def _size(value: Any) -> Any:
    """Return a size, with the recorded value for a computed one."""
    return value.meta.get("spec") if isinstance(value, fx.Node) else value


def _unlike(dtypes: Dtypes, name: str, x: TensorSpec, out: TensorSpec | None) -> str:
    narrow = dtypes.narrowed(x.dtype, *(f"{name}_{step}" for step in ("before", "turned", "apart")))
    if narrow is not None:
        return f"{x.dtype} is turned in {narrow}, which the fused op does not imitate"
    return "" if out is not None and _dtypes(dtypes, name)[1] == out.dtype else "its dtype is not known"


def _profitability(graph_match: GraphMatch) -> str:
    return small("rotary", spec_of(graph_match.inputs["q"]))


# -- the replacement ----------------------------------------------------------------------------------------


def _dtypes(dtypes: Dtypes, name: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the result dtypes of the fused op and of the construct."""
    x = dtypes.seen(name)
    turned = dtypes.joined(dtypes.after(x.dtype, f"{name}_before"), "cos")
    turned = torch.promote_types(turned, dtypes.cast(f"{name}_turned") or dtypes.cast(f"{name}_apart") or turned)
    wanted = dtypes.after(turned, f"{name}_after")
    passed = dtypes.scalars.get(f"{name}_width") is not None
    return dtypes.joined(x.dtype, "cos"), torch.promote_types(wanted, x.dtype) if passed else wanted


def _widened(graph: fx.Graph, dtypes: Dtypes, name: str) -> Any:
    """Return x, cast to the dtype of the construct if it is wider than the fused op's result."""
    given, wanted = _dtypes(dtypes, name)
    x = dtypes.inputs[name]
    return x if torch.promote_types(given, wanted) == given else cast_node(graph, x, wanted)


def _out_dtype(dtypes: Dtypes, name: str) -> dict[str, torch.dtype]:
    """Return the option for the dtype of the construct where it is not the one of the fused op, else no option."""
    given, wanted = _dtypes(dtypes, name)
    return {"out_dtype": wanted} if torch.promote_types(given, wanted) != wanted else {}


def _rule(turn: Turn, name: str, interleaved: bool, proof: Proof) -> Rule:
    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        dtypes, names, angles = Dtypes(inputs, scalars), _turning(inputs), (inputs["cos"], inputs["sin"])
        given = [_widened(graph, dtypes, each) for each in names]
        kinds: list[dict[str, Any]] = [
            {"turned": _turned_parts(inputs, scalars, each), **_out_dtype(dtypes, each)} for each in names
        ]
        options: dict[str, Any] = {"interleaved": True} if interleaved else {}
        if len(names) == 2 and kinds[0] == kinds[1]:
            options |= {"unsqueeze_dim": None, **kinds[0]}
            both = graph.call_function(fused.rotary_embedding, (*given, *angles), options)
            return [graph.call_function(operator.getitem, (both, n)) for n in range(2)]
        made = [
            graph.call_function(fused.apply_rotary, (x, *angles), {**options, **kind})
            for x, kind in zip(given, kinds, strict=True)
        ]
        return made if len(made) == 2 else made[0]

    return register_rule(
        Rule(
            name=name,
            family=FAMILY,
            patterns=_patterns(turn),
            build=build,
            proof=proof,
            summary=f"fused.rotary_embedding(q, k, cos, sin{', interleaved=True' if interleaved else ''})",
            extra_check=functools.partial(_extra_check, interleaved),
            profitability=_profitability,
            sets=DEFAULT,
        )
    )


# -- the rules ----------------------------------------------------------------------------------------------


ROTARY = _rule(
    _half_turned,
    "rotary_embedding",
    interleaved=False,
    proof=Proof(
        (
            *forms.of_transformers(forms.rotate_half, forms.rotate_half_fixed),
            forms.of_diffusers(forms.rotate_viewed_halves),
        ),
        forms.inputs,
        forms.SHAPES,
        refused=(forms.backwards, forms.of_another, forms.no_halves, forms.of_diffusers(forms.pairs_for_halves)),
    ),
)
INTERLEAVED = _rule(
    _pairs_turned,
    "rotary_embedding_interleaved",
    interleaved=True,
    proof=Proof(
        (
            *forms.of_transformers(forms.rotate_pairs, forms.rotate_every_two),
            *map(forms.of_diffusers, (forms.rotate_viewed_pairs, forms.rotate_unflattened_pairs)),
        ),
        forms.inputs,
        forms.SHAPES,
        refused=(
            forms.odd_first,
            forms.of_another,
            forms.of_diffusers(forms.halves_for_pairs),
            forms.of_diffusers(forms.viewed_otherwise),
        ),
    ),
)
