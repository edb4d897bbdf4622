"""Tools that train a model on one process, each as users call it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.adversary.curves import STEPS, Curve, Run, evaluated, fallbacks, loss_of, optimizer_for, trained, values

Way = Callable[[Run], Curve]


def loop(run: Run) -> Curve:
    """A plain loop, with evaluations."""
    return trained(run.schedule(run.build()), run)


def midway(run: Run) -> Curve:
    """Schedule after half of the steps; the optimizer's state stays."""
    model = run.build()
    optimizer = optimizer_for(model.parameters())
    first = trained(model, run, optimizer=optimizer, numbers=range(STEPS // 2))
    run.schedule(model)
    second = trained(model, run, optimizer=optimizer, numbers=range(STEPS // 2, STEPS))
    return Curve([*first.losses, *second.losses], first.start, second.end, [], second.fallbacks)


# -- accelerate ---------------------------------------------------------------------------------------------


def with_accelerate(run: Run) -> Curve:
    """Prepare, backward, clip; save the state midway, train on, load it and train the same steps again; save."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = run.schedule(run.build())
    model, optimizer = accelerator.prepare(model, optimizer_for(model.parameters()))
    norms: list[float] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()

    half, whole = range(STEPS // 2), range(STEPS // 2, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        first = trained(model, run, step, optimizer, half)
        accelerator.save_state(f"{folder}/state")
        trained(model, run, step, optimizer, whole)
        accelerator.load_state(f"{folder}/state")
        second = trained(model, run, step, optimizer, whole)
        accelerator.save_model(model, f"{folder}/model")
        saved = load_file(f"{folder}/model/model.safetensors")
    end = {name: saved.get(name, value) for name, value in second.end.items()}  # tied ones are left out of the file
    assert all(torch.equal(value, end[name]) for name, value in second.end.items())
    accelerator.free_memory()
    return Curve([*first.losses, *second.losses], first.start, end, norms, second.fallbacks)


# -- adapters -----------------------------------------------------------------------------------------------

_TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "bert": ["query", "dense"],
    "t5": ["q", "wo"],
}


def lora(run: Run, schedule_first: bool) -> Curve:
    """Train an adapter; look at the model without it; merge it, and train all parameters a few steps on."""
    model = run.build()
    if schedule_first:
        run.schedule(model)
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=4, target_modules=_TARGETS[run.name], lora_dropout=0.1, fan_in_fan_out=run.name == "gpt2"
    )
    adapted = peft.get_peft_model(model, config)
    if not schedule_first:
        run.schedule(adapted)
    curve = trained(adapted, run)
    curve.others.append(evaluated(adapted, run))
    with adapted.disable_adapter():
        curve.others.append(evaluated(adapted, run))
    merged = adapted.merge_and_unload()
    curve.others.append(evaluated(merged, run))
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    curve.others += trained(merged, run, numbers=range(4)).losses
    curve.fallbacks = fallbacks(merged)
    return curve


# -- averages -----------------------------------------------------------------------------------------------


def averaged(run: Run) -> Curve:
    """An exponential moving average by torch: a deep copy, evaluated beside the model."""
    model = run.schedule(run.build())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    seen: list[float] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if number % 5 == 4:
            seen.append(evaluated(average, run))

    curve = trained(model, run, step)
    curve.others, curve.fallbacks = seen, curve.fallbacks + fallbacks(average)
    curve.end |= {f"average {name}": value for name, value in values(average.module).items()}
    curve.start |= {f"average {name}": value for name, value in curve.start.items()}
    return curve


def averaged_by_hand(run: Run, swap: str) -> Curve:
    """A moving average kept in tensors beside the model, swapped in for evaluations and out again.

    Args:
        run: what to train.
        swap: ``"copy"``: values are copied into the parameters; ``"data"``: ``.data`` of the parameters is replaced;
            ``"views"``: as ``"data"``, and the averages are updated through ``.data`` that was read before training.
    """
    model = run.schedule(run.build())
    parameters = list(model.parameters())
    shadow = [parameter.data.clone() for parameter in parameters]
    read_before = [parameter.data for parameter in parameters]
    seen: list[float] = []

    def put(tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            if swap == "copy":
                parameter.data.copy_(tensor)
            else:
                parameter.data = tensor

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sources = read_before if swap == "views" else [parameter.data for parameter in parameters]
        for average, source in zip(shadow, sources, strict=True):
            average.mul_(0.8).add_(source, alpha=0.2)
        if number % 5 == 4:
            kept = [p.data.clone() if swap == "copy" else p.data for p in parameters]
            put(shadow)
            seen.append(evaluated(model, run))
            put(kept)

    curve = trained(model, run, step)
    curve.others = seen
    curve.end |= {f"average {number}": value for number, value in enumerate(shadow)}
    curve.start |= {f"average {number}": value for number, value in enumerate(curve.start.values())}
    return curve


# -- memory and precision -----------------------------------------------------------------------------------


def checkpointing(run: Run, reentrant: bool) -> Curve:
    """Gradient checkpointing as transformers turns it on and off."""
    model = run.schedule(run.build())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    first = trained(model, run, numbers=range(STEPS // 2))
    model.gradient_checkpointing_disable()
    second = trained(model, run, numbers=range(STEPS // 2, STEPS))
    return Curve([*first.losses, *second.losses], first.start, second.end, [], second.fallbacks)


_LAYERS = {"gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer", "t5": "encoder.block"}


def checkpointed_layers(run: Run, reentrant: bool) -> Curve:
    """``torch.utils.checkpoint`` around each layer, by a forward set on the object."""
    model = run.schedule(run.build())
    model.config.use_cache = False  # recomputing would write to it twice
    for layer in model.get_submodule(_LAYERS[run.name]):
        layer.forward = partial(_recomputed, layer.forward, reentrant)
    return trained(model, run)


def _recomputed(forward: Callable[..., Any], reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)


def autocast(run: Run) -> Curve:
    """bfloat16 autocast and a gradient scaler, on the CPU."""
    model = run.schedule(run.build())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = optimizer_for(model.parameters())
    optimizer.param_groups[0]["lr"] = 2e-3  # the rounding of bfloat16 grows faster with larger steps
    curve = Curve(start=values(model))
    model.train()
    for number in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, run, number)
        curve.losses.append(float(loss.detach()))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    curve.end, curve.fallbacks = values(model), fallbacks(model)
    return curve


def compiled(run: Run) -> Curve:
    """``torch.compile`` around the model."""
    torch._dynamo.reset()
    model = run.schedule(run.build())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # compiled code draws other numbers
    whole: Any = torch.compile(model, backend="aot_eager")
    curve = trained(whole, run)
    torch._dynamo.reset()
    return curve


# -- what changes on the way --------------------------------------------------------------------------------


def clipped(run: Run) -> Curve:
    """Clipping by norm and by value, and gradients summed over two batches."""
    norms: list[float] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        (loss / 2).backward()
        if number % 2:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()

    curve = trained(run.schedule(run.build()), run, step)
    curve.others = norms
    return curve


def frozen(run: Run) -> Curve:
    """Every second parameter is frozen after a third of the steps, and thawed after two thirds."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (STEPS // 3, 2 * STEPS // 3):
            for parameter in list(model.parameters())[::2]:
                parameter.requires_grad_(number != STEPS // 3)

    return trained(run.schedule(run.build()), run, step)


def other_dropout(run: Run) -> Curve:
    """Dropout is raised, turned off and put back, as ``nn.Dropout.p`` and as plain numbers."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        new = {5: 0.4, 10: 0.0, 15: 0.1}.get(number)
        for module in model.modules() if new is not None else ():
            if isinstance(module, nn.Dropout):
                module.p = new
            for name in ("attention_dropout", "dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, new)

    return trained(run.schedule(run.build()), run, step)


# -- Trainer ------------------------------------------------------------------------------------------------


class _Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, run: Run) -> None:
        self.rows = [run.batch(0)] + [run.batch(4 * number) for number in range(1, 4)]
        self.rows = [{key: value[row] for key, value in one.items()} for one in self.rows for row in range(2)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def trainer(run: Run) -> Curve:
    """``Trainer`` with accumulated gradients and evaluations; a new one resumes from its checkpoint."""
    model = run.schedule(run.build())
    start = values(model)
    with tempfile.TemporaryDirectory() as folder:
        first = _trainer(model, run, folder, STEPS // 2)
        first.train()
        resumed = run.schedule(run.build())
        second = _trainer(resumed, run, folder, STEPS)
        second.train(resume_from_checkpoint=True)
        assert list(Path(folder).glob(f"checkpoint-{STEPS}"))
        history = second.state.log_history
    losses = [each["loss"] for each in history if "loss" in each]
    others = [each["eval_loss"] for each in history if "eval_loss" in each]
    others += [each["grad_norm"] for each in history if "grad_norm" in each]
    assert len(losses) == STEPS
    return Curve(losses, start, values(resumed), others, fallbacks(model) + fallbacks(resumed))


def _trainer(model: nn.Module, run: Run, folder: str, steps: int) -> hf.Trainer:
    settings = hf.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        adam_epsilon=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=STEPS // 2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    made = hf.Trainer(model=model, args=settings, train_dataset=_Rows(run), eval_dataset=_Rows(run))
    made.remove_callback(hf.PrinterCallback)
    return made


WAYS: dict[str, Way] = {
    "loop": loop,
    "scheduled midway": midway,
    "accelerate": with_accelerate,
    "LoRA, then schedule": partial(lora, schedule_first=False),
    "schedule, then LoRA": partial(lora, schedule_first=True),
    "AveragedModel": averaged,
    "EMA by copies": partial(averaged_by_hand, swap="copy"),
    "EMA by data": partial(averaged_by_hand, swap="data"),
    "EMA by data read before": partial(averaged_by_hand, swap="views"),
    "checkpointing": partial(checkpointing, reentrant=False),
    "checkpointing, reentrant": partial(checkpointing, reentrant=True),
    "checkpoint around layers": partial(checkpointed_layers, reentrant=False),
    "checkpoint around layers, reentrant": partial(checkpointed_layers, reentrant=True),
    "autocast": autocast,
    "clipping": clipped,
    "freezing": frozen,
    "dropout": other_dropout,
    "Trainer": trainer,
}
