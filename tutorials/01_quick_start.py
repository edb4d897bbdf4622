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
# Schedule GPT-2 by hand: write a pattern, find it, look at the graph before and after, swap in a fused op, verify,
# undo. Then the same in one line. The weights are random: nothing is downloaded.

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch
import transformers as hf

import fused
import schedule

warnings.filterwarnings("ignore")
hf.logging.set_verbosity_error()
torch.manual_seed(0)

config = hf.GPT2Config(
    n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=128, bos_token_id=1, eos_token_id=2
)
model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
ids = torch.randint(3, 1000, (4, 64))
batch = {"input_ids": ids, "labels": ids}

# %% [markdown]
# A `Schedule` has one node for each module. Paths and globs find them.

# %%
sch = schedule.create_schedule(model, example_inputs=batch)
mlps = sch["transformer.h.*.mlp"]
print(mlps)
sch["transformer.h.0"].show()

# %% [markdown]
# Each node has a graph: what its forward computes, with its submodules as calls. Sizes are not baked in.

# %%
print(mlps[0].graph.python_code("self").src)

# %% [markdown]
# ## A pattern is a function
#
# HuggingFace's GPT-2 writes GELU as eight operations, and autograd saves most of what they produce. This is the
# construct, bias included, as a plain function. `find` looks inside small leaf modules (`c_fc`, `act`) by itself.


# %%
def bias_new_gelu(x, bias):
    y = x + bias
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


matches = mlps.find(bias_new_gelu, expect=4)
matches[0].show()


# %% [markdown]
# Constants count. With another one nothing matches, and the error says where it nearly did.


# %%
def wrong_constant(x, bias):
    y = x + bias
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.05 * torch.pow(y, 3.0))))


try:
    mlps.find(wrong_constant, expect=4)
except schedule.MatchError as error:
    print(error)

# %% [markdown]
# ## Replace, look, verify
#
# `fused.bias_new_gelu` computes the same in one pass and saves only its inputs.


# %%
def saved_bytes() -> int:
    """Bytes that autograd keeps for the backward pass, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    del loss
    return sum(storages.values())


model.train()
before = saved_bytes()
mlps.replace(fused.bias_new_gelu, matches)
print(mlps[0].graph.python_code("self").src)
by_hand = saved_bytes()

# %% [markdown]
# `verify` runs the scheduled model against itself with everything undone: outputs, the gradient of every parameter,
# and five AdamW steps, in train (same dropout) and eval, at other batch and sequence sizes too.

# %%
print(schedule.verify(sch, batch))

# %% [markdown]
# ## Undo
#
# One step back, to the bit.

# %%
sch.undo()
assert saved_bytes() == before
sch["transformer.h.0.mlp"].show()

# %% [markdown]
# ## In one line
#
# `optimize` applies every rule wherever it fits and reports where it did, where not, and why. `cost_guard=False`
# because this model is too small for all of it to pay.

# %%
report = schedule.optimize(model, batch, cost_guard=False)
print(report)
optimized = saved_bytes()

# %%
figure, axes = plt.subplots(figsize=(6, 2.2))
names, values = ["original", "bias + GELU by hand", "optimize"], [before, by_hand, optimized]
bars = axes.barh(names, [value / 1e6 for value in values], color=["#888888", "#a9d18e", "#70ad47"])
axes.bar_label(bars, fmt="%.1f MB", padding=3)
axes.invert_yaxis()
axes.set_xlabel("saved for backward")
axes.margins(x=0.15)
figure.tight_layout()
