"""What the package assumes of torch, CPython and transformers beyond their documented interfaces: one table.

Each row has a self-test, and what is done without it. A failing test turns off that one feature:
``fxschedule doctor`` names it. The environment variable ``FXSCHEDULE_WITHOUT`` turns features off by name.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import importlib
import importlib.util
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

ENVIRONMENT_VARIABLE = "FXSCHEDULE_WITHOUT"
CLASS_VERSION_OFFSET = 48 * ctypes.sizeof(ctypes.c_void_p)
"""Of ``tp_version_tag`` in ``PyTypeObject``."""


@dataclass(frozen=True)
class Assumption:
    """One assumption about another project's private names or behavior.

    Attributes:
        name: name of the feature that needs it.
        names: private names that must exist.
        otherwise: how the package does without the feature.
        seen: releases that the assumption was seen to hold on.
        test: whether the names behave as assumed; None if their existence is enough.
    """

    name: str
    names: tuple[str, ...]
    otherwise: str
    seen: str = "torch 2.11 to 2.15"
    test: Callable[[], bool] | None = None

    @property
    def concerns_installed(self) -> bool:
        """Whether the library of the names is installed; without it, the feature is not missed."""
        roots = {name.partition(".")[0] for name in self.names}
        return all(root in sys.modules or importlib.util.find_spec(root) is not None for root in roots)


@functools.cache
def holds(name: str) -> bool:
    """Run the self-test of the assumption ``name``, once per process."""
    assumption = _BY_NAME[name]
    if name in _turned_off():
        return False
    try:
        for each in assumption.names:
            _resolved(each)
        return assumption.test is None or assumption.test()
    except Exception:  # whatever a release raises that differs
        return False


def private(assumption: str, name: str, otherwise: Any = None) -> Any:
    """Return the object with a private name, or ``otherwise`` if the assumption does not hold."""
    return _resolved(name) if holds(assumption) else otherwise


def unavailable(assumption: str) -> Callable[..., Any]:
    """Return a function to call in place of a private one without which a feature cannot work.

    The function raises NotImplementedError.
    """

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{assumption} cannot be used with torch {torch.__version__}: {_BY_NAME[assumption].otherwise}"
        )

    return raising


def failing() -> Iterator[Assumption]:
    """Yield the assumptions that do not hold here, of libraries that are installed."""
    for each in TABLE:
        if each.concerns_installed and not holds(each.name):
            yield each


def _turned_off() -> set[str]:
    return {name.strip() for name in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",")} - {""}


def _resolved(name: str) -> Any:
    """Import the module that a dotted name begins with, and look the rest up.

    Raises:
        AttributeError, ImportError: there is no such name.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module of {name}")


# -- self-tests ---------------------------------------------------------------------------------------------


def _dict_versions_change() -> bool:
    """Check whether each kind of change of a dict gives it a version it never had.

    Attributes of instances are entries of a dict too, but CPython 3.13.0 changes those without telling the dict.
    """
    version = _resolved("torch._C._dynamo.guards.dict_version")
    instance = type("Instance", (), {})()
    instance.kept, instance.removed = 1, 2
    entries = vars(instance)
    seen = [version(entries)]

    def set_often(value: int) -> None:  # the interpreter specializes what it runs often
        instance.kept = value
        seen.append(version(entries))

    for change in (
        lambda: entries.update(kept=2),
        lambda: entries.update(added=3),
        lambda: entries.pop("removed"),
        lambda: entries.__setitem__("kept", 1),
        lambda: setattr(instance, "kept", 2),
        lambda: setattr(instance, "other", 3),
        lambda: delattr(instance, "other"),
        entries.clear,
    ):
        change()
        seen.append(version(entries))
    for value in range(50):
        set_often(value)
    return len(set(seen)) == len(seen)


