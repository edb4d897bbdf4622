"""A scheduled model goes on living where models live: Trainer, PEFT, generation, checkpoints, compilers, threads."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers as hf
from torch import nn

import fused
import schedule
from schedule.huggingface import OptimizeCallback
from schedule.runtime.scheduled import state_of
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["gpt2", "llama", "bert"]
GENERATIVE = ["gpt2", "llama"]
everywhere = pytest.mark.parametrize("name", NAMES)
mostly_once = pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])])
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with fused.backend("reference"):
        yield


def scheduled(name: str) -> nn.Module:
    model = build(name)
    assert schedule.optimize(model, batch(name), cost_guard=False).applied
    return model


def rewritten(model: nn.Module) -> list[str]:
    """Paths of scheduled modules."""
    return [path for path, module in model.named_modules() if state_of(module) is not None]


def step(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Loss and gradients by one seed."""
    model.train().zero_grad()
    torch.manual_seed(1)
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_alike(model: nn.Module, twin: nn.Module, inputs: dict[str, Any], tolerance: float = 1e-5) -> None:
    ours, theirs = step(model, inputs), step(twin, inputs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=tolerance)


# -- training -----------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """Training data of one architecture."""

    def __init__(self, name: str) -> None:
        self.rows = {key: value for key, value in batch(name, 16, 6).items() if isinstance(value, Tensor)}

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.rows.items()}


def trained(model: nn.Module, name: str, folder: Path, callbacks: list[Any]) -> list[Tensor]:
    settings = hf.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    hf.Trainer(model=model, args=settings, train_dataset=Rows(name), callbacks=callbacks).train()
    return [p.detach().clone() for p in model.parameters()]


@mostly_once
@pytest.mark.parametrize("way", ["callback", pytest.param("scheduled before", marks=pytest.mark.slow)])
def test_trainer(name: str, way: str, tmp_path: Path) -> None:
    expected = trained(build(name), name, tmp_path, [])
    if way == "callback":
        model = build(name)
        callback = OptimizeCallback(rules="all", check=True, cost_guard=False)
        ours = trained(model, name, tmp_path, [callback])
        assert callback.report is not None and callback.report.applied
    else:
        model = scheduled(name)
        ours = trained(model, name, tmp_path, [])
    assert rewritten(model)
    for mine, theirs, start in zip(ours, expected, build(name).parameters(), strict=True):
        moved = (theirs - start).abs().max()
        assert (mine - theirs).abs().max() <= 1e-3 * moved + 1e-7


def test_the_callback_says_what_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fxschedule.trainer")
    trained(build("gpt2"), "gpt2", tmp_path, [callback := OptimizeCallback(cost_guard=False, check=True)])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fxschedule.trainer"]
    assert callback.report is not None and callback.report.verified is not None and callback.report.verified.equal
    assert re.fullmatch(r"fxschedule: \d+ matches in \d+ modules, verified", line)
    caplog.clear()
    trained(build("gpt2"), "gpt2", tmp_path, [OptimizeCallback()])
    (record,) = [each for each in caplog.records if each.name == "fxschedule.trainer"]
    assert record.levelname == "WARNING" and record.getMessage().startswith("fxschedule: nothing was rewritten: ")


def test_training_again_keeps_the_rewrites_and_their_report(tmp_path: Path) -> None:
    callback = OptimizeCallback(cost_guard=False)
    settings = hf.TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = hf.Trainer(model=build("gpt2"), args=settings, train_dataset=Rows("gpt2"), callbacks=[callback])
    trainer.train()
    report = callback.report
    trainer.train()
    assert callback.report is report and report is not None and report.active == report.count() > 0


def test_the_callback_undoes_when_asked(tmp_path: Path) -> None:
    model = build("gpt2")
    callback = OptimizeCallback(keep=False, cost_guard=False)
    trained(model, "gpt2", tmp_path, [callback])
    assert callback.report is not None and callback.report.applied and not rewritten(model)


