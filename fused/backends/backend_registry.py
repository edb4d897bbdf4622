"""Registry of the ops, with their formulas and the choice of an implementation for a call."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fused.backends import availability, inductor, onednn
from fused.backends.kernels import SMALL_ON_CPU
from fused.backends.selection import Choice, requested
from fused.backends.strides import in_memory_order, owned
from fused.backends.tracing import PLAIN, needs_reference
from fused.torch_internals.modes import count_dispatch_modes, without_dispatch_modes

Formula = Callable[..., Any]
Part = Literal["forward", "backward"]
Finish = Callable[[Any], Any]
Canonical = Callable[[Sequence[Any]], tuple[Sequence[Any], Finish]]
Operands = Callable[[Sequence[Any]], Sequence[Any]]

LOG = logging.getLogger("fxschedule.kernels")
PREFERENCE = {"cpu": ("inductor", "reference"), "cuda": ("triton", "inductor", "reference")}


@dataclass
class Op:
    """An op, defined by two formulas in plain torch, with faster implementations.

    Args:
        name: in `fused.backends()`.
        forward, backward: the formulas, ``formula(*args, **statics)`` with tensors, None and floats in `args`
            and hashable settings in `statics`. Differentiable plain torch operations without side effects.
        canonical: reshapes `args` to few ranks for compiled code; also returns a function to reshape the results back.
        operands: from the `args` of the forward formula, the operands of its sums and products in their order, if the
            formula is elementwise but for the last dimension. Its results then have the strides of eager torch on
            every backend. Other ops have contiguous results.
        pointwise: from the `args` of either part, whether it is elementwise in the last dimension as well.
        small_on_cpu: from the settings of a call, the number of elements below which plain torch is as fast on the CPU.
        kernels: the module with the Triton functions, which have the names and signatures of the formulas. It is
            imported when they first run.
        implementations: per backend and part, a function of the formula's signature.
    """

    name: str
    forward: Formula
    backward: Formula
    canonical: Canonical | None = None
    operands: Operands | None = None
    pointwise: Callable[[Sequence[Any]], bool] | None = None
    small_on_cpu: Callable[..., float] | None = None
    kernels: str | None = None
    implementations: dict[str, dict[Part, Formula]] = field(default_factory=dict)
    finish_forward: Formula | None = field(default=None, init=False)
    _logged: set[tuple[str, str]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ValueError(f"there is an op {self.name!r} already")
        OPS[self.name] = self

    def register(
        self, backend: str, *, forward: Formula, backward: Formula, finish_forward: Formula | None = None
    ) -> None:
        """Register formulas with better compiled code for "inductor", or kernels for "triton".

        All have the signatures of the reference formulas. A kernel may return NotImplemented for unsupported
        arguments; the next backend then runs. ``finish_forward(results, args, **statics)`` does in plain torch what
        would split the loop of compiled code, and returns the final results.
        """
        self.implementations[backend] = {"forward": forward, "backward": backward}
        if finish_forward is not None:
            self.finish_forward = finish_forward

    def run(self, part: Part, args: Sequence[Any], request: str | None = None, **statics: Hashable) -> Any:
        """Run the forward or the backward formula on the backend chosen for these arguments.

        Args:
            part: "forward" or "backward".
            args: tensors, None and floats; the first one is a tensor and sets the device.
            request: the requested backend, from `requested()` in the forward pass.
            statics: settings of the formula.
        """
        first: torch.Tensor = args[0]
        if torch.compiler.is_compiling():
            return self._formula(part)(*args, **statics)
        if (
            request == "reference"
            or (request is None and self._plain_is_better(first, statics))
            or needs_reference(args)
            or first.numel() == 0
        ):
            self._log(part, "plain torch", first, statics)
            return self._formula(part)(*args, **statics)
        if count_dispatch_modes():  # those of selective checkpointing, which recompute what they do not see
            with without_dispatch_modes():
                return self._run_first(part, args, request, statics)
        return self._run_first(part, args, request, statics)

    def _run_first(self, part: Part, args: Sequence[Any], request: str | None, statics: dict[str, Hashable]) -> Any:
        """Run a part on the first backend that has it for these arguments."""
        first: torch.Tensor = args[0]
        device = "cuda" if first.is_cuda else "cpu" if first.is_cpu else first.device.type  # the usual ones are quick
        for name in _candidates(device, request):
            problem = self._problem(name, device)
            if problem is None:
                result = self._run_on(name, part, args, statics, device)
                if result is not NotImplemented:
                    self._log(part, name, first, statics)
                    return result
            elif name in (request, "inductor") and not availability.is_broken(name, device):
                availability.warn_once(f"fused: not running on {name}: {problem}")
        return self._formula(part)(*args, **statics)

    def _log(self, part: Part, backend: str, first: torch.Tensor, statics: Mapping[str, Hashable]) -> None:
        """Log the backend of a call, once for each dtype, device and settings."""
        if not LOG.isEnabledFor(logging.INFO):
            return
        dtype, device = str(first.dtype).removeprefix("torch."), first.device.type
        told = f"{self.name} {part}: {backend} for {dtype} on {device}"
        settings = ", ".join(f"{name}={value}" for name, value in statics.items())
        if (told, settings) not in self._logged:
            self._logged.add((told, settings))
            facts = {"op": self.name, "part": part, "backend": backend, "dtype": dtype, "device": device}
            LOG.info("%s, %s", told, settings, extra={"fxschedule_facts": facts | dict(statics)})

    def _formula(self, part: Part) -> Formula:
        return self.forward if part == "forward" else self.backward

    def choose(self, device: str, request: str | None = None) -> Choice:
        """Return the backend of this op for large tensors on a device type, with the reason."""
        asked = f"{request} was asked for" if request else f"the default on {device}"
        problems = []
        chosen = "reference"
        for name in _candidates(device, request):
            problem = self._problem(name, device)
            if problem is None:
                chosen = name
                break
            problems.append(f"not {name}: {problem}")
        return Choice(self.name, device, chosen, "; ".join(problems) or asked)

    def _plain_is_better(self, tensor: torch.Tensor, statics: Mapping[str, Hashable]) -> bool:
        """Check whether the tensor is small on the CPU, or float64 (used as a reference for checks)."""
        if tensor.dtype == torch.float64:
            return True
        # Sizes of fake tensors may be symbols, on which the code must not branch.
        if not tensor.is_cpu or type(tensor) not in PLAIN:
            return False
        return tensor.numel() < (SMALL_ON_CPU if self.small_on_cpu is None else self.small_on_cpu(**statics))

    def _problem(self, backend: str, device: str) -> str | None:
        if backend == "triton" and self.kernels is None and "triton" not in self.implementations:
            return "this op has no Triton kernels yet"
        return availability.why_unavailable(backend, device)

    def _load_kernels(self, module: str) -> None:
        kernels = importlib.import_module(module)
        names = self.forward.__name__, self.backward.__name__
        self.register("triton", forward=getattr(kernels, names[0]), backward=getattr(kernels, names[1]))
        self.kernels = None

    def _implementation(self, backend: str, part: Part) -> Formula:
        if backend == "triton" and self.kernels is not None:
            self._load_kernels(self.kernels)
        return self.implementations[backend][part] if backend in self.implementations else self._formula(part)

    def _run_on(self, backend: str, part: Part, args: Sequence[Any], statics: dict[str, Hashable], device: str) -> Any:
        formula = self._implementation(backend, part)
        back = None
        if backend != "reference" and self.operands is not None:
            # The strides of a gradient are those of the incoming one.
            operands = self.operands(args) if part == "forward" else args[:1]
            args, back = in_memory_order(args, operands, last=self.pointwise is None or not self.pointwise(args))
        if backend == "inductor":
            results = self._compiled(formula, part, args, statics, device)
        else:
            results = formula(*args, **statics)
        if results is NotImplemented or backend == "reference":
            return results
        return owned(results if back is None else back(results))

    def _compiled(
        self, formula: Formula, part: Part, args: Sequence[Any], statics: dict[str, Hashable], device: str
    ) -> Any:
        finish = None
        if self.canonical is not None:
            args, finish = self.canonical(args)
        results = inductor.run(formula, args, statics, device)
        if part == "forward" and self.finish_forward is not None:
            results = self.finish_forward(results, args, **statics)
        return results if finish is None else finish(results)


OPS: dict[str, Op] = {}


def _candidates(device: str, request: str | None) -> tuple[str, ...]:
    """Return the backends to try, in order."""
    usual = PREFERENCE.get(device, ("reference",))
    return usual if request is None else (request, *[name for name in usual if name != request])


def backends(device: str | None = None) -> dict[str, Choice]:
    """Return the backend of each op on this machine, with the reason.

    Args:
        device: a device type, by default "cuda" if available, else "cpu".

    Returns:
        `Choice` by the name of the op, for large tensors. With every choice, plain torch runs under
        `torch.compile`, `torch.func` transforms and double backward, for tensor subclasses, and (unless a
        backend is forced) for float64, for small CPU tensors, and on the CPU for ops that torch runs in one pass.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    choices = {name: op.choose(kind, requested()) for name, op in OPS.items()}
    choices["linear"] = onednn.choose(kind, requested())
    return dict(sorted(choices.items()))
