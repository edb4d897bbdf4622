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
# # Coming from Liger, Unsloth, torch.compile, Megatron-LM or Slapo
#
# What you wrote there, and what you write here. Our side of each runs in this notebook; of the others only
# `torch.compile` does.

# %%
import copy

import matplotlib.pyplot as plt
import peft
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import fused
import schedule
from schedule.api.simulate import simulate
from schedule.report.costs import measure

hf.logging.set_verbosity_error()
hf.set_seed(0)

# %% [markdown]
# ## From Slapo
#
# The schedule language is Slapo's, and most of it reads the same.
#
# | Slapo | here |
# |---|---|
# | `sch = slapo.create_schedule(model)` | `sch = schedule.create_schedule(model, batch=batch)` |
# | `sch.mod` | `sch.module` |
# | `sch.trace(flatten=True)` first | nothing: `find` traces by need, with open sizes |
# | `sch["fc1"].decompose()`, so that the bias can be matched | nothing: `find` looks into a Linear |
# | `sch.find(pattern)` | `sch.find(pattern, expect=1)`, and globs: `sch["h.*.mlp"].find(…)` |
# | `sch.fuse(found, compiler="TorchScript", name=…)` | `sch.fuse(found)`, or `sch.fuse("bias_gelu")`; backward too |
# | `sch["fc1"].shard("weight", axis=0)` | the same |
# | `sch["fc2"].sync(mode="fwd_post", sync_op_or_fn="all_reduce")` | `sch["fc2"].sync("fwd_post", "all_reduce")` |
# | `slapo.random.CudaRNGStatesTracker` | `schedule.RNGStatesTracker`; on each rank, `sch["attn"].fork_rng()` |
# | a schedule written for each architecture | `schedule.optimize(model, batch)`, `sch.shard_plan(mesh)` |
# | `model, _ = slapo.build(sch, init_weights=…)` | `model = schedule.build(sch)`; the model is the same object |
# | | `sch.undo()`, `schedule.verify(sch, batch)`, `sch.recipe()` |


# %%
class MLP(nn.Module):
    """Two layers."""

    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def bias_gelu(x, bias):
    return F.gelu(x + bias)


mlp, x = MLP(16), torch.randn(8, 16)
sch = schedule.create_schedule(mlp, batch=x)
sch.fuse(sch.find(bias_gelu, expect=1))
print(sch.graph.python_code("self").src)


# %% [markdown]
# Sharding by hand, tried on two simulated ranks:


# %%
def by_hand(sch):
    sch["fc1"].shard("weight", axis=0)
    sch["fc1"].shard("bias", axis=0)
    sch["fc2"].shard("weight", axis=1)
    sch["fc1"].sync("bwd_post", "all_reduce")
    sch["fc2"].sync("fwd_post", "all_reduce")


tried = simulate(MLP(16), torch.randn(8, 16, requires_grad=True), by_hand, ranks=2)
print("equal:", tried.equal(), [collective.op for collective in tried.forward + tried.backward])

# %% [markdown]
# ## From Megatron-LM
#
# The fused ops have Megatron's names, and `fused` can be had alone. They take any rank and dtype, run without CUDA
# (compiled on a CPU), and refuse with a `ValueError` where Megatron has an `assert`.
#
# | Megatron-LM | here |
# |---|---|
# | `megatron.core.fusions.fused_bias_gelu.bias_gelu_impl` | `fused.bias_gelu_impl`, `fused.bias_gelu` |
# | `…fused_bias_swiglu.bias_swiglu_impl` | `fused.bias_swiglu_impl`, `fused.bias_swiglu` |
# | `…fused_softmax.FusedScaleMaskSoftmax` | `fused.FusedScaleMaskSoftmax`, `fused.scaled_masked_softmax` |
# | `…fused_bias_dropout.get_bias_dropout_add` | `fused.get_bias_dropout_add`, `fused.bias_dropout_add` |
# | `megatron.core.transformer.mlp.MLP` | `fused.MLP` |
# | a model written in parallel layers | the HuggingFace model |
# | `--tensor-model-parallel-size 2 --sequence-parallel` | `sch.apply_plan(sch.shard_plan(mesh, sequence=True))` |
# | `--pipeline-model-parallel-size 2` | `sch["model.layers.15"].cut_pipeline_stage()` |

