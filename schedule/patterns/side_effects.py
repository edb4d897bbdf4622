"""Side effects of nodes (mutation, random numbers, unknown code), and memory shared between values."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx, nn

from fused.torch_internals.tensor_kinds import storage_of
from fused.torch_internals.torch_kernels import NATIVE_MODULES
from schedule.capture import (
    MESSAGES,
    QUIET,
    REGION_FUNCTIONS,
    SHARES,
    Constant,
    changed,
    changes_object,
    drops,
    first_argument,
    has_own_forward,
    installed_forward,
    is_batch_norm,
    original_class,
    updated_state,
    uses_random,
)
from schedule.patterns import optable  # the import fills the vocabulary
from schedule.patterns.match_regions import reads_metadata
from schedule.patterns.ops import (
    DEFINITIONS,
    METHODS,
    PURE,
    VIEWS,
    CannotBind,
    Form,
    arguments_of,
    find_form,
    is_tensor_method,
    operation_of,
)

_GLOBAL_PREFIXES = ("set_", "_set", "manual_seed", "seed", "use_", "_enter", "_exit")
_PURE_MODULES = frozenset(
    (
        *("torch", "torch.functional", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft"),
        *NATIVE_MODULES,
        *("_operator", "operator", "math"),
    )
)
_CONTAINERS = (list, tuple, dict, torch.Size)
_PURE_NUMBERS = frozenset(optable.PURE_NUMBERS)


@dataclass(frozen=True)
class Effects:
    """Side effects of one node.

    Attributes:
        mutates: the fx nodes whose values it changes.
        rng: it draws random numbers.
        opaque: it is unknown code, which may change any of its arguments, and hidden state.
        fresh: its value shares memory with no other value.
        barrier: it changes the meaning of every operation after it (grad mode, autocast, the seed).
        in_place: its value is the one that it changes, and shares memory with no other.
        state: storages of running statistics that it updates, or reads.
    """

    mutates: tuple[fx.Node, ...] = ()
    rng: bool = False
    opaque: bool = False
    fresh: bool = False
    barrier: bool = False
    in_place: bool = False
    state: frozenset[Hashable] = frozenset()

    @property
    def pure(self) -> bool:
        """Whether the node has no side effects, so it may be moved, or erased once unused."""
        return not (self.mutates or self.rng or self.opaque or self.barrier or self.state)


FRESH, VIEW, OPAQUE = Effects(fresh=True), Effects(), Effects(opaque=True)
BARRIER = Effects(opaque=True, barrier=True)


def is_plain_module(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Check whether ``module`` computes exactly the operation of its class, with no hooks or patched forward."""
    return (
        module is not None
        and operation_of(type(module)) is not None
        and "forward" not in module.__dict__
        and arguments_of(module) is not None
        and not any(getattr(module, hooks) for hooks in _HOOKS)
    )


