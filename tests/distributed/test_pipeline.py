"""Pipelines on two and four gloo processes against the whole model; the splitting itself in one process."""

from __future__ import annotations

import copy
import itertools
import operator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import schedule
from schedule.capture.specializing.specialization import compiled
from schedule.distributed.pipeline.pipeline import Pipeline, PipelinedModel
from schedule.distributed.pipeline.splitting import StageGraph, split
from tests import zoo
from tests.distributed import launch
from tests.distributed.models import digest, initialized, llama, llama_on_meta, needs_meta

CUTS = {
    "gpt2": ("transformer.h.0", "transformer.h.1", "transformer.h.2"),
    "llama": ("model.layers.0", "model.layers.1", "model.layers.2"),
    "t5": ("encoder.block.1", "encoder.block.3", "decoder.block.1"),
}
DEEP: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4},
    "llama": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "t5": {"num_layers": 4},
}


def model_of(name: str) -> nn.Module:
    """Four layers, no dropout: microbatches draw otherwise than a batch."""
    auto, config = zoo.ARCHITECTURES[name]
    made = config()
    for key, value in DEEP[name].items():
        setattr(made, key, value)
    if name == "t5":
        made.num_decoder_layers, made.dropout_rate = 4, 0.0
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(made, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch_of(name: str, rows: int = 8, seed: int = 0) -> dict[str, Any]:
    """A batch whose rows weigh the same, so that the mean of microbatches is the mean of the batch."""
    made = zoo.batch(name, rows=rows, seed=seed)
    made["attention_mask"][:, -1] = 0
    made["attention_mask"][:, :-1] = 1
    return {**made, "use_cache": False}


def cut(name: str, stages: int, mesh: Any = None) -> schedule.Schedule:
    sch = schedule.create_schedule(model_of(name), batch=batch_of(name, 2), mesh=mesh)
    for path in CUTS[name] if stages == 4 else CUTS[name][1:2]:
        sch[path].cut_pipeline_stage()
    return sch


# -- one process ------------------------------------------------------------------------------------------------


def run_in_order(stages: list[StageGraph], root: nn.Module, given: dict[str, Any]) -> Any:
    """All stages one after another."""
    values: Any = ()
    for stage in stages:
        values = compiled(stage.graph)(root, *values, *(given[name] for name in stage.inputs))
    return values


def stages_of(sch: schedule.Schedule) -> tuple[list[StageGraph], Any]:
    paths = [step.paths[0] for step in sch.history if step.primitive == "cut_pipeline_stage"]
    above = {".".join(p[:depth]) for p in (path.split(".") for path in paths) for depth in range(1, len(p))}
    made = sch.tree.graphs.trace(sch.module, lambda module, path: path in above)
    training = next(each for each in made if each.training)
    return split(training.graph, paths, sch.module), training


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("count", [2, 4])
def test_stages_in_order_are_the_model(name: str, count: int) -> None:
    sch = cut(name, count)
    stages, _ = stages_of(sch)
    assert len(stages) == count and stages[0].received == () and stages[-1].sent == ()
    for before, after in itertools.pairwise(stages):
        assert before.sent == after.received
    batch = batch_of(name, rows=4)
    sch.module.train()
    expected = sch.module(**batch)
    got = run_in_order(stages, sch.module, batch)
    assert torch.equal(got.loss, expected.loss) and torch.equal(got.logits, expected.logits)


def maker(stage: StageGraph) -> str:
    """The module whose output, or first of its outputs, is sent last."""
    (end,) = (node for node in stage.graph.nodes if node.op == "output")
    sent = end.args[0][-1]
    return str((sent.args[0] if sent.target is operator.getitem else sent).target)


def test_what_travels() -> None:
    """GPT-2 sends hidden states and a mask; T5's encoder passes through the decoder's stages."""
    stages, _ = stages_of(cut("gpt2", 4))
    assert [maker(stage) for stage in stages[:-1]] == list(CUTS["gpt2"])
    assert max(len(stage.sent) for stage in stages) == 2
    stages, _ = stages_of(cut("t5", 4))
    assert stages[2].sent[0] in (*stages[1].sent, "encoder_dropout_1") and len(stages[2].sent) > 2
    assert any(name.startswith("encoder") for name in stages[2].sent)


class Noise(nn.Module):
    """Draws random numbers, without parameters and without a dropout module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


class Shared(nn.Module):
    """Two layers that both use values made from the input alone: in a block, by chance, and plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.noise = nn.Linear(4, 4), nn.Linear(4, 4), Noise()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            gram = x @ x.T
        noise, plain = self.noise(x), x.sin()
        y = self.first(x) + noise + plain
        return self.second(y) + noise + plain + gram.float().sum()


def test_values_of_the_inputs_alone_are_computed_on_every_stage_only_where_that_is_the_same() -> None:
    x = torch.randn(3, 4)
    sch = schedule.create_schedule(Shared(), batch=x)
    sch["first"].cut_pipeline_stage()
    stages, _ = stages_of(sch)
    assert {"noise", "matmul"} <= set(stages[1].received) and "sin" not in stages[1].received
    torch.manual_seed(0)
    expected = sch.module.train()(x)
    torch.manual_seed(0)
    assert torch.equal(run_in_order(stages, sch.module, {"x": x}), expected)


class Loop(nn.Module):
    """One block, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.block(x)
        return self.act(x)


@pytest.mark.parametrize(
    ("path", "message"),
    [("block", "block is called 2 times: the cut would be inside a loop"), ("act", "stage 1 of 2 would have no param")],
)
def test_what_cannot_be_split(path: str, message: str) -> None:
    model = Loop()
    sch = schedule.create_schedule(model, batch=torch.ones(2, 4))
    sch[path].cut_pipeline_stage()
    with pytest.raises(schedule.NotApplicable, match=message):
        stages_of(sch)


def test_cuts_are_undone_and_checked() -> None:
    sch = cut("gpt2", 2)
    with pytest.raises(schedule.NotApplicable, match="already"):
        sch["transformer.h.1"].cut_pipeline_stage()
    with pytest.raises(schedule.NotApplicable, match="never called"):
        sch["transformer.h"].cut_pipeline_stage()
    with pytest.raises(schedule.NotApplicable, match="ends with the root"):
        sch.cut_pipeline_stage()
    sch.undo()
    sch["transformer.h.1"].cut_pipeline_stage()
    with pytest.raises(schedule.ShardError, match="process group"):
        schedule.build(sch, pipeline=Pipeline(2))


def test_interleaved_stages_on_one_rank(tmp_path: Path) -> None:
    """All of it but the sending: losses, gradients, updates; T5 with its skip connections."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        for name in CUTS:
            compare(name, 4, "interleaved1f1b", 4, steps=2)
    except RuntimeError as error:
        if "Pair is not connected" not in str(error):
            raise
        pytest.skip("this torch starts a pipeline by sending to itself, which gloo cannot")
    finally:
        dist.destroy_process_group()


# -- several processes ------------------------------------------------------------------------------------------


def compare(name: str, stages: int, how: str, microbatches: int, steps: int = 1) -> PipelinedModel:
    """Losses, gradients and weights after some steps of SGD against the whole model."""
    sch = cut(name, stages)
    twin = copy.deepcopy(sch.module)
    model = schedule.build(sch, pipeline=Pipeline(microbatches, how)).train()
    twin.train()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
    for step in range(steps):
        batch = batch_of(name, seed=step)
        expected = twin(**batch)
        expected.loss.backward()
        output = model.step(**batch)
        if output.loss is not None:
            torch.testing.assert_close(output.loss, expected.loss.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(output.tensors["logits"], expected.logits, rtol=1e-4, atol=1e-5)
        whole = dict(twin.named_parameters(remove_duplicate=False))
        for path, parameter in model.named_parameters(remove_duplicate=False):
            expected_grad = whole[path].grad
            assert parameter.grad is not None and expected_grad is not None, path
            torch.testing.assert_close(
                parameter.grad, expected_grad, rtol=1e-4, atol=1e-6, msg=lambda text, at=path: f"{at}: {text}"
            )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(dict(model.named_parameters(remove_duplicate=False))))
    held = {path for some in everyone for path in some}
    names: dict[int, set[str]] = {}
    for path, parameter in twin.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(path)
    assert all(held & every for every in names.values())
    return model


def compared(mesh: Any, name: str, stages: int, how: str) -> None:
    compare(name, stages, how, 4)


def tied_after_five_steps(mesh: Any, name: str) -> None:
    """The embedding is in the first stage, the head in the last: one weight, the same to the bit on all who hold it."""
    ranks = dist.get_world_size()
    model = compare(name, ranks, "1f1b", 4, steps=5)
    first = next(path for path, p in model.whole.named_parameters() if p is model.whole.get_input_embeddings().weight)
    held = {id(p): p for p in model.parameters()}.get(id(model.whole.get_parameter(first)))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, None if held is None else held.detach())
    holders = [weight for weight in everyone if weight is not None]
    assert len(holders) >= 2 and everyone[0] is not None and everyone[-1] is not None
    assert all(torch.equal(holders[0], other) for other in holders)
    assert (held is None) or len(model.tied.shared) == 1


