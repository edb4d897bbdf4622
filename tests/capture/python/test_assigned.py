"""Attributes that a forward assigns: the graph assigns them when it is done, and reads what was assigned."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import schedule
from schedule.runtime.scheduled import FallbackWarning, install, state_of
from schedule.util.errors import TraceError


def scheduled(module, *example, flatten=True):
    """``module`` run by its graph, and a copy of it that is not."""
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, example).trace(flatten=flatten)
    install(module, sch.specializations)
    module(*example), twin(*example)  # the first call sets what there is to set
    return module, twin


def assert_alike(module, twin, *args):
    torch.testing.assert_close(module(*args), twin(*args))
    for path, child in twin.named_modules():
        ours = vars(module.get_submodule(path))
        for name, value in vars(child).items():
            if isinstance(value, (torch.Tensor, int, float, tuple)):
                torch.testing.assert_close(ours[name], value)


def assert_graph_alike(module, twin):
    """Both do the same for several numbers of rows, and ``module`` by its graph."""
    for rows in (3, 5, 2):
        assert_alike(module, twin, torch.randn(rows, 4))
    assert state_of(module).fallbacks == 0


class Rotary(nn.Module):
    """Keeps what a later call needs, as transformers' models of images keep ``rope_deltas``."""

    def __init__(self):
        super().__init__()
        self.deltas, self.sizes = None, ()

    def forward(self, x):
        if self.deltas is None or x.shape[0] > 1:
            self.deltas = x.mean(dim=0)
            self.sizes = (x.shape[0], self.deltas)
        return x + self.deltas * self.sizes[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.linear = Rotary(), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.rotary(x))


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@pytest.mark.parametrize("make", [Rotary, Model])
def test_a_tensor_is_assigned_by_the_graph_and_read_back(make):
    module, twin = scheduled(make(), torch.randn(3, 4))
    assert_graph_alike(module, twin)
    rotary = getattr(module, "rotary", module)
    assert rotary.sizes[0] == 2 and not type(rotary.deltas).__name__.startswith("Fake")


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_a_tensor_that_is_gone_or_of_another_kind_runs_the_original_forward():
    module, twin = scheduled(Rotary(), torch.randn(3, 4))
    for gone in (None, torch.ones(4, dtype=torch.float64), torch.ones(1, 4)):
        module.deltas = twin.deltas = gone
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert_alike(module, twin, torch.randn(3, 4))
    assert state_of(module).fallbacks == 3


def test_tracing_assigns_nothing():
    module = Model()
    module(torch.randn(3, 4))
    before = module.rotary.deltas.clone()
    sch = schedule.create_schedule(module, (torch.randn(3, 4),))
    assert sch.tree.graphs.recording and torch.equal(module.rotary.deltas, before)
    sch.trace(flatten=True)
    assert torch.equal(module.rotary.deltas, before) and type(module.rotary) is Rotary


class Remembering(nn.Module):
    """As recurrent blocks of transformers do."""

    def __init__(self):
        super().__init__()
        self.state = None
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        self.state = x.mean(0)
        self.last = x[0]
        return x + self.state


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.inner.rotary = Remembering()

    def forward(self, x):
        x = self.inner(x) * 2
        return self.inner(x if self.training else x.double().float()[:1])


def test_a_module_that_is_run_without_data_keeps_its_attributes():
    """A call that was not recorded is run on tensors without data; these stayed in the attributes of the model."""
    module = Wrapper()
    module(torch.randn(3, 4))
    sch = schedule.create_schedule(module, (torch.randn(3, 4),))
    _ = sch.tree.graphs.recording
    state, last = module.inner.rotary.state, module.inner.rotary.last
    _ = sch.specializations
    assert module.inner.rotary.state is state and module.inner.rotary.last is last
    assert type(state) is type(last) is torch.Tensor


class SettingUp(Wrapper):
    """Gives parts of its parts a new state, as transformers' recurrent models do."""

    def forward(self, x):
        self.inner.rotary.state = torch.zeros_like(x[0])
        return self.inner(x) + self.inner.rotary.state


def test_state_that_a_part_that_stays_a_call_may_assign_is_not_read_back():
    module = SettingUp()
    module(torch.randn(3, 4))
    sch = schedule.create_schedule(module, (torch.randn(3, 4),))
    _ = sch.tree.graphs.recording
    state = module.inner.rotary.state
    with pytest.raises(TraceError, match="reads attribute 'state' back after other code"):
        _ = sch.specializations
    assert module.inner.rotary.state is state and type(state) is torch.Tensor


class Preparing(nn.Module):
    """Gives its parts a new state before it calls them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Remembering(), Remembering()])

    def forward(self, x):
        for part in self.parts:
            part.state = x[0].sin()
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_state_of_a_part_that_is_inlined_later_is_assigned():
    module, twin = scheduled(Preparing(), torch.randn(3, 4))
    assert_graph_alike(module, twin)


class Checked(nn.Module):
    """Assigns, then finds out about its data."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x):
        self.total = self.total + x.sum()
        if (x > 0).any():
            return x * self.total
        return x - self.total


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_nothing_is_assigned_where_the_graph_does_not_hold():
    module, twin = scheduled(Checked(), torch.ones(2, 3))
    assert_alike(module, twin, torch.ones(4, 3))
    assert state_of(module).fallbacks == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert_alike(module, twin, -torch.ones(4, 3))  # once added, not twice
    assert state_of(module).fallbacks == 1
    assert_alike(module, twin, torch.ones(2, 3))