class Writer:
    """Keeps the scalars that a TensorBoard writer would write."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_the_callback_logs_fallbacks_and_adaptations(tmp_path: Path) -> None:
    writer = Writer()
    callback = OptimizeCallback(cost_guard=False, writer=writer)
    settings = hf.TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2
    )
    trainer = hf.Trainer(model=build("gpt2"), args=settings, train_dataset=Rows("gpt2"), callbacks=[callback])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    assert callback.report is not None
    fallbacks, adapted = callback.report.fallbacks, callback.report.adapted
    assert logged[-1]["fxschedule/fallbacks"] == sum(fallbacks.values())
    assert logged[-1]["fxschedule/adaptations"] == sum(map(len, adapted.values()))
    assert ("fxschedule/fallbacks", logged[0]["fxschedule/fallbacks"], 1) in writer.scalars
    assert ("fxschedule/adaptations", logged[1]["fxschedule/adaptations"], 2) in writer.scalars


@everywhere
def test_accelerate(name: str) -> None:
    def losses(model: nn.Module) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for number in range(3):
            torch.manual_seed(number)
            loss = model.train()(**batch(name)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    assert losses(scheduled(name)) == pytest.approx(losses(build(name)), rel=1e-5)


@pytest.mark.one_in(2)
@everywhere
def test_scheduled_in_the_middle_of_training(name: str) -> None:
    """The optimizer's state stays with its parameters."""
    models = [build(name), build(name)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for number in range(6):
        if number == 3:
            assert schedule.optimize(models[0], batch(name), cost_guard=False).applied
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            model.train()(**batch(name)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.one_in(2)
@pytest.mark.unreplayable("checkpointing is put on beside the schedule")
@everywhere
def test_gradient_checkpointing_on_and_off(name: str) -> None:
    model, twin, inputs = scheduled(name), build(name), batch(name, 3, 5)
    model.gradient_checkpointing_enable()
    twin.gradient_checkpointing_enable()
    assert_alike(model, twin, inputs)
    model.gradient_checkpointing_disable()
    twin.gradient_checkpointing_disable()
    assert_alike(model, twin, inputs)


# -- adapters -----------------------------------------------------------------------------------------------

TARGETS = {"gpt2": ["c_attn", "c_fc", "c_proj"], "llama": ["q_proj", "down_proj"], "bert": ["query", "dense"]}


def with_lora(model: nn.Module, name: str) -> nn.Module:
    """LoRA whose second matrix is not zero, so that it shows."""
    config = peft.LoraConfig(r=2, target_modules=TARGETS[name], lora_dropout=0.0, fan_in_fan_out=name == "gpt2")
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return adapted


@pytest.mark.one_in(2)
@pytest.mark.unreplayable("an adapter is put on beside the schedule")
@everywhere
@pytest.mark.parametrize("order", ["lora first", "schedule first"])
def test_an_adapter_is_never_bypassed(name: str, order: str) -> None:
    twin, inputs = with_lora(build(name), name), batch(name, 3, 5)
    if order == "lora first":
        model = with_lora(build(name), name)
        schedule.optimize(model, batch(name), cost_guard=False)
    else:
        model = with_lora(scheduled(name), name)
    plain = build(name)
    without = step(plain, inputs)[0]
    assert not torch.allclose(step(twin, inputs)[0], without, rtol=1e-3), "the adapter shows in the loss"
    assert_alike(model, twin, inputs)
    merged, expected = model.merge_and_unload(), twin.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(**inputs).loss, expected.eval()(**inputs).loss)


# -- generation ---------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", GENERATIVE)
@pytest.mark.parametrize(
    "way",
    [
        dict(do_sample=False),
        dict(do_sample=False, use_cache=False),
        dict(num_beams=3),
        dict(do_sample=True, top_k=5),
        dict(cache_implementation="static", do_sample=False),
    ],
    ids=["greedy", "no cache", "beams", "sampled", "static cache"],
)
def test_generate(name: str, way: dict[str, Any]) -> None:
    ids = batch(name)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padded on the left

    def tokens(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        return model.eval().generate(ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, **way)

    assert torch.equal(tokens(scheduled(name)), tokens(build(name)))


@pytest.mark.parametrize("name", GENERATIVE)
def test_generate_with_an_assistant(name: str) -> None:
    ids = batch(name)["input_ids"][:1]
    assistant = build(name, seed=4).eval()

    def tokens(model: nn.Module, helper: nn.Module) -> Tensor:
        return model.eval().generate(ids, assistant_model=helper, max_new_tokens=6, do_sample=False)

    expected = tokens(build(name), assistant)
    assert torch.equal(tokens(scheduled(name), assistant), expected)
    helper = build(name, seed=4).eval()
    schedule.optimize(helper, batch(name), cost_guard=False)
    assert torch.equal(tokens(scheduled(name), helper), expected)


@pytest.mark.one_in(2)
@everywhere
def test_recorders_of_attentions_and_hidden_states(name: str) -> None:
    model, twin = scheduled(name).eval(), build(name).eval()
    with torch.no_grad():
        ours = model(**batch(name), output_attentions=True, output_hidden_states=True)
        theirs = twin(**batch(name), output_attentions=True, output_hidden_states=True)
    assert len(theirs.attentions) == 2 and len(theirs.hidden_states) == 3
    torch.testing.assert_close(ours.attentions, theirs.attentions)
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states, rtol=1e-5, atol=1e-5)


# -- storage ------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@everywhere
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model, inputs = scheduled(name), batch(name, 3, 5)
    model.save_pretrained(tmp_path)
    fresh = type(build(name)).from_pretrained(tmp_path, attn_implementation="eager")
    assert not rewritten(fresh) and type(fresh) is type(build(name))
    assert_alike(model, fresh, inputs)


@pytest.mark.one_in(2)
@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_cast_after_scheduling(name: str, dtype: torch.dtype) -> None:
    model, twin, inputs = scheduled(name).to(dtype), build(name).to(dtype), batch(name, 3, 5)
    assert_alike(model, twin, inputs, 2e-2 if dtype == torch.bfloat16 else 1e-10)


# -- compilers ----------------------------------------------------------------------------------------------


@mostly_once
@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_afterwards_without_more_graph_breaks(name: str, training: bool) -> None:
    model, twin, inputs = scheduled(name).train(training), build(name).train(training), batch(name)

    def breaks(module: nn.Module) -> int:
        torch._dynamo.reset()
        return torch._dynamo.explain(module)(**inputs).graph_break_count

    assert breaks(model) <= breaks(twin)
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend="aot_eager")  # dropout draws other numbers there
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, twin.eval()(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_model_is_refused_by_name(way: str) -> None:
    compiled = build("gpt2")
    if way == "wrapped":
        compiled = torch.compile(compiled, backend="eager")
    else:
        compiled.transformer.h[0].compile(backend="eager")
    with pytest.raises(schedule.ScheduleError, match=r"torch\.compile"):
        schedule.optimize(compiled, batch("gpt2"))


@pytest.mark.one_in(2)
@everywhere
def test_exported(name: str) -> None:
    model, twin = scheduled(name).eval(), build(name).eval()
    inputs = {**batch(name), **({"use_cache": False} if name != "bert" else {})}
    program = torch.export.export(model, (), inputs, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(**inputs).logits, twin(**inputs).logits, rtol=1e-5, atol=1e-5)


# -- company ------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.unreplayable("the test adds buffers beside the schedule")
@everywhere
def test_several_models_in_one_process_do_not_meet(name: str) -> None:
    first, second, third = scheduled(name), build(name), scheduled(name)
    assert rewritten(first) and not rewritten(second) and type(second) is type(build(name))
    for module in (m for m in third.modules() if state_of(m) is not None):
        module.register_buffer("mark", torch.ones(1), persistent=False)
    inputs = batch(name, 3, 5)
    assert_alike(first, second, inputs)
    with torch.no_grad():
        for parameter in third.parameters():
            parameter.zero_()
    assert_alike(first, second, inputs)
    twin = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_alike(first, second, inputs)


@pytest.mark.one_in(2)
@everywhere
def test_threads_in_inference(name: str) -> None:
    model, twin = scheduled(name).eval(), build(name).eval()
    batches = [batch(name, 1 + number % 3, 4 + number % 5) for number in range(16)]

    def logits(inputs: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            return model(**inputs).logits

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(logits, batches))
    with torch.no_grad():
        for mine, inputs in zip(together, batches, strict=True):
            torch.testing.assert_close(mine, twin(**inputs).logits, rtol=1e-5, atol=1e-5)


def test_data_parallel_wrappers() -> None:
    """DataParallel calls the module inside; scheduling through it reaches that module."""
    model = nn.DataParallel(build("gpt2"))
    assert schedule.optimize(model, batch("gpt2"), cost_guard=False).applied
    assert {path.split(".")[0] for path in rewritten(model)} == {"module"}
    assert_alike(model, build("gpt2"), batch("gpt2", 3, 5))