def accumulated(mesh: Any) -> None:
    """Two batches before a step of the optimizer: gradients add up, those of shared weights too."""
    sch = cut("gpt2", 2)
    twin = copy.deepcopy(sch.module).train()
    model = schedule.build(sch, pipeline=Pipeline(2)).train()
    for seed in (0, 1):
        batch = batch_of("gpt2", seed=seed)
        twin(**batch).loss.backward()
        model.step(**batch)
    whole = dict(twin.named_parameters(remove_duplicate=False))
    for path, parameter in model.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(
            parameter.grad, whole[path].grad, rtol=1e-4, atol=1e-6, msg=lambda text, at=path: f"{at}: {text}"
        )


def evaluated(mesh: Any) -> None:
    sch = cut("gpt2", 2)
    twin = copy.deepcopy(sch.module).eval()
    model = schedule.build(sch, pipeline=Pipeline(2)).eval()
    batch = batch_of("gpt2")
    output = model.evaluate(**batch)
    if dist.get_rank() == 1:
        torch.testing.assert_close(output.tensors["logits"], twin(**batch).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(schedule.NotApplicable, match="cut into 2 microbatches"):
        model.step(**batch_of("gpt2", rows=3))


def freed_after_sending(mesh: Any) -> None:
    """What the first stage has sent takes no memory until its backward pass, whoever holds it."""
    from schedule.distributed.pipeline.stages import SendingStage

    sch = cut("gpt2", 2)
    model = schedule.build(sch, pipeline=Pipeline(2, "gpipe")).train()
    outputs: dict[int, Any] = {}
    made: list[int] = []
    kept: list[int] = []

    class Watched(SendingStage):
        def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            outputs[fwd_chunk_id] = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            made.extend(out.untyped_storage().nbytes() for out in outputs[fwd_chunk_id])
            return outputs[fwd_chunk_id]

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            kept.extend(out.untyped_storage().nbytes() for out in outputs[bwd_chunk_id])
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedule.distributed.pipeline.pipeline.SendingStage", Watched)
        model.step(**batch_of("gpt2"))
    if dist.get_rank() == 0:
        assert min(made) > 4 and kept and set(kept) == {4}, (made, kept)


class Normed(nn.Module):
    """A stage that counts its calls, and indexes by numbers of the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.argsort(-1).to(x.dtype) * self.first.weight.new_ones(())
        made: torch.Tensor = self.last(self.norm(self.first(x) + order).gather(-1, order.long()))
        return made


def called_for_shapes(mesh: Any) -> None:
    """What torch calls a stage for besides the microbatches leaves no trace, and meets no indices out of bounds."""
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    sch = schedule.create_schedule(Normed(), batch=x[:2])
    sch["first"].cut_pipeline_stage()
    twin = copy.deepcopy(sch.module).train()
    model = schedule.build(sch, pipeline=Pipeline(2, loss=lambda outputs, _: outputs[0].square().mean())).train()
    model.step(x)
    for part in x.chunk(2):
        twin(part)
    buffers = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name])


def from_the_meta_device(mesh: Any) -> None:
    """Each rank materializes its own stages, with the weights that one device would give them."""
    config = llama(4, 32, 64, 96)
    mask = torch.zeros(2, 1, 6, 6, device="meta")
    ids = torch.zeros(2, 6, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    sch = schedule.create_schedule(llama_on_meta(config), batch=inputs)
    sch["model.layers.1"].cut_pipeline_stage()
    torch.manual_seed(6)
    model = schedule.build(sch, pipeline=Pipeline(2)).train()
    twin = initialized(llama_on_meta(config), seed=6).train()
    own = dict(model.named_parameters())
    assert digest(own) == digest({name: p for name, p in twin.named_parameters() if name in own})
    elsewhere = [name for name, p in model.whole.named_parameters() if p.is_meta]
    assert elsewhere and not set(elsewhere) & set(own)
    ids = torch.arange(24).view(4, 6)
    batch = {"input_ids": ids, "attention_mask": torch.zeros(4, 1, 6, 6), "labels": ids}
    expected = twin(**batch).loss
    output = model.step(**batch)
    if output.loss is not None:
        torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-5, atol=1e-6)


def fused_inside(mesh: Any) -> None:
    """Fused graphs and checkpointed modules inside the stages."""
    sch = cut("gpt2", 2)
    twin = copy.deepcopy(sch.module).train()
    mlps = sch["transformer.h.*.mlp"]
    mlps.fuse(mlps.find("bias_gelu_tanh", expect=4))
    sch["transformer.h.*"].checkpoint()
    model = schedule.build(sch, pipeline=Pipeline(2)).train()
    batch = batch_of("gpt2")
    twin(**batch).loss.backward()
    model.step(**batch)
    whole = dict(twin.named_parameters(remove_duplicate=False))
    for path, parameter in model.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(
            parameter.grad, whole[path].grad, rtol=1e-3, atol=1e-5, msg=lambda text, at=path: f"{at}: {text}"
        )


def refused(mesh: Any) -> None:
    with pytest.raises(schedule.NotApplicable, match="needs 2 stages, there are 4"):
        schedule.build(cut("gpt2", 4), pipeline=Pipeline(2))
    with pytest.raises(schedule.NotApplicable, match="Unknown schedule"):
        schedule.build(cut("gpt2", 2), pipeline=Pipeline(2, "fastest"))
    sch = schedule.create_schedule(model_of("gpt2"), batch=batch_of("gpt2"))
    with pytest.raises(schedule.NotApplicable, match="no stage was cut"):
        schedule.build(sch, pipeline=Pipeline(2))


FROM_META = pytest.param(from_the_meta_device, marks=needs_meta)
TWO = (accumulated, evaluated, freed_after_sending, called_for_shapes, FROM_META, fused_inside, refused)
WAYS = [(2, 2, "gpipe"), (2, 2, "1f1b"), (2, 2, "interleaved1f1b"), (2, 4, "interleaved1f1b")]
WAYS += [(4, 4, "gpipe"), (4, 4, "1f1b"), (4, 4, "interleaved1f1b")]
QUICK = [("gpt2", 2, 2, "1f1b"), ("t5", 2, 2, "gpipe"), ("llama", 2, 4, "interleaved1f1b"), ("gpt2", 4, 4, "1f1b")]
LONG = [case for name in CUTS for way in WAYS if (case := (name, *way)) not in QUICK]
TIED = [("gpt2", 2)]
MORE_TIED = [(name, ranks) for name in CUTS for ranks in (2, 4) if (name, ranks) not in TIED]


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.__name__)
def test_on_two_processes(case: launch.Case) -> None:
    launch.passes(case)


@pytest.mark.parametrize(("name", "ranks", "stages", "how"), QUICK)
def test_pipelines(name: str, ranks: int, stages: int, how: str) -> None:
    launch.passes(partial(compared, name=name, stages=stages, how=how), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "stages", "how"), LONG)
def test_more_pipelines(name: str, ranks: int, stages: int, how: str) -> None:
    launch.passes(partial(compared, name=name, stages=stages, how=how), ranks)


@pytest.mark.parametrize(("name", "ranks"), TIED)
def test_tied(name: str, ranks: int) -> None:
    launch.passes(partial(tied_after_five_steps, name=name), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), MORE_TIED)
def test_more_tied(name: str, ranks: int) -> None:
    launch.passes(partial(tied_after_five_steps, name=name), ranks)
