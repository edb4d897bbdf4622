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
# # Quick start
#
# Schedule GPT-2 in one line, read the report, check the result, undo it. The weights are random: nothing is
# downloaded.

# %%
import matplotlib.pyplot as plt
import torch
import transformers as hf

import schedule

hf.logging.set_verbosity_error()
torch.manual_seed(0)

config = hf.GPT2Config(
    n_layer=3, n_embd=128, n_head=4, vocab_size=1024, n_positions=256, bos_token_id=1, eos_token_id=2
)
model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
ids = torch.randint(3, 1024, (4, 128))
batch = {"input_ids": ids, "labels": ids}

# %% [markdown]
# ## In one line
#
# `optimize` runs the model once to see what each module receives, traces the modules, and applies every rule wherever
# it fits. Give it a batch of the sizes that you will train at. With `measure=True` it also runs a training step before
# and after, for the report; printing a report never runs the model.

# %%
report = schedule.optimize(model, batch, measure=True)
report

# %% [markdown]
# ## Reading the report
#
# A row is a rule and what became of it: *applied*; *declined* where it fits and would not pay at these sizes;
# *skipped* where it cannot be done; *near miss* where code looks like the rule's construct and is not. The last column
# says why. Click on the modules to see each with its line of code.
#
# This model is tiny, so much is declined that pays in a real one. The same as data:

# %%
print(report.applied)
for entry in report.select("attention_softmax", "declined"):
    print(f"{entry.path}: {entry.reason}")

# %% [markdown]
# `cost_guard=False` forces what would not pay. Running `optimize` again changes only what is left.

# %%
forced = schedule.optimize(model, batch, cost_guard=False, measure=True)
print(forced)

# %% [markdown]
# ## Nothing about the model is different
#
# It is the same object of the same class, with the same parameters and `state_dict`. It trains, generates, saves and
# loads as before. `optimizer` and hooks that were there stay.

# %%
print(type(model).__name__, isinstance(model, hf.GPT2LMHeadModel), len(model.state_dict()))
model.generate(ids[:1, :5], max_new_tokens=5, do_sample=False, pad_token_id=2)

# %% [markdown]
# ## Step by step
#
# A schedule keeps the steps, so that they can be looked at, checked and undone: `report.schedule`, or make one first.
# `optimize` takes a schedule as well as a model, or a part of one. Here another model is scheduled, its attention only.

# %%
fresh = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
sch = schedule.create_schedule(fresh, batch=batch)
schedule.optimize(sch["transformer.h.*.attn"], cost_guard=False)
sch["transformer.h.0"]

# %% [markdown]
# Then the MLPs, one rule by name.

# %%
schedule.optimize(sch, rules="bias_gelu_tanh", cost_guard=False)
for number, step in enumerate(sch.history, 1):
    print(number, step.description)

# %% [markdown]
# `verify` runs the scheduled model against itself with everything undone: outputs, the gradient of every parameter,
# and the weights after some AdamW steps; in train (with the same dropout) and eval, at other batch and sequence sizes
# too. It raises if anything differs by more than rounding.

# %%
schedule.verify(sch, batch, steps=2)

# %% [markdown]
# ## What it is worth
#
# HuggingFace writes GELU as eight operations, and autograd keeps what most of them produce until the backward pass. A
# fused op keeps its inputs only. `report.measured` holds the costs of a training step before and after what it reports.

# %%
saved = {
    "original": report.measured["before"],
    "what pays at these sizes": report.measured["after"],
    "all of it": forced.measured["after"],
}
figure, axes = plt.subplots(figsize=(7, 2))
colors = ["#888888", "#a9d18e", "#70ad47"]
bars = axes.barh(list(saved), [cost.saved_bytes / 1e6 for cost in saved.values()], color=colors)
axes.bar_label(bars, fmt="%.1f MB", padding=3)
axes.invert_yaxis()
axes.set_xlabel("kept for the backward pass")
axes.margins(x=0.15)
figure.tight_layout()

# %% [markdown]
# ## Undo
#
# One step back at a time, to the bit.

# %%
scheduled = fresh.eval()(**batch).logits
while sch.history:
    sch.undo()
original = fresh(**batch).logits
print("apart by", f"{(scheduled - original).abs().max().item():.0e}, of {original.abs().max().item():.1f} at most")
sch["transformer.h.0"].show()

# %% [markdown]
# Next: [write a pattern of your own](02_patterns.ipynb).
