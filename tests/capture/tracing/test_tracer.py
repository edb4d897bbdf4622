"""The tracer on the idioms of modeling code: each graph must be right at other shapes, and say when it is not."""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import FallbackWarning, state_of
from schedule.util.errors import TraceError
from tests.capture.running import assert_same, schedule_all


class Factories(nn.Module):
    def forward(self, x):
        b, s = x.shape[:2]
        steps = torch.arange(s, device=x.device)
        return (
            x
            + torch.zeros(b, s, 1)
            + torch.ones((b, 1, 1))
            + torch.full((1, s, 1), 2.0)
            + steps[None, :, None]
            + torch.tensor(s)
            + x.new_zeros(s, 1)
        )


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(64).expand(1, -1))
        self.scale = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x):
        b, s, h = x.size()
        positions = self.positions[:, :s].expand(b, s)
        scale = self.scale.expand(b, -1, -1).reshape(b, 1, h)
        return x * scale + positions.unsqueeze(-1)


class Splitting(nn.Module):
    def forward(self, x):
        half = x.shape[-1] // 2
        a, b = x.split(half, dim=-1)
        c, d = torch.chunk(x, 2, dim=-1)
        return torch.cat((-b, a), dim=-1) + torch.cat((c, d), dim=-1)


class StarredShapes(nn.Module):
    def forward(self, x):
        y = x.view(*x.shape[:-1], 2, -1)
        z = y.reshape(x.shape[:-1] + (x.shape[-1],))  # noqa: RUF005 (torch.Size arithmetic is the point)
        return z.view(-1, z.size(-1)).view(*z.size())


class Masks(nn.Module):
    def forward(self, x):
        s = x.shape[1]
        mask = torch.full((s, s), torch.finfo(x.dtype).min)
        mask = torch.triu(mask, diagonal=1)
        mask[0, 0] = 0.5
        y = x.clone()
        y[:, -1] += 1
        y.mul_(2.0)
        return torch.matmul(mask.softmax(-1), y)


class KeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, *, shift=None, **kwargs):
        if shift is not None:
            x = x + shift
        return self.inner(x, **kwargs)


class Inner(nn.Module):
    def forward(self, x, flag=False, pair=None, table=None):
        if flag:
            x = x * 2
        if pair is not None:
            x = x + pair[0] - pair[1]
        return x + table["bias"] if table else x


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    extra: dict[str, torch.Tensor] | None = None


class Structures(nn.Module):
    def forward(self, x):
        pair = Pair(x + 1, x * 2)
        values, indices = torch.max(x, dim=-1)
        return {"result": Result(pair.first, {"second": pair.second}), "list": [values, (indices, None)], "pair": pair}


class Regions(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().amax()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
            y = x @ x.transpose(-1, -2)
        return y.float() * scale

    @torch.no_grad()
    def helper(self, x):
        return x * 2


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x * 2


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.layer(x)) + self.layer.weight.sum()


class Counted(nn.Module):
    """A loop over a size is a branch on it: the graph holds for that size only."""

    def forward(self, x):
        for i in range(x.shape[0]):
            x = x + i
        return x


class ByType(nn.Module):
    def forward(self, x, mask=None):
        if not isinstance(x, torch.Tensor):
            raise TypeError(x)
        if x.dim() == 3 and x.dtype.is_floating_point and len(x.shape) == 3:
            x = x * 3
        return x if mask is None else x.masked_fill(mask, 0.0)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = 0.25

    def forward(self, x):
        x = F.dropout(x, self.p, self.training)
        return x * (2 if self.training else 3)


MODULES = [
    Factories, Buffers, Splitting, StarredShapes, Masks, Structures, Regions, Decorated, Twice, ByType, Dropping,
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", MODULES, ids=lambda m: m.__name__)
def test_graph_is_right_at_other_shapes(make, training):
    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module)
    schedule_all(module, torch.randn(2, 5, 6))
    module.train(training), twin.train(training)
    for rows, length in ((2, 5), (3, 7), (1, 2)):
        x = torch.randn(rows, length, 6)
        torch.manual_seed(1)
        expected = twin(x.clone())
        torch.manual_seed(1)
        assert_same(module(x.clone()), expected)
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert state_of(module).fallbacks == 0


def test_keyword_arguments_containers_and_flags():
    module = KeywordsOnly()
    twin = copy.deepcopy(module)

    def arguments(rows):
        x = torch.randn(rows, 3)
        return dict(x=x, shift=x[:1], flag=True, pair=(x, x + 1), table={"bias": x})

    schedule_all(module, arguments(2))
    for rows in (2, 4):
        given = arguments(rows)
        assert_same(module(**given), twin(**given))
    assert state_of(module).fallbacks == 0
    given["flag"] = False
    with pytest.warns(FallbackWarning, match="flag=False"):
        assert_same(module(**given), twin(**given))
    assert_same(module(**given), twin(**given))
    assert state_of(module).fallbacks == 2


