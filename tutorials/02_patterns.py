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
# # Patterns
#
# Write a pattern, find it, read a near miss, fuse, verify, undo: on BERT's attention. The weights are random: nothing
# is downloaded.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers as hf

import schedule
from schedule import optional, scalar
from schedule.report.costs import measure

hf.logging.set_verbosity_error()
torch.manual_seed(0)

config = hf.BertConfig(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=500
)
model = hf.AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
ids = torch.randint(3, 500, (4, 24))
mask = torch.ones_like(ids)
mask[1, 16:] = 0
batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}

# %% [markdown]
# ## Look first
#
# A glob picks the modules. Each has a graph: what its forward computes, with open sizes. `attention_mask` is what the
# encoder made of the padding, numbers to add.

# %%
sch = schedule.create_schedule(model, batch=batch)
attention = sch["bert.encoder.layer.*.attention.self"]
print(attention)
print(attention[0].graph.python_code("self").src)

# %% [markdown]
# ## A pattern is a function
#
# Its parameters are the inputs. This is attention's softmax as a textbook has it. `expect=` says how often it must be
# found; if it is not, the error tells where the pattern came nearest.


# %%
def textbook(query, key):
    return F.softmax(query @ key.transpose(-1, -2) / 4.0, dim=-1)


try:
    attention.find(textbook, expect=2)
except schedule.MatchError as error:
    print(error)

# %% [markdown]
# Read it from the underlined line: the softmax was found, but what goes into it is a sum, not a quotient. transformers
# adds the mask before the softmax, and multiplies by a quarter instead of dividing by four. The pattern follows:
#
# - `scalar("scale")` binds whatever constant is there, and gives it a name;
# - `optional` matches with the mask and without;
# - the order of a sum or product does not matter, and neither does `x.softmax(-1)`, `torch.softmax` or `nn.Softmax`.


# %%
def weights(scores, mask):
    scores = optional(lambda s: s + mask, name="mask")(scores * scalar("scale"))
    return F.dropout(F.softmax(scores, dim=-1), p=0.5, training=scalar("training"))


try:
    attention.find(weights, expect=2)
except schedule.MatchError as error:
    print(error)

# %% [markdown]
# Constants count: BERT drops a tenth, and a pattern with another rate would change the model. With a name for it:


# %%
def weights(scores, mask):
    scores = optional(lambda s: s + mask, name="mask")(scores * scalar("scale", where=lambda s: s > 0))
    return F.dropout(F.softmax(scores, dim=-1), p=scalar("p"), training=scalar("training"))


matches = attention.find(weights, expect=2)
matches[0]

# %%
print(matches[0].inputs)
print(matches[0].scalars)
print(matches[0].choices)

# %% [markdown]
# ## Not everything that looks alike is a match
#
# With the product with `value` after it, the pattern would swallow the weights, which BERT returns as well. Every
# operation is there, and it is no match: what is used outside cannot be replaced.


# %%
def whole(scores, mask, value):
    return weights(scores, mask) @ value


try:
    attention.find(whole, expect=2)
except schedule.MatchError as error:
    print(error)

# %% [markdown]
# ## Fuse
#
# A fused op is known for these operations (`schedule.list_rules()`), so `fuse` takes that one; what no rule knows is
# compiled. `replace(function, matches)` puts in a function of your own. Before that, what a training step keeps for its
# backward pass:

# %%
lengths = [16, 32, 64, 96, 128]


def saved() -> list[float]:
    """MB at each sequence length."""
    inputs = [torch.full((4, length), 7) for length in lengths]
    masks = [torch.arange(length) < torch.tensor([[length], [length], [length], [length - 4]]) for length in lengths]
    batches = [{"input_ids": a, "attention_mask": b.long(), "labels": a} for a, b in zip(inputs, masks, strict=True)]
    return [measure(model, each).saved_bytes / 1e6 for each in batches]


before = saved()
attention.fuse(matches)
print(attention[0].graph.python_code("self").src)

# %% [markdown]
# The schedule shows what was done, and where.

# %%
sch["bert.encoder.layer.0.attention"]

# %% [markdown]
# The scores are as large as the sequence is long, squared, and eager attention keeps one tensor of them more than it
# needs. Sizes stay open: the graph was made at 24 tokens and runs at all of these.

# %%
after = saved()
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(lengths, before, "o-", color="#888888", label="original")
axes.plot(lengths, after, "o-", color="#70ad47", label="fused")
axes.set_xlabel("tokens")
axes.set_ylabel("MB kept for backward")
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## Verify
#
# The model beside itself with everything undone: outputs, gradients, weights after AdamW steps, in train and eval, at
# other sizes.

# %%
schedule.verify(sch, batch, steps=2)

# %% [markdown]
# It notices what is wrong, and names the step that brought it. Here a function of ours, put in place of the MLP's
# activation, takes the other form of GELU. That is 5e-4 off at most, which nobody would see in a loss.


# %%
def gelu(x):
    return F.gelu(x)


def other_gelu(x):
    return F.gelu(x, approximate="tanh")


mlps = sch["bert.encoder.layer.*.intermediate"]
mlps.replace(other_gelu, mlps.find(gelu, expect=2))
try:
    schedule.verify(sch, batch, steps=2)
except schedule.VerificationError as error:
    print(error)

# %% [markdown]
# ## Undo
#
# One step at a time, to the bit: `other_gelu` first, then the attention.

# %%
sch.undo()
print([step.description for step in sch.history])
sch.undo()
print([step.description for step in sch.history], "as before:", saved() == before)

# %% [markdown]
# Next: [a rule and an op of your own](03_own_rule_and_op.ipynb).
