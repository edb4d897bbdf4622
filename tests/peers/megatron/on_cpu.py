"""A pytest plugin (``-p on_cpu``) with which code written for one CUDA device runs on the CPU, in one gloo process.

Tensors meant for CUDA are made on the CPU, random states of the device are those of the CPU, streams and events do
nothing. What cannot be had so (CUDA graphs, memory statistics, NCCL, Transformer Engine) fails or is skipped as it
does on such a machine. `torch.cuda.is_available` says yes, so that tests are not skipped for its sake.
"""

from __future__ import annotations

import contextlib
import os
import sys
import typing
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typing_extensions
from torch import nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _on_cpu(value: Any) -> Any:
    """Return the CPU for a CUDA device, and anything else as it is."""
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return CPU if named or (isinstance(value, torch.device) and value.type == "cuda") else value


class CudaIsCpu(TorchFunctionMode):
    """Make and move tensors on the CPU wherever a call names a CUDA device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with the CPU in place of every CUDA device."""
        if func is torch.Tensor.cuda:
            return args[0]
        given = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if isinstance(given.get("device"), int):
            given["device"] = CPU
        return func(*map(_on_cpu, args), **given)


class _Idle:
    """A stream or event: entered, recorded and waited for without effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Idle]:
        return _idle

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *exc: object) -> None: ...


def _idle(*args: Any, **kwargs: Any) -> _Idle:
    return _Idle()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Put the stand-ins in place, before anything of Megatron is imported."""
    typing.override = getattr(typing, "override", typing_extensions.override)
    torch._dynamo.config.disable = True  # what Megatron compiles computes the same uncompiled
    _device(torch.cuda)
    _random_states(torch.cuda)
    _processes()
    data: Any = ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    data.download_and_extract_asset = lambda assets_dir: None
    sys.modules[data.__name__] = data
    CudaIsCpu().__enter__()


def _device(cuda: Any) -> None:
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.device = lambda device: contextlib.nullcontext()
    properties = SimpleNamespace(name="CPU", major=8, minor=0, multi_processor_count=1, total_memory=2**34)
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: properties.name
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    for name in ("set_device", "synchronize", "empty_cache", "set_stream", "_lazy_init", "init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.memory.empty_cache = cuda.empty_cache
    cuda._lazy_call = lambda call, **how: call()
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = _Idle
    cuda.stream = cuda.current_stream = cuda.default_stream = _idle
    cuda.nvtx.range = cuda.nvtx.range_push = cuda.nvtx.range_pop = _idle


def _random_states(cuda: Any) -> None:
    cuda.default_generators = (torch.default_generator,)
    cuda.initial_seed = torch.initial_seed
    for module in (cuda, cuda.random):
        module.manual_seed = module.manual_seed_all = torch.default_generator.manual_seed
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


def _processes() -> None:
    os.environ["MASTER_PORT"] = "0"  # any that is free
    begin = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        begin("gloo", *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.new_group = lambda *args, **kwargs: dist.group.WORLD  # there is one process, and a group of gloo costs threads


def pytest_collection() -> None:
    """Use Megatron's own layers where specs ask for those of Transformer Engine, and recompute without its FP8."""
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.tensor_parallel.random as recomputation
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    recomputation.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    recomputation.activation_recompute_forward = lambda **settings: contextlib.nullcontext()
    recomputation.fp8_autocast = lambda **settings: contextlib.nullcontext()

    class NormAndLinear(ColumnParallelLinear):  # type: ignore[misc]
        """A normalization and the column-parallel layer after it, with the parameters of Transformer Engine's."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **settings: Any) -> None:
            super().__init__(input_size, output_size, config=config, **settings)
            self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
            if config.normalization == "LayerNorm":
                self.layer_norm_bias = nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            """Normalize and map."""
            weight, eps = self.layer_norm_weight, self.config.layernorm_epsilon
            if self.config.normalization == "LayerNorm":
                x = F.layer_norm(x, weight.shape, weight, self.layer_norm_bias, eps)
            else:
                x = F.rms_norm(x, weight.shape, weight, eps)
            return super().forward(x, *args, **kwargs)

    class Provider(specs.LocalSpecProvider):  # type: ignore[misc, name-defined]
        """Megatron's own layers, under the names that specs for Transformer Engine ask for."""

        def linear(self) -> type:
            """Return a layer for a small output, which is not sharded over several ranks."""
            return ColumnParallelLinear

        def fuse_layernorm_and_linear(self) -> bool:
            """Have no other module for the normalization."""
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            """Return the two in one."""
            return NormAndLinear

    specs.TESpecProvider, specs.TENorm = Provider, specs.LNImpl