def _class_versions_change() -> bool:
    """Check whether this interpreter keeps versions of classes where CPython does."""
    base = type("Base", (), {"value": 1})
    derived = type("Derived", (base,), {})
    version, seen = ctypes.c_uint.from_address(id(derived) + CLASS_VERSION_OFFSET), []
    for change in (None, lambda: setattr(base, "value", 2), lambda: setattr(derived, "other", 3)):
        if change is not None:
            change()
            if version.value in seen:
                return False
        getattr(derived, "value", None)  # a lookup gives a class a version
        seen.append(version.value)
    return 0 not in seen and len(set(seen)) == len(seen)


def _bytecode_is_known() -> bool:
    """Check whether stores, method calls, globals and caught exceptions have the instructions that are looked for."""

    def sample(self: Any) -> None:
        self.stored = 1
        self.method()
        try:
            print(self)
        except ValueError:
            print()

    found = list(dis.get_instructions(sample))
    methods = [
        before.opname
        for before, each in itertools.pairwise(found)
        if each.argval == "method" and (each.opname == "LOAD_METHOD" or "NULL|self" in each.argrepr)
    ]
    named = {(each.opname, each.argval) for each in found}
    return (
        ("STORE_ATTR", "stored") in named
        and ("LOAD_GLOBAL", "print") in named
        and any(each.opname == "CHECK_EXC_MATCH" for each in found)
        and any(each.opname.startswith("RETURN_") for each in found)
        and len(methods) == 1
        and methods[0].startswith("LOAD_FAST")
    )


def _functions_are_applied_by_name() -> bool:
    from fused.torch_internals.functions import applied_class

    class Own(torch.autograd.Function):
        pass

    return applied_class(Own.apply) is Own and applied_class(torch.relu) is None


def _attention_is_chosen() -> bool:
    query = torch.zeros(1, 1, 2, 8)
    return isinstance(torch._fused_sdp_choice(query, query, query), int)


def _operators_are_overridden() -> bool:
    library = torch.library.Library("aten", "IMPL")
    library._destroy()
    return True


def _tensor_data_has_an_address() -> bool:
    return bool(_resolved("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr"))


def _functions_take_other_arguments() -> bool:
    copy = _resolved("torch.fx._symbolic_trace._patch_function")(lambda a, *b, **c: (a, b, c), 3)
    return copy(1, 2, 3) == (1, 2, 3)


def _compiled_checks_register() -> bool:
    # torch 2.14 has new names for these, and writes a note for each use of the old ones.
    return any(importlib.util.find_spec(name) for name in ("torch._custom_class_base", "torch._opaque_base"))