class Buffered(nn.Module):
    """Renews a table of positions where it is too short, as Wav2Vec2-Conformer does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        self.table = self.table if self.table.shape[0] >= x.shape[0] else torch.arange(float(x.shape[0]))
        return x * self.table[: x.shape[0], None]


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_a_buffer_stays_a_buffer():
    module, twin = scheduled(Buffered(), torch.randn(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for rows in (2, 4, 6, 3):
            assert_alike(module, twin, torch.randn(rows, 2))
    assert module.table.shape == (6,) and "table" in module._buffers


class Growing(nn.Module):
    """Gives itself a new buffer at every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x):
        self.state = self.state * 0.5 + x.mean(dim=0)
        return x - self.state


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_a_buffer_is_assigned():
    module, twin = scheduled(Growing(), torch.randn(3, 3))
    for rows in (2, 4):
        assert_alike(module, twin, torch.randn(rows, 3))
        torch.testing.assert_close(module.state, twin.state)
    assert "state" in module.state_dict() and state_of(module).fallbacks == 0


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Keeping(nn.Module):
    def forward(self, x):
        self.last = object()
        return x


@pytest.mark.parametrize(("make", "why"), [(Counting, "would hold for one call"), (Keeping, "assigns an object")])
def test_what_a_graph_cannot_do_again_is_refused(make, why):
    with pytest.raises(TraceError, match=why) as caught:
        scheduled(make(), torch.randn(3, 4))
    assert "test_assigned.py" in caught.value.where


class Outside(nn.Module):
    """Assigns an attribute of a module that stays a call."""

    def __init__(self):
        super().__init__()
        self.rotary = Rotary()

    def forward(self, x):
        self.rotary.scale = x.sum()
        return self.rotary(x)


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_attributes_of_a_module_that_stays_a_call_are_assigned_before_the_call():
    module, twin = scheduled(Outside(), torch.randn(3, 4), flatten=False)
    assert_graph_alike(module, twin)


class Chunks(nn.Module):
    """Sets a mode of its parts before each of several calls, and clears their caches, as causal video encoders do."""

    def __init__(self):
        super().__init__()
        self.part = Chunk()

    def begin(self, first):
        for module in self.modules():
            if hasattr(module, "first"):
                module.first = first

    def forward(self, x):
        self.part.cache = None
        self.begin(True)
        y = self.part(x)
        self.begin(False)
        y = y + self.part(x)
        self.part.cache = None
        return y


class Chunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cache = True, None

    def forward(self, x):
        y = x if self.first else x + self.cache
        self.cache = x.mean(0)
        return y


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@pytest.mark.parametrize("flatten", [True, False], ids=["inlined", "called"])
@pytest.mark.parametrize("first", [True, False])
def test_a_mode_that_is_set_before_each_call(flatten, first):
    module, twin = scheduled(Chunks(), torch.randn(3, 4), flatten=flatten)
    for rows in (3, 5, 2):
        for each in (module, twin):
            each.part.first, each.part.cache = first, None if first else torch.ones(4)
        assert_alike(module, twin, torch.randn(rows, 4))
        assert twin.part.first is False and twin.part.cache is None
    assert state_of(module).fallbacks == 0


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_a_mode_that_is_gone_is_not_set():
    module, twin = scheduled(Chunks(), torch.randn(3, 4))
    del module.part.first, twin.part.first
    with pytest.raises(AttributeError, match="first"):
        twin(torch.randn(3, 4))
    with pytest.raises(AttributeError, match="first"):
        module(torch.randn(3, 4))


class Unchanged(nn.Module):
    """Assigns the current value."""

    def __init__(self):
        super().__init__()
        self.scale = 2

    def forward(self, x):
        self.scale = 2
        return x * self.scale


def test_an_assignment_of_the_current_value_is_a_condition():
    sch = schedule.create_schedule(Unchanged(), (torch.randn(3),)).trace()
    assert not any("setitem" in str(node) for node in sch.graph.nodes)


class Passing(nn.Module):
    """Reads what an earlier call left, assigns anew, and uses what it has read before a submodule runs."""

    def __init__(self, listed: bool, late: bool):
        super().__init__()
        self.last, self.history = torch.zeros(4), [torch.zeros(4)]
        self.listed, self.late, self.linear = listed, late, nn.Linear(4, 4)

    def forward(self, x):
        last, history = (None if self.listed else self.last), self.history
        first = history[0] if self.listed and not self.late else None
        self.last, self.history = x, [x]
        if self.listed:
            last = first if first is not None else history[0]
        return self.linear(last + 1)


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@pytest.mark.parametrize(("listed", "late"), [(False, False), (True, False), (True, True)])
def test_a_tensor_read_before_an_assignment_is_the_one_of_before(listed, late):
    module, twin = scheduled(Passing(listed, late), torch.randn(4))
    for _ in range(3):
        assert_alike(module, twin, torch.randn(4))
    assert state_of(module).fallbacks == 0
