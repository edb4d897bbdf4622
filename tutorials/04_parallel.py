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
# # Parallel, on one machine
#
# A tensor-parallel plan and what it costs, tried out in this process; then two real processes under `torchrun`, once
# with tensor parallelism and once as a pipeline, beside one process. No GPU is needed: two processes on a CPU run the
# same code as two GPUs.

# %%
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from train_distributed import batch_of, llama

import schedule
from schedule.api.simulate import simulate

STEPS = 15
torch.manual_seed(0)
model = llama(width=64, layers=2)
batch = batch_of(0, rows=4)

# %% [markdown]
# ## The plan
#
# `shard_plan` finds in the traced graph what can be sharded: attention by heads, an MLP by its width, the vocabulary
# by its rows. It knows no architecture by name. Each group begins with *columns* (every rank computes some of the
# features) and ends with *rows* (every rank has a partial sum, which an all-reduce adds up).

# %%
sch = schedule.create_schedule(model, batch=batch)
plan = sch.shard_plan(2)
print(plan)

# %% [markdown]
# A plan is data: leave groups out, or write it to a file.

# %%
smaller = plan.without("vocabulary")
print(f"bytes that each rank sends a step: {plan.bytes_moved():,} and {smaller.bytes_moved():,}")
print(len(smaller.to_json()), "characters of JSON;", smaller.shards[0])

# %% [markdown]
# ## Try it without processes
#
# `simulate` gives each rank a thread and its share of the parameters, runs a step, and compares outputs and all
# gradients with the whole model.

# %%
tried = simulate(model, batch, lambda sch: sch.apply_plan(smaller), ranks=2)
print("forward: ", Counter(each.op for each in tried.forward))
print("backward:", Counter(each.op for each in tried.backward))
print("equal:   ", tried.equal(), f"(outputs {tried.output:.0e}, gradients {tried.gradient:.0e} apart)")

# %% [markdown]
# A mistake shows. Here one layer's MLP forgets its collectives, so that each rank goes on with its partial sum.

# %%
wrong = schedule.create_schedule(model, batch=batch).shard_plan(2).without("vocabulary")
mlp = next(group for group in wrong.groups if group.name == "model.layers.1.mlp")
mlp.syncs.clear()
tried = simulate(model, batch, lambda sch: sch.apply_plan(wrong), ranks=2)
print("equal:", tried.equal(), f"(outputs {tried.output:.0%}, gradients {tried.gradient:.0%} apart)")

# %% [markdown]
# By hand, the same as in the plan is `sch["…gate_proj"].shard("weight", axis=0)` and
# `sch["…down_proj"].sync("fwd_post", "all_reduce")`. Those refuse what cannot hold.

# %%
try:
    simulate(model, batch, lambda sch: sch["model.layers.0.mlp.up_proj"].shard("weight", axis=2), ranks=2)
except schedule.ShardError as error:
    print(error)

# %% [markdown]
# ## What each rank holds
#
# Of the plan over two ranks, and of a pipeline of two stages. Norms are whole on every rank, since they are small, and
# so is the vocabulary in the plan without it.


# %%
def held_by_tensor_parallel() -> list[int]:
    """Parameters on each rank."""
    shared = {f"{step.path}.{step.name}" for step in smaller.shards}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return [sum(size // 2 if name in shared else size for name, size in sizes.items())] * 2


def held_by_pipeline() -> list[int]:
    """Parameters in each stage: the embedding goes with the first, the head with the last."""
    first = [*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()]
    own = sum(parameter.numel() for parameter in first)
    return [own, sum(parameter.numel() for parameter in model.parameters()) - own]


whole = sum(parameter.numel() for parameter in model.parameters())
bars = {"one process": [whole], "tensor parallel": held_by_tensor_parallel(), "pipeline": held_by_pipeline()}
figure, axes = plt.subplots(figsize=(6, 2))
names = [f"{name}, rank {rank}" for name, sizes in bars.items() for rank in range(len(sizes))]
axes.barh(
    names, [size / 1e3 for sizes in bars.values() for size in sizes], color=["#888888"] + 2 * ["#70ad47", "#5b9bd5"]
)
axes.invert_yaxis()
axes.set_xlabel("thousand parameters")
figure.tight_layout()

# %% [markdown]
# ## Two processes
#
# [`train_distributed.py`](train_distributed.py) makes the model on the meta device, applies the plan or cuts the
# stages, and `schedule.build` gives each process its own part of the weights. It runs twice here: `--pp 1 2 --tp 2 1`.
# The time limit is there so that a process that waits for another cannot hang the notebook.

# %%
with tempfile.TemporaryDirectory() as folder:
    losses = Path(folder) / "losses.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    options = ["--pp", "1", "2", "--tp", "2", "1", "--layers", "2", "--steps", str(STEPS), "--losses", str(losses)]
    run = subprocess.run([*launch, "train_distributed.py", *options], capture_output=True, text=True, timeout=240)
    print(run.stderr[-2000:] if run.returncode else "done")
    curves = json.loads(losses.read_text())

# %% [markdown]
# And one process: the same seed, the same batches, no mesh.

# %%
torch.manual_seed(0)
with torch.device("meta"):
    alone = llama(width=64, layers=2)
example = {name: value.to("meta") for name, value in batch_of(0, 2).items()}
alone = schedule.build(schedule.create_schedule(alone, batch=example)).train()
optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3, foreach=False)
curves["one process"] = []
for step in range(STEPS):
    loss = alone(**batch_of(step, rows=8)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    curves["one process"].append(loss.item())

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(6, 4), sharex=True, height_ratios=[2, 1])
styles = {"one process": ("#bbbbbb", "-", 6), "pp 1, tp 2": ("#70ad47", "-", 2), "pp 2, tp 1": ("#5b9bd5", "--", 2)}
for name, (color, dashes, width) in styles.items():
    above.plot(curves[name], dashes, color=color, linewidth=width, label=name)
    if name != "one process":
        apart = [abs(a - b) / b for a, b in zip(curves[name], curves["one process"], strict=True)]
        below.semilogy([max(each, 1e-9) for each in apart], dashes, color=color)
        print(f"{name}: at most {max(apart):.0e} from one process")
above.set_ylabel("loss")
above.legend()
below.set_ylabel("apart")
below.set_xlabel("step")
figure.tight_layout()

# %% [markdown]
# On several machines the same script runs under the same `torchrun`; on GPUs it takes NCCL by itself. Sharded
# checkpoints, FSDP over the copies and pipelines times tensor parallelism: see the options of the script.
#
# Next: [fine-tuning with Trainer and LoRA](05_fine_tuning.ipynb).