def is_known_layer(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """Check whether ``module`` is plain, or a batch norm with no hooks or patched forward."""
    return is_plain_module(module) or (module is not None and is_batch_norm(type(module)) and _is_untouched(module))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def effects(node: fx.Node, modules: Mapping[str, nn.Module] | None = None) -> Effects:
    """Return the effects of one node, with unknown code as opaque."""
    found = _effects(node, modules)
    draws, shares = found.rng or bool(node.meta.get("draws")), bool(node.meta.get(SHARES))
    return replace(found, rng=draws, fresh=found.fresh and not shares)


def _effects(node: fx.Node, modules: Mapping[str, nn.Module] | None) -> Effects:
    if node.op == "call_function":
        return _function_effects(node)
    if node.op == "call_method":
        return _method_effects(node, str(node.target))
    if node.op == "call_module":
        return _module_effects(node, (modules or {}).get(str(node.target)))
    return VIEW if node.op != "output" else OPAQUE


def _form_effects(node: fx.Node, form: Form) -> Effects:
    try:
        bound, mutates = form.bind(node.args, node.kwargs)
    except CannotBind:
        bound, mutates = dict(node.kwargs), form.mutates
    found = tuple(dict.fromkeys((*(first_argument(node) if mutates else ()), *changed(node))))
    changed_values = set(found).difference(updated_state(node))
    fresh, in_place = not (form.definition.view or changed_values), bool(mutates) and len(changed_values) == 1
    return Effects(found, _draws(form, bound), fresh=fresh, in_place=in_place)


def _draws(form: Form, bound: Mapping[str, Any]) -> bool:
    if not form.definition.rng:
        return drops(bound.get("dropout_p", 0), True)  # the argument of scaled_dot_product_attention
    return drops(bound.get("p"), bound.get("training", True))


def _function_effects(node: fx.Node) -> Effects:
    target: Any = node.target
    if target in REGION_FUNCTIONS or target in MESSAGES:
        return BARRIER
    if node.meta.get(QUIET):
        return VIEW
    if reads_metadata(node) or target in _PURE_NUMBERS or isinstance(target, Constant):
        return FRESH
    if target in _CONTAINERS or target in VIEWS or getattr(target, "__module__", "") == "torch.return_types":
        return VIEW
    if target in PURE:
        return Effects(rng=PURE[target], fresh=True)
    form = find_form("call_function", target)
    if form is not None:
        return _form_effects(node, form)
    name = getattr(target, "__name__", "")
    if name == "setitem":
        return Effects(changed(node))
    if is_tensor_method(target):
        return _method_effects(node, name)
    module = getattr(target, "__module__", None) or ""
    if module == "fused" or module.startswith("fused."):
        return Effects(changed(node), rng=_fused_draws(node), fresh=True)
    if module in _PURE_MODULES:
        return _named_effects(node, name)
    return BARRIER if module.split(".")[0] == "torch" else OPAQUE


def _fused_draws(node: fx.Node) -> bool:
    """Check whether a fused op draws random numbers.

    It does if it has a dropout probability that is not the constant 0 and runs in training mode.
    """
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True
    bound.apply_defaults()
    given = bound.arguments
    chances = [v for k, v in given.items() if k in ("p", "dropout_p", "dropout")]
    return any(drops(chance, given.get("training", True)) for chance in chances)


def _named_effects(node: fx.Node, name: str) -> Effects:
    """Return the effects of a torch function outside the vocabulary, judged by torch's naming conventions."""
    return BARRIER if name.startswith(_GLOBAL_PREFIXES) else Effects(changed(node), uses_random(node))


def _method_effects(node: fx.Node, name: str) -> Effects:
    if name == "__setitem__":
        return Effects(changed(node))
    if reads_metadata(node):
        return FRESH
    if node.meta.get("opaque"):  # a method of a stateful object, such as a cache
        return OPAQUE if changes_object(node) else VIEW
    form = METHODS.get(name)
    if form is not None:
        return _form_effects(node, form)
    if hasattr(torch.Tensor, name) or hasattr(torch.Size, name):
        return _named_effects(node, name)
    return OPAQUE


def _module_effects(node: fx.Node, module: nn.Module | None) -> Effects:
    if module is not None and _is_untouched(module):
        cls = original_class(module)
        if is_batch_norm(cls):
            return Effects(fresh=True, state=frozenset(map(storage_of, module.buffers())))
        if cls is nn.Sequential and has_own_forward(cls):
            return _sequential_effects([_module_effects(node, child) for child in module.children()])
    if not is_plain_module(module):
        forward = None if module is None else installed_forward(module)
        return replace(OPAQUE, fresh=getattr(forward, "is_fresh", False))
    name, given = str(operation_of(type(module))), arguments_of(module) or {}
    if given.get("inplace"):
        return Effects(first_argument(node), in_place=True)
    draws = "dropout" in name and drops(given.get("p"), given.get("training"))
    return Effects(rng=draws, fresh=not DEFINITIONS[name].view)


def _is_untouched(module: nn.Module) -> bool:
    """Check whether calling ``module`` runs the forward of its class, or a scheduled graph of it, and no hooks."""
    hooked = any(getattr(module, hooks) for hooks in _HOOKS)
    return not hooked and "forward" not in vars(module) and installed_forward(module) is None


def _sequential_effects(layers: Sequence[Effects]) -> Effects:
    """Return the effects of layers called one after another, the first with the arguments of the node."""
    if any(layer.opaque for layer in layers):
        return OPAQUE
    fresh = [number for number, layer in enumerate(layers) if layer.fresh]
    reaching = layers[: fresh[0]] if fresh else layers  # what they change is an argument
    mutates = next((layer.mutates for layer in reaching if layer.mutates), ())
    state = frozenset[Hashable]().union(*(layer.state for layer in layers))
    return Effects(mutates, any(layer.rng for layer in layers), fresh=bool(fresh), state=state)


def memory_of(
    node: fx.Node, modules: Mapping[str, nn.Module] | None, seen: dict[fx.Node, frozenset[fx.Node]]
) -> frozenset[fx.Node]:
    """Return the values ``node`` may share memory with: itself and, for a view, its bases.

    ``seen`` caches the results.
    """
    stack = [node]
    while stack:
        current = stack[-1]
        if current in seen:
            stack.pop()
            continue
        known = effects(current, modules)
        if known.fresh or current.op in ("placeholder", "get_attr"):
            seen[current] = frozenset((current,))
            continue
        below = list(known.mutates) if known.in_place else current.all_input_nodes
        waiting = [n for n in below if n not in seen]
        if waiting:
            stack.extend(waiting)
            continue
        seen[current] = frozenset((current,)).union(*(seen[n] for n in below))
    return seen[node]