# %%
values, bias = torch.randn(4, 6, 32), torch.randn(32)
torch.testing.assert_close(fused.bias_gelu_impl(values, bias), F.gelu(values + bias, approximate="tanh"))
torch.testing.assert_close(fused.swiglu(values), F.silu(values[..., :16]) * values[..., 16:])

llama_config = hf.LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
    attn_implementation="eager",
)
llama = hf.LlamaForCausalLM(llama_config)
ids = torch.randint(0, 512, (4, 64))
batch = {"input_ids": ids, "labels": ids}
plan = schedule.create_schedule(llama, batch=batch).shard_plan(2, sequence=True)
for name in ("model.layers.0.mlp", "model.layers.0.self_attn"):
    group = next(group for group in plan.groups if group.name == name)
    print(name, "sharded:", [step.path.rpartition(".")[2] for step in group.shards])
    print("   ", [(step.path.rpartition(".")[2], step.op) for step in group.syncs])

# %% [markdown]
# ## From Liger
#
# Liger replaces classes and functions of a model's modeling code, for the architectures that it has a patch for: before
# the model is made, for the process, or afterwards in a model that it is given.
#
# | Liger | here |
# |---|---|
# | `apply_liger_kernel_to_llama()` before the model is made | `schedule.optimize(model, batch)` at any time |
# | `AutoLigerKernelForCausalLM.from_pretrained(…)` | `AutoModelForCausalLM.from_pretrained(…)`, then the same |
# | `apply_liger_kernel_to_llama(rope=False, swiglu=True, …)` | `optimize(…, rules=["rms_norm", "gated_mlp"])` |
# | `fused_linear_cross_entropy=True` | `optimize(…, rules="memory")` |
# | `TrainingArguments(use_liger_kernel=True)` | `Trainer(…, callbacks=[OptimizeCallback()])` |
# | | a report of what was done and what not; `undo` |

# %%
twin = copy.deepcopy(llama)
sch = schedule.create_schedule(llama, batch=batch)
report = schedule.optimize(sch, rules="memory", cost_guard=False, measure=True)
report

# %% [markdown]
# Only this model has changed: its twin, of the same class and in the same process, runs the original code. An
# architecture that nobody has written a patch for is scheduled in the same way.

# %%
print("the twin as before:", measure(twin, batch) == report.measured["before"])
config = hf.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, bos_token_id=1, eos_token_id=2)
gpt2 = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
other = schedule.optimize(gpt2, batch, rules="memory", cost_guard=False, measure=True)
print("GPT-2:", other.applied)

# %%
figure, axes = plt.subplots(figsize=(6, 1.8))
names = ["Llama", "GPT-2"]
for color, when, shift in (("#888888", "before", -0.2), ("#70ad47", "after", 0.2)):
    sizes = [each.measured[when].saved_bytes / 1e6 for each in (report, other)]
    axes.barh([shift, 1 + shift], sizes, height=0.38, color=color, label=when)
axes.set_yticks(range(2), names)
axes.invert_yaxis()
axes.set_xlabel("MB kept for backward")
axes.legend()
figure.tight_layout()

# %% [markdown]
# ## From Unsloth
#
# Unsloth loads a model by a class of its own, with kernels for the language models that it knows, and trains LoRA or
# all of it on a GPU. Here the model is loaded as always, and LoRA may come before the schedule or after it.
#
# | Unsloth | here |
# |---|---|
# | `import unsloth` before transformers | in any order |
# | `FastLanguageModel.from_pretrained(name)` | `AutoModelForCausalLM.from_pretrained(name)` |
# | `FastLanguageModel.get_peft_model(model, r=16, …)` | `peft.get_peft_model(model, LoraConfig(r=16, …))` |
# | `use_gradient_checkpointing="unsloth"` | the same of transformers, or `sch["…"].checkpoint(budget="8GB")` |
# | | `schedule.optimize(model, batch, rules="memory")` |
# | `SFTTrainer(model, …)` | the same, or `callbacks=[OptimizeCallback(rules="memory")]` |
# | `model.save_pretrained_merged(…)` | `model.merge_and_unload()`: it is PEFT's own model |

