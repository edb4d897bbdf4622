"""Slapo's tests of tracing and of pipeline stages (``test_trace.py``, ``test_pipeline_partition.py``)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule import NotApplicable, TraceError, call_module
from schedule.distributed.pipeline.splitting import StageGraph
from tests import zoo
from tests.distributed.test_pipeline import run_in_order, stages_of

LAYER = "bert.encoder.layer.0"


@functools.cache
def shared(name: str) -> Any:
    """The schedule of a model that tests only read."""
    return schedule.create_schedule(zoo.build(name), zoo.batch(name))


def names(node: Any) -> list[str]:
    """What the graph of a module calls by path."""
    return [str(each.target) for each in node.graph.nodes if each.op == "call_module"]


def traced(sch: Any, path: str) -> bool:
    """Whether the schedule holds a graph for a module by now."""
    return sch.tree.graphs.current(sch[path].module) is not None


def bert() -> Any:
    return schedule.create_schedule(zoo.build("bert"), zoo.batch("bert"))


@pytest.mark.slow
def test_only_the_module_asked_for_is_traced() -> None:
    """What is around it stays as it is, and so do the classes of all."""
    sch = bert()
    classes = [type(module) for module in sch.module.modules()]
    sch[f"{LAYER}.attention"].trace()
    assert traced(sch, f"{LAYER}.attention")
    assert not any(traced(sch, f"{LAYER}.{name}") for name in ("intermediate", "output"))
    assert [type(module) for module in sch.module.modules()] == classes


def test_submodules_have_graphs_of_their_own() -> None:
    """On first use; the one above calls them."""
    assert names(shared("bert")[f"{LAYER}.attention"]) == ["self", "output"]
    assert names(shared("bert")[f"{LAYER}.attention.self"]) == ["query", "key", "value"]


@pytest.mark.parametrize("path", ["", ".attn", ".mlp"])
def test_a_block_of_gpt_neo_is_traced(path: str) -> None:
    """One intention each: the block, and the two parts of it."""
    assert names(shared("gpt_neo")[f"transformer.h.0{path}"])


def test_an_attention_with_a_mask_of_its_own_is_traced_too() -> None:
    """There it stays as it is."""
    assert names(shared("gpt_neo")["transformer.h.0.attn.attention"])[-2:] == ["out_proj", "resid_dropout"]


class Bottleneck(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU()
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.bn1(self.conv1(x)))
        return y + (x if self.downsample is None else self.downsample(x))


class ResNet(nn.Module):
    """Blocks in a chain, the first with a chain inside."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(Bottleneck(4, inner), Bottleneck(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x)


@functools.cache
def resnet() -> Any:
    return schedule.create_schedule(ResNet(), torch.ones(2, 4, 3, 3))


def test_a_chain_of_blocks_is_traced_to_its_blocks() -> None:
    assert names(resnet()["layer1"]) == ["0", "1"]


def test_a_block_is_traced_to_its_layers() -> None:
    assert names(resnet()["layer1.1"]) == ["conv1", "bn1", "relu"]


def test_a_chain_in_a_block_is_one_call() -> None:
    """And has a graph of its own, whose layers are leaves."""
    assert names(resnet()["layer1.0"])[-1] == "downsample"
    assert names(resnet()["layer1.0.downsample"]) == ["0", "1"]


@pytest.mark.slow
def test_a_flat_graph_has_what_is_inside() -> None:
    sch = bert()
    found = names(sch[f"{LAYER}.attention"].trace(flatten=True))
    assert {"self.query", "output.dense"} <= {*found}


@pytest.mark.slow
def test_modules_inside_a_flat_graph_stay_and_are_not_scheduled() -> None:
    sch = bert()
    inner = sch.module.bert.encoder.layer[0].attention.self
    sch[f"{LAYER}.attention"].trace(flatten=True)
    assert sch[f"{LAYER}.attention.self"].module is inner
    with pytest.raises(NotApplicable, match="in the middle of the graph"):
        sch[f"{LAYER}.attention.self"].find(heads)


@functools.cache
def two_levels() -> list[str]:
    sch = bert()
    attention = sch.module.bert.encoder.layer[0].attention
    return names(sch[LAYER].trace(flatten=True, leaves=(type(attention.self), type(attention.output))))


def test_a_flat_graph_ends_at_the_leaves_asked_for() -> None:
    assert {"attention.self", "attention.output"} <= {*two_levels()}


def test_a_flat_graph_has_nothing_below_its_leaves() -> None:
    assert not any(name.startswith(("attention.self.", "attention.output.")) for name in two_levels())


@pytest.mark.slow
def test_one_tracer_does_for_models_of_transformers_too() -> None:
    """There it is chosen: with a cache that may be given, and arguments left at their defaults."""
    node = schedule.create_schedule(zoo.build("gpt_neo"), zoo.batch("gpt_neo"))["transformer.h.0.attn.attention"]
    assert node.trace(flatten=True).specializations


def heads(x: Tensor) -> Tensor:
    return call_module(r"query|key|value")(x).view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2)


