# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tuning with Trainer and LoRA
#
# A small GPT-2 learns Shakespeare, scheduled and not, and the loss curves are compared: first all of its weights with
# transformers' `Trainer`, then LoRA adapters with PEFT. Then it is saved, loaded and put back as it was. Nothing is
# downloaded: the model is made from a configuration, and a token is a byte.

# %%
import copy
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import peft
import torch
import transformers as hf

from schedule.huggingface import OptimizeCallback

hf.logging.set_verbosity_error()
hf.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning)
hf.set_seed(0)


def rows_of(text: bytes, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Training data: a token is a byte."""
    rows = torch.tensor(list(text)).split(length)[:-1]
    return [{"input_ids": row, "labels": row} for row in rows]


text = Path("../tests/data/shakespeare.txt").read_bytes()[:40_000]
config = hf.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=10, eos_token_id=10)
start = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

# %% [markdown]
# ## All weights
#
# `OptimizeCallback` schedules the model on the first batch, before the first step. `check=True` verifies it there;
# `cost_guard=False` because this model is too small for all of it to pay.


# %%
def trained(model, rows, steps, callbacks=(), rate=1e-3):
    """The loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = hf.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=rate,
            logging_steps=1,
            seed=3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = hf.Trainer(model=model, args=settings, train_dataset=rows, callbacks=list(callbacks))
        trainer.remove_callback(hf.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


plain, ours = copy.deepcopy(start), copy.deepcopy(start)
callback = OptimizeCallback(cost_guard=False, check=True)
rows = rows_of(text)
full = {"plain": trained(plain, rows, 50), "scheduled": trained(ours, rows, 50, [callback])}
callback.report

# %% [markdown]
# ## LoRA
#
# The models that were just trained learn to shout: the same text in capitals. `get_peft_model` wraps the attention's
# projections. That leaves the schedule as it is: what stands around a wrapped module stays rewritten, and the module
# itself runs as PEFT has made it. A scheduled model can be copied like any other.


# %%
def adapted(model):
    """The model with adapters, the same ones each time."""
    hf.set_seed(1)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return peft.get_peft_model(copy.deepcopy(model), settings)


lora_plain, lora_ours = adapted(plain), adapted(ours)
lora_ours.print_trainable_parameters()
shouted = rows_of(text.upper())
lora = {
    "plain": trained(lora_plain, shouted, 30, rate=1e-2),
    "scheduled": trained(lora_ours, shouted, 30, rate=1e-2),
}

# %%
figure, axes = plt.subplots(2, 2, figsize=(8, 4), sharex="col", height_ratios=[2, 1])
for (above, below), name, curves in zip(axes.T, ("all weights", "LoRA"), (full, lora), strict=True):
    above.plot(curves["plain"], color="#bbbbbb", linewidth=5, label="plain")
    above.plot(curves["scheduled"], color="#70ad47", linewidth=1.5, label="scheduled")
    above.set_title(name)
    above.legend()
    apart = [abs(a - b) for a, b in zip(curves["plain"], curves["scheduled"], strict=True)]
    below.semilogy([max(each, 1e-7) for each in apart], color="black", linewidth=1)
    below.set_xlabel("step")
    print(f"{name}: {curves['plain'][0]:.2f} to {curves['plain'][-1]:.2f}, at most {max(apart):.0e} apart")
axes[0, 0].set_ylabel("loss")
axes[1, 0].set_ylabel("apart")
figure.tight_layout()

# %% [markdown]
# The same training, up to rounding. Dropout is the same too: under one seed the same numbers are dropped.
#
# ## Save and load
#
# `save_pretrained` writes what it always writes. What is loaded is an ordinary model; it is scheduled when you say so.

# %%
probe = torch.stack([row["input_ids"] for row in rows[:4]])


def apart(a, b):
    """Largest difference between the logits of two models."""
    with torch.no_grad():
        return (a.eval()(probe).logits - b.eval()(probe).logits).abs().max().item()


with tempfile.TemporaryDirectory() as folder:
    ours.save_pretrained(folder)
    print(sorted(path.name for path in Path(folder).iterdir()))
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    lora_ours.save_pretrained(Path(folder) / "lora")
    lora_loaded = peft.PeftModel.from_pretrained(copy.deepcopy(loaded), Path(folder) / "lora")
print(f"the model: {apart(ours, loaded):.0e} apart, the adapters: {apart(lora_ours, lora_loaded):.0e} apart")

# %% [markdown]
# ## Undo
#
# `callback.schedule` has the steps. (`OptimizeCallback(keep=False)` undoes them itself when training ends.) Without
# them, the model computes what the loaded one does, to the bit: the same weights, the original forward.

# %%
print([step.description for step in callback.schedule.history])
while callback.schedule.history:
    callback.schedule.undo()
print("apart:", apart(ours, loaded))

# %% [markdown]
# Next: [tuning](06_tuning.ipynb), and [coming from Slapo, Megatron, Liger or torch.compile](07_coming_from.ipynb).
