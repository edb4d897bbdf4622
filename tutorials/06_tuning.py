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
# # Tuning
#
# How much to recompute, in what parts to run the batch, which rules: a schedule has knobs, and the best values depend
# on the model, the machine and the memory there is. `schedule.tune` tries them on the model itself, measures, and takes
# every trial back to the bit. The weights are random: nothing is downloaded.

# %%
import tempfile
import warnings
from pathlib import Path

import torch
import transformers as hf
from IPython.display import Image

import schedule
from schedule.tuning import ModeledStep, Shape, TrainingStep

warnings.filterwarnings("ignore")
hf.logging.set_verbosity_error()
torch.manual_seed(0)

no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = hf.GPT2Config(
    n_layer=3, n_embd=128, n_head=4, vocab_size=500, n_positions=128, bos_token_id=1, eos_token_id=2, use_cache=False,
    **no_dropout,
)  # fmt: skip
model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
ids = torch.randint(3, 500, (8, 64))
batch = {"input_ids": ids, "labels": ids}

# %% [markdown]
# ## A schedule function and its space
#
# The schedule function takes a schedule and the knobs. The space says what each may be. `micro_batch` is none of its
# parameters: it is a knob of the training step that is measured, the rows of the batch that run at a time.


# %%
where = {"attention": "transformer.h.*.attn", "mlp": "transformer.h.*.mlp", "blocks": "transformer.h.*"}


def plan(sch, rules, recomputed):
    if rules != "none":
        schedule.optimize(sch, rules=rules)
    if recomputed != "nothing":
        sch[where[recomputed]].checkpoint()


space = {
    "rules": ["none", "memory", "all"],
    "recomputed": ["nothing", *where],
    "micro_batch": [4, 8],
}

# %% [markdown]
# ## Search
#
# As it is, a step of the model needs 27 MB beyond the parameters, and 16 MB in two parts. We allow 12. Memory is
# counted first: what does not fit is timed only once, to learn from. The time is that of the step over the original
# model's, both measured in turns, twice here. The trials are kept in a file.

# %%
storage = Path(tempfile.mkdtemp()) / "gpt2.journal"
cost = TrainingStep(rounds=2)
search = {"memory": 12_000_000, "cost": cost, "storage": storage}

tuning = schedule.tune(model, plan, space, batch, trials=7, **search)
tuning

# %% [markdown]
# Called again, it goes on where it stopped: `trials` counts those that are there already.

# %%
tuning = schedule.tune(model, plan, space, batch, trials=14, **search)
print(tuning.summary())
print("best:", tuning.best.label)

# %% [markdown]
# ## Time against memory
#
# Each dot is a trial; the grey ones are over the bound. Nothing beats the steps of the Pareto front in both: it says
# what more memory would buy.

# %%
picture = storage.with_suffix(".png")
tuning.plot(picture)
Image(picture)

# %% [markdown]
# ## Use it
#
# The model is as it was. `apply` schedules it by the best knobs, and `verify` compares it with the original, outputs
# and gradients. `micro_batch` is no step of the schedule: it is for your training loop.

# %%
sch = tuning.apply(model, batch)
print(schedule.verify(sch, batch))

# %% [markdown]
# The steps of the best trial are a recipe, for another process or another model of the kind.

# %%
print(tuning.recipe.to_python())

# %% [markdown]
# ## Many devices
#
# A cost need not run anything. `ModeledStep` works out what a step takes on many devices: FLOPs, messages, the
# bubble of a pipeline, and the bytes of the fullest device. Here are 16 of 80 GB, and how to share 7 billion
# parameters out: tensor parallel × pipeline, the rest data parallel. It is a model, of A100s unless told otherwise;
# docs/scaling.md says what it assumes.

# %%
llama = Shape(parameters=7_000_000_000, layers=32, hidden=4096, heads=32)
devices = {"split": schedule.splits(16), "micro_batch": [1, 2, 4], "recomputed": [False, True]}
shared = schedule.tune(
    model, lambda sch: None, devices, batch,
    memory=80 * 10**9, trials=30, cost=ModeledStep(llama, devices=16, rows=64, sequence=4096),
)  # fmt: skip
print(shared.summary())
print(f"best: {shared.best.label}: {shared.best.time:.1f} s, {shared.best.memory / 1e9:.0f} GB a device")

# %% [markdown]
# ## Trials that fail
#
# A trial that raises is recorded with its reason, and the search goes on. Where nothing fits, the result says what was
# closest.


# %%
def careless(sch, path):
    sch[path].checkpoint()


while sch.history:
    sch.undo()
failing = schedule.tune(model, careless, {"path": ["transformer.h.0", "transformer.layer.0"]}, batch, memory=1_000_000)
print(failing)
try:
    failing.best
except schedule.NotApplicable as error:
    print(error)