def test_positional_and_keyword_calls_are_one():
    module, x = ByType(), torch.randn(2, 5, 6)
    schedule_all(module, {"x": x, "mask": None})
    module(x), module(x, None), module(x=x), module(mask=None, x=x)
    assert state_of(module).fallbacks == 0


def test_wrong_arguments_get_the_forward_s_own_error():
    module = ByType()
    schedule_all(module, torch.randn(2, 5, 6))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"), pytest.warns(FallbackWarning):
        module(torch.randn(2, 5, 6), nonsense=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        module()


def test_branch_on_a_size_is_a_guard():
    module = Counted()
    twin = copy.deepcopy(module)
    schedule_all(module, torch.randn(2, 3))
    assert_same(module(torch.ones(2, 9)), twin(torch.ones(2, 9)))
    assert state_of(module).fallbacks == 0
    with pytest.warns(FallbackWarning):
        assert_same(module(torch.ones(4, 3)), twin(torch.ones(4, 3)))


def test_settings_are_guards():
    module = Dropping()
    twin = copy.deepcopy(module)
    schedule_all(module, torch.randn(2, 3))
    module.p = twin.p = 0.75
    torch.manual_seed(0)
    expected = twin(torch.ones(4, 4))
    torch.manual_seed(0)
    with pytest.warns(FallbackWarning):
        assert_same(module(torch.ones(4, 4)), expected)


def test_second_signature_is_another_specialization():
    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ByType()

        def forward(self, x):
            return self.inner(x) + self.inner(x, x > 0)

    root = Caller()
    twin = copy.deepcopy(root)
    made = schedule_all(root, torch.randn(2, 3, 4), only="inner")
    assert len(made) == 4
    x = torch.randn(3, 2, 4)
    assert_same(root(x), twin(x))
    assert state_of(root.inner).fallbacks == 0


def test_a_child_put_in_later_still_counts():
    module = Twice()
    schedule_all(module, torch.randn(2, 5, 6))
    x = torch.randn(2, 5, 6)
    before = module(x)
    module.layer = nn.Sequential(module.layer, nn.ReLU())
    module.layer.weight = module.layer[0].weight
    assert not torch.equal(module(x), before)


class DataDependent(nn.Module):
    def forward(self, x):
        if self.training and x.sum() > 0:  # the recorded run, in eval mode, does not tell
            return x
        return -x


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += x.shape[0]
        return x + 1


class Vanished(nn.Module):
    def __init__(self):
        super().__init__()
        tensor = torch.randn(3)
        self.read = lambda: tensor

    def forward(self, x):
        return x + self.read()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (DataDependent, "needs the data of a tensor"),
        (Stateful, "assigns attribute 'seen'"),
        (Vanished, "neither an input, a parameter"),
    ],
)
def test_untraceable_forwards_say_where_and_leave_the_module_alone(make, why):
    module, x = make(), torch.randn(2, 3)
    state, rng = dict(vars(module)), torch.get_rng_state()
    cls = type(module)
    module.train()
    recording = record(module, x)
    state = dict(vars(module))
    with pytest.raises(TraceError, match=why) as caught:
        specialize(module, cls.forward, recording.calls[module][0], recording, True)
    assert "test_tracer.py" in caught.value.where and caught.value.fix
    assert type(module) is cls and vars(module) == state and module.training
    assert torch.equal(rng, torch.get_rng_state())


def test_exceptions_leave_no_region_open():
    class Raising(nn.Module):
        def forward(self, x, y):
            with torch.no_grad(), torch.autocast("cpu"):
                return x @ y

    module = Raising()
    schedule_all(module, (torch.randn(2, 3), torch.randn(3, 4)))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        module(torch.randn(2, 3), torch.randn(5, 4))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert state_of(module).fallbacks == 0


def test_autocast_outside_is_not_answered_with_the_wrong_dtypes():
    class Casting(nn.Module):
        def forward(self, x, w):
            y = x @ w
            return y.float().to(y.dtype)

    module = Casting()
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    schedule_all(module, (x, w))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(FallbackWarning):
        assert module(x, w).dtype is torch.bfloat16


class AlwaysDropping(nn.Module):
    """Dropout that evaluation does not switch off, for estimates of uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.dropout(self.fc(x), 0.5, True))


def test_a_graph_that_draws_in_evaluation_is_compared_on_the_same_draws() -> None:
    sch = schedule.create_schedule(nn.Sequential(AlwaysDropping()), torch.randn(3, 4))
    assert len(sch["0"].specializations) == 2
    state = torch.get_rng_state()
    sch["0"].trace()
    assert torch.equal(torch.get_rng_state(), state)