def test_branches_and_arguments_that_are_none_do_not_stop_a_trace() -> None:
    """There by TorchDynamo."""
    assert shared("bert")[f"{LAYER}.attention.self"].specializations


def test_projections_are_found_in_such_a_trace() -> None:
    assert len(shared("bert")[f"{LAYER}.attention.self"].find(heads)) == 3


@pytest.mark.slow
@pytest.mark.unwritable("lambdas take the place of a match")
def test_a_part_of_a_model_is_built_and_called_with_its_arguments() -> None:
    sch = bert()
    node = sch[f"{LAYER}.attention.self"]
    node.replace(lambda x: x.softmax(-1), node.find(lambda x: x.softmax(-1), expect=1))
    schedule.build(node)
    assert node.module(torch.ones(1, 5, 32), None)[0].shape == (1, 5, 32)


# -- stages ------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """It cannot be traced: it looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.detach().numpy().sum() > 0 else x


class Chained(nn.Module):
    """Layers in a chain between a head and a tail."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.layers = Branching(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.post = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.post(self.layers(self.pre(x)))


class Listed(Chained):
    """The same in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layers)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        for layer in self.layers:
            x = layer(x)
        return self.post(x)


@pytest.mark.parametrize("kind", [Chained, Listed])
def test_a_model_is_traced_until_its_layers(kind: type[Chained]) -> None:
    """One intention each. The head, which cannot be traced, stays a call."""
    sch = schedule.create_schedule(kind(), torch.ones(2, 4)).trace_until("layers.*")
    assert names(sch) == ["pre", "layers.0", "layers.1", "post"]
    with pytest.raises(TraceError):
        sch["pre"].trace()


@pytest.mark.parametrize("kind", [Chained, Listed])
def test_a_cut_after_a_layer_makes_two_stages(kind: type[Chained]) -> None:
    """One intention each. The head is in the first stage and the tail in the last; in order they are the model."""
    sch = schedule.create_schedule(kind(), torch.ones(2, 4))
    sch["layers.0"].cut_pipeline_stage()
    stages, _ = stages_of(sch)
    assert [stage.modules for stage in stages] == [("pre", "layers.0"), ("layers.1", "post")]
    x = torch.randn(3, 4)
    torch.testing.assert_close(run_in_order(stages, sch.module, {"x": x}), sch.module(x))


class Tied(nn.Module):
    """An embedding whose weight two later layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.first, self.second = nn.Embedding(4, 4), nn.Linear(4, 4, False), nn.Linear(4, 4, False)
        self.first.weight = self.second.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.second(self.first(self.wte(ids)))


def test_tied_weights_are_known_by_all_their_names() -> None:
    with torch.device("meta"):
        sch = schedule.create_schedule(Tied())
    model = schedule.build(sch, init_weights=lambda module: [p.zero_() for p in module.parameters(recurse=False)])
    assert [name for name, p in model.named_parameters(remove_duplicate=False) if p is model.wte.weight] == [
        "wte.weight", "first.weight", "second.weight"
    ]  # fmt: skip


def test_tied_weights_of_several_stages_are_in_each_of_them() -> None:
    """Their gradients are added over those stages: ``tests/distributed/test_pipeline.py``, ``test_tied``."""
    sch = schedule.create_schedule(Tied(), torch.zeros(2, 3, dtype=torch.long))
    for name in ("wte", "first"):
        sch[name].cut_pipeline_stage()
    stages, _ = stages_of(sch)
    assert [stage.modules for stage in stages] == [("wte",), ("first",), ("second",)]


@pytest.mark.parametrize("what", ["ranks", "stages"])
def test_ranks_and_stages_of_tied_weights_in_deepspeeds_topology(what: str) -> None:
    pytest.xfail(f"no engine of DeepSpeed's for pipelines: {what} of tied weights are torch's process groups")


def neo(*cuts: int) -> list[StageGraph]:
    """The stages of four layers."""
    auto, config = zoo.ARCHITECTURES["gpt_neo"]
    made = config()
    made.num_layers, made.attention_types = 4, [[["global", "local"], 2]]
    made.attention_layers = ["global", "local"] * 2
    batch = {**zoo.batch("gpt_neo"), "use_cache": False}
    sch = schedule.create_schedule(auto.from_config(made, attn_implementation="eager"), batch)
    for cut in cuts:
        sch[f"transformer.h.{cut}"].cut_pipeline_stage()
    return stages_of(sch)[0]


@pytest.mark.slow
def test_the_first_of_two_stages_takes_the_inputs_of_the_model() -> None:
    assert {"input_ids", "attention_mask"} <= {*neo(3)[0].inputs}


@pytest.mark.slow
def test_a_later_stage_receives_hidden_states_and_what_the_inputs_do_not_tell() -> None:
    """Of two stages as of four. What only the inputs determine, such as the mask, each stage computes."""
    for stages in (neo(3), neo(0, 1, 2)):
        assert [len(stage.received) for stage in stages] == [0, *[2] * (len(stages) - 1)]