TABLE: tuple[Assumption, ...] = (
    Assumption(
        "versions of dicts",
        ("torch._C._dynamo.guards.dict_version",),
        "guards on dicts look up each entry; CPython 3.13.0 does not tell dicts of new values of attributes",
        "Python 3.11 and 3.14",
        _dict_versions_change,
    ),
    Assumption(
        "versions of classes",
        (),
        "guards on classes look up each name",
        "Python 3.11 to 3.14",
        _class_versions_change,
    ),
    Assumption(
        "bytecode of methods",
        (),
        "methods named like questions are taken to change state, and context managers to catch exceptions",
        "Python 3.11 to 3.14",
        _bytecode_is_known,
    ),
    Assumption(
        "autograd functions",
        (),
        "modules that apply an autograd function of the user are not traced",
        test=_functions_are_applied_by_name,
    ),
    Assumption(
        "guards in compiled code",
        (
            "torch._C._dynamo.eval_frame.set_code_exec_strategy",
            "torch._C._dynamo.eval_frame._FrameExecStrategy",
            "torch._C._dynamo.eval_frame._FrameAction.SKIP",
        ),
        "torch.compile compiles the original forwards of scheduled modules",
        test=_compiled_checks_register,
    ),
    Assumption(
        "stored kernels",
        ("torch._inductor.runtime.cache_dir_utils.cache_dir",),
        "each process compiles its kernels for the CPU anew",
        test=_tensor_data_has_an_address,
    ),
    Assumption(
        "sizes in symbols",
        (
            "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol",
            "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode",
            "torch._dynamo.source.ConstantSource",
            "torch.utils._sympy.interp.sympy_interp",
            "torch._dispatch.python.enable_python_dispatcher",
        ),
        "graphs are guarded on the sizes that only torch's shape functions compute",
    ),
    Assumption(
        "choice of attention kernels",
        ("torch._fused_sdp_choice",),
        "fused attention runs its formula",
        test=_attention_is_chosen,
    ),
    Assumption(
        "corrected batch norms",
        ("torch.library.Library._destroy",),
        "verify compares with torch's own gradients of batch norms of one sample, which some releases get wrong",
        test=_operators_are_overridden,
    ),
    Assumption(
        "copies of functions",
        ("torch.fx._symbolic_trace._patch_function",),
        "torch.fx does not trace scheduled modules with variable arguments",
        test=_functions_take_other_arguments,
    ),
    Assumption(
        "autocast of any device",
        ("torch._C._is_any_autocast_enabled",),
        "each call checks autocast of its device",
    ),
    Assumption(
        "cached parametrizations",
        ("torch.nn.utils.parametrize._cache_enabled",),
        "models must not be scheduled, or called in new ways, inside of torch.nn.utils.parametrize.cached()",
    ),
    Assumption(
        "selective checkpoints",
        ("torch.utils.checkpoint._CachingTorchDispatchMode", "torch.utils.checkpoint._CachedTorchDispatchMode"),
        "fused ops run their formulas inside selective checkpoints",
    ),
    Assumption(
        "saved-tensor hooks",
        ("torch._C._autograd._saved_tensors_hooks_is_enabled",),
        "layers save their inputs rather than compute them again",
    ),
    Assumption(
        "forward-mode derivatives",
        ("torch.autograd.forward_ad._current_level",),
        "fused ops have no forward-mode derivatives",
    ),
    Assumption(
        "batched gradients",
        ("torch._C._functorch.is_legacy_batchedtensor",),
        "torch.autograd.grad(is_grads_batched=True) fails at fused ops",
    ),
    Assumption(
        "tables of process groups",
        (
            "torch.distributed.distributed_c10d._get_group_size_by_name",
            "torch.distributed.distributed_c10d._resolve_process_group",
        ),
        "models are not sharded over processes",
    ),
    Assumption(
        "strided shards",
        ("torch.distributed.tensor.placement_types._StridedShard",),
        "packed weights are not sharded",
    ),
    Assumption(
        "offsets of shards",
        ("torch.distributed.tensor._utils.compute_local_shape_and_global_offset",),
        "fused ops gather DTensors first",
    ),
    Assumption(
        "states of optimizers",
        ("torch.distributed.checkpoint.state_dict._init_optim_state",),
        "optimizers of sharded models are loaded after their first step only",
    ),
    Assumption(
        "masks of transformers",
        (
            "transformers.masking_utils._vmap_expansion_sdpa",
            "transformers.masking_utils._non_vmap_expansion_sdpa",
            "transformers.masking_utils.TransformGetItemToIndex",
        ),
        "models that make their masks under torch.vmap are not traced from the root",
        "transformers 5.0 to 5.24",
    ),
    Assumption(
        "linear layers of transformers",
        ("transformers.pytorch_utils.Conv1D",),
        "Conv1D layers are matched as the functions they call",
        "transformers 5.0 to 5.24",
    ),
)
"""All assumptions, by the feature that needs them."""

_BY_NAME = {each.name: each for each in TABLE}

for _name in sorted(_turned_off() - _BY_NAME.keys()):
    warnings.warn(
        f"{ENVIRONMENT_VARIABLE}: no feature is called {_name!r}; `fxschedule doctor --features` lists them",
        stacklevel=2,
    )