# %%
lora = peft.get_peft_model(copy.deepcopy(twin), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
tuned = schedule.optimize(lora, batch, rules="memory", cost_guard=False)
print(tuned.sentence)
print("equal:", bool(schedule.verify(lora, batch, steps=1)))

# %% [markdown]
# ## From torch.compile
#
# A schedule rewrites what it has rules for, and leaves the model as it is; the compiler rewrites all of it, into
# something else. They go together: schedule first, then compile.
#
# | `torch.compile` | here |
# |---|---|
# | returns another object, whose `state_dict` keys begin with `_orig_mod.` | the same object and keys |
# | a graph at the first call, of torch's own operations | a graph for each module, submodules as calls |
# | another kind of input: compiles again; after `recompile_limit` (8), eager | open sizes; else adapts, up to 8 kinds |
# | `fullgraph=True` to be told of graph breaks | `strict=True` to be told of what was left alone |
# | `TORCH_LOGS` | the report, `sch.show()`, `fxschedule explain` |

# %%
compiled = torch.compile(twin, backend="eager", fullgraph=True)
print("compiled: ", type(compiled).__name__, next(iter(compiled.state_dict())))
print("scheduled:", type(llama).__name__, next(iter(llama.state_dict())))

# %% [markdown]
# Compiled on top of the schedule, in one graph. (`backend="eager"` traces without generating code: it is enough to see
# that it can.)

# %%
with torch.no_grad():
    together = torch.compile(llama.eval(), backend="eager", fullgraph=True)(**batch)
    alone = twin.eval()(**batch)
print(f"losses {(together.loss - alone.loss).abs().item():.0e} apart")

# %% [markdown]
# ## Differences
#
# | | takes | acts on | undone by |
# |---|---|---|---|
# | Slapo [1] | models that it has a schedule for, or yours | one model | – |
# | Megatron-LM [2] | models written in its layers | its own layers | – |
# | Liger [3] | HuggingFace models that it has a patch for | the process, or one model | reloading the modules [4] |
# | Unsloth [6] | language models that it has code for | the process, when it is imported | – |
# | torch.compile [5] | any code | a wrapper, or in place by `model.compile()` | the object it was made of |
# | here | any module; rules by pattern | one model | `sch.undo()`, to the bit |
#
# | | parallel | checked by |
# |---|---|---|
# | Slapo [1] | shard, sync and stages, by hand or by a solver | `slapo.verify`: outputs |
# | Megatron-LM [2] | tensor, sequence, pipeline, expert | its tests |
# | Liger [3] | with FSDP and DeepSpeed | its tests of convergence |
# | torch.compile [5] | – | – |
# | here | a plan from the graph, or by hand; stages | `verify`: outputs, gradients, training steps |
#
# Where the others are ahead: Megatron-LM trains on thousands of GPUs, and Liger's kernels are used on GPUs every day;
# what is here was tested on CPUs. `torch.compile` fuses everything, this only what it has a rule for.
#
# Sources:
#
# 1. Slapo: its [guide](https://github.com/awslabs/slapo/blob/main/docs/source/scripts/mlp-multi-gpu.py),
#    `slapo/model_schedule`, `slapo/sharding/solver.py`, `slapo/verify.py`. Last released on PyPI in March 2023.
# 2. Megatron-LM: [`megatron/core/fusions`](https://github.com/NVIDIA/Megatron-LM/tree/main/megatron/core/fusions).
# 3. Liger-Kernel: [Getting Started](https://github.com/linkedin/Liger-Kernel/blob/main/docs/Getting-Started.md);
#    global state, issue [242](https://github.com/linkedin/Liger-Kernel/issues/242); patching one model, pull request
#    [772](https://github.com/linkedin/Liger-Kernel/pull/772). `AutoLigerKernelForCausalLM` of GPT-2 is a `KeyError`:
#    pull request [1404](https://github.com/linkedin/Liger-Kernel/pull/1404), open when this was written.
# 4. `test/utils.py` of Liger-Kernel; see its pull request
#    [1389](https://github.com/linkedin/Liger-Kernel/pull/1389).
# 5. [`torch.compile`](https://docs.pytorch.org/docs/2.15/generated/torch.compile.html) of PyTorch 2.15.
# 6. [TRL's page on Unsloth](https://huggingface.co/docs/trl/unsloth_integration), and
#    [Unsloth's repository](https://github.com/unslothai/unsloth).
