"""Models that ``optimize`` is given and that are not what it hopes for: it says so, and computes what they did."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel

import fused
import schedule
from schedule.report.report import Report
from schedule.runtime.scheduled import state_of

Tensor = torch.Tensor
X = torch.linspace(-2, 2, 24).reshape(3, 8)


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with fused.backend("reference"):
        yield


class MLP(nn.Module):
    def __init__(self, fc1: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = fc1 or nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), MLP())


def scheduled(module: nn.Module) -> list[str]:
    return [path for path, each in module.named_modules() if state_of(each) is not None]


def optimized(module: nn.Module, x: Tensor = X) -> Report:
    return schedule.optimize(module, x, cost_guard=False)


# -- nothing to do --------------------------------------------------------------------------------------------


def test_no_construct() -> None:
    module = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)).eval()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    report = optimized(module, X[None])
    assert report.entries == [] and report.applied == {} and len(set(report.measure().values())) == 1
    assert report.sentence == "No rule is about anything in this model: nothing was changed." in str(report)
    assert scheduled(module) == [] and type(module) is nn.Sequential and not module.training
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_scheduled_twice() -> None:
    module = model()
    assert optimized(module).applied == {"bias_gelu": 2}
    states, expected = [state_of(each) for each in module.modules()], module(X)
    again = optimized(module)
    assert again.applied == {} and [state_of(each) for each in module.modules()] == states
    assert torch.equal(module(X), expected)


# -- inputs that do not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (torch.ones(2, 3), RuntimeError),
        ((X, X), TypeError),
        ({"y": X}, TypeError),
        (torch.ones(3, 8, dtype=torch.int64), RuntimeError),
        (X.double(), RuntimeError),
        ("a text", TypeError),
    ],
)
def test_inputs_that_the_model_refuses(batch: Any, error: type[Exception]) -> None:
    module = MLP()
    with pytest.raises(schedule.NotApplicable, match=r"refused the example inputs[\s\S]*forward\(self, x") as caught:
        schedule.optimize(module, batch)
    assert isinstance(caught.value.__cause__, error)
    assert type(module) is MLP and module.training


# -- weights that are no floating numbers ---------------------------------------------------------------------


class Quantized(nn.Linear):
    """A Linear of 8-bit weights with a scale for each row, as bitsandbytes and torchao write it."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 100
        self.weight = nn.Parameter((self.weight.detach() / scale).to(dtype), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Dequantized(torch.autograd.Function):
    """A product of its own, forward and backward, as bitsandbytes' ``MatMul8bitLt``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale).t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, scale = ctx.saved_tensors
        return 2 * grad @ (weight.to(grad.dtype) * scale), None, None, grad.sum(0)


class WithOwnProduct(Quantized):
    def forward(self, x: Tensor) -> Tensor:
        return Dequantized.apply(x, self.weight, self.scale, self.bias)


class LoRA(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


LINEARS: dict[str, Callable[[], nn.Module]] = {
    "int8": lambda: Quantized(8, 16, torch.int8),
    "fp8": lambda: Quantized(8, 16, torch.float8_e4m3fn),
    "product of its own": lambda: WithOwnProduct(8, 16, torch.int8),
    "LoRA": lambda: LoRA(8, 16),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_with_a_forward_of_its_own_is_named_and_never_bypassed(name: str) -> None:
    module = nn.Sequential(MLP(LINEARS[name]()), MLP())
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, X)
    report = schedule.optimize(sch, cost_guard=False)
    assert report.applied == {"bias_gelu": 1} and scheduled(module) == ["1"]
    (entry,) = report.select(status="declined")
    assert f"fc1 is a {torch.typename(module[0].fc1)}, which stays as it is" in entry.reason
    assert alike(module, twin)
    schedule.verify(sch, X, steps=1)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization")
def test_dynamically_quantized() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(MLP(), {nn.Linear}, dtype=torch.qint8)
    expected = module(X)
    (entry,) = optimized(module).entries
    assert entry.status == "declined" and "fc1 is a torch.ao.nn.quantized.dynamic" in entry.reason
    assert torch.equal(module(X), expected) and scheduled(module) == []


def test_whatever_runs_next_to_a_quantized_layer_is_still_rewritten() -> None:
    module = MLP()
    module.fc2 = Quantized(16, 8, torch.int8)  # type: ignore[assignment]
    twin = copy.deepcopy(module)
    assert optimized(module).applied == {"bias_gelu": 1}
    assert alike(module, twin)


def test_out_projection_of_an_attention_keeps_its_class() -> None:
    module = MLP(NonDynamicallyQuantizableLinear(8, 16))
    twin = copy.deepcopy(module)
    optimized(module)
    assert type(module.fc1) is NonDynamicallyQuantizableLinear and alike(module, twin)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_no_op_is_for(dtype: torch.dtype) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(8).to(dtype), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu((x + self.shift).real) if dtype.is_complex else F.relu(x + self.shift.to(x.dtype))

    module, x = Shifted(), torch.arange(-8, 8).reshape(2, 8).to(dtype if dtype == torch.int32 else torch.float32)
    expected = module(x)
    report = optimized(module, x)
    assert torch.equal(module(x), expected)
    assert all(entry.reason for entry in report.entries if entry.status != "applied")
    assert report.applied == {} or dtype == torch.float8_e4m3fn


# -- in the middle of a life ----------------------------------------------------------------------------------


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(X).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_in_the_middle_of_training() -> None:
    module, twin = model(), model()
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, twin))
    assert train(module, ours, 3) == train(twin, theirs, 3)
    report = optimized(module)
    assert all(p is q for p, q in zip(module.parameters(), ours.param_groups[0]["params"], strict=True))
    assert len(report.measure()) == 2 and report.timed(1).rounds == 1  # neither touches parameters or their state
    torch.testing.assert_close(train(module, ours, 4), train(twin, theirs, 4), rtol=1e-5, atol=1e-6)
    assert report.fallbacks == {}


def test_with_gradients_that_wait_for_the_next_step() -> None:
    module, twin = model(), model()
    for each in (module, twin):
        each(X).sum().backward()
    optimized(module)
    for each in (module, twin):
        each(X).sum().backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# -- wrapped for several devices ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("gloo") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sharded(module: Any) -> nn.Module:
    mesh = DeviceMesh("cpu", [0])
    for each in module:
        fully_shard(each, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _sharded_inside(module: Any) -> nn.Module:
    mesh = DeviceMesh("cpu", [0])
    for each in module:
        fully_shard(each.fc1, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _fsdp1(module: nn.Module, whole: bool) -> nn.Module:
    policy = ModuleWrapPolicy({MLP})
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=whole, auto_wrap_policy=policy
    )


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": _sharded,
    "FSDP": lambda module: _fsdp1(module, True),
    "FSDP, flat parameters": lambda module: _fsdp1(module, False),
}


def trained(module: nn.Module) -> list[Tensor]:
    """Losses and gradients of the input over some steps; parameters may be flat, or sharded."""
    module.train()
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.05), []
    for _ in range(3):
        x = X.clone().requires_grad_()
        optimizer.zero_grad()
        loss = module(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        assert x.grad is not None
        found += [loss.detach(), x.grad]
    return found


def alike(module: nn.Module, twin: nn.Module) -> bool:
    torch.testing.assert_close(trained(module), trained(twin))
    return True


@pytest.mark.unreplayable("FSDP's modules do not copy")
@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("first", ["schedule", "wrap"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped(name: str, first: str) -> None:
    module = model()
    if first == "schedule":
        report = optimized(module)
        wrapped = WRAPPERS[name](module)
    else:
        wrapped = WRAPPERS[name](module)
        report = optimized(wrapped)
    assert report.applied == {"bias_gelu": 2}
    assert len(report.measure()) == 2
    assert alike(wrapped, model()) and report.fallbacks == {}


@pytest.mark.unreplayable("FSDP's modules do not copy")
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.usefixtures("_one_process")
def test_sharded_at_each_linear() -> None:
    """Its weight is whole only while it is called, so what it computes is never taken out of it."""
    wrapped = _sharded_inside(model())
    report = optimized(wrapped)
    assert report.applied == {} and scheduled(wrapped) == []
    assert ["fc1 is a torch" in entry.reason and "FSDPLinear" in entry.reason for entry in report.entries] == [True] * 2
    assert alike(wrapped, model())
    module = model()
    report = optimized(module)
    wrapped = _sharded_inside(module)
    assert alike(wrapped, model()) and report.fallbacks.keys() == {"0", "1"}
    reasons = {state_of(each).adaptations[0].declined.why for each in module}  # type: ignore[union-attr]
    assert reasons == {"nothing of what was rewritten occurs in it"}
