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
# # Tests of graphs
#
# A modeling file changes under your feet: a release of transformers rewrites an MLP, and your kernel, your quantization
# or your rule no longer fits. Pin the graph of a module in a file, and let a test say what has changed. Nothing is
# scheduled here, and nothing is downloaded.

# %%
import tempfile
from pathlib import Path

import torch
import transformers as hf
from torch import nn

import schedule.testing as testing

hf.logging.set_verbosity_error()
torch.manual_seed(0)

config = hf.LlamaConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=500,
)
model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
ids = torch.randint(3, 500, (2, 16))
batch = {"input_ids": ids, "labels": ids}

# %% [markdown]
# ## The graph of a module
#
# `graph_of` runs the model once and traces the module at a path. Names and order of the nodes do not count, so two
# layers give the same text: `x0` is the first argument, `%3` a result, `self.up_proj.weight` a parameter.

# %%
mlp = testing.graph_of(model, batch, "model.layers.0.mlp")
print(mlp)

# %%
testing.assert_graphs_equal(mlp, testing.graph_of(model, batch, "model.layers.1.mlp"))
print(testing.graph_of(model, batch, "model.layers.0.input_layernorm"))

# %% [markdown]
# ## Pin it
#
# In a test you would write `golden(graph_of(model, batch, "model.layers.0.mlp"))`, with the two fixtures of the pytest
# plugin, and run `pytest --update-golden` once. Without pytest it is one call.

# %%
golden = Path(tempfile.mkdtemp()) / "mlp.txt"
testing.assert_graph_matches(mlp, golden, update=True)
testing.assert_graph_matches(testing.graph_of(model, batch, "model.layers.1.mlp"), golden)
print(golden.read_text())

# %% [markdown]
# ## A new release
#
# Suppose that the next release computes the gate in float64 and rounds it. The test fails, shows both graphs beside
# each other, and marks the first difference with its line in the modeling file.


# %%
class NewMlp(nn.Module):
    """The MLP of the next release."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = old.gate_proj, old.up_proj, old.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu(self.gate_proj(x).double()).float()
        return self.down_proj(gate * self.up_proj(x))


new = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
new.load_state_dict(model.state_dict())
for layer in new.model.layers:
    layer.mlp = NewMlp(layer.mlp)

try:
    testing.assert_graph_matches(testing.graph_of(new, batch, "model.layers.0.mlp"), golden)
except AssertionError as error:
    print(str(error).replace(str(golden.parent), "golden"))

# %% [markdown]
# ## Does it matter?
#
# The graph is another one; whether the model computes the same is another question. `assert_equivalent` compares
# outputs, gradients and the parameter updates of a few optimizer steps, in training and eval mode, at several shapes.

# %%
testing.assert_equivalent(model, new, batch, steps=2)
print("equivalent within rounding")

# %%
for layer in new.model.layers:
    layer.mlp.up_proj, layer.mlp.gate_proj = layer.mlp.gate_proj, layer.mlp.up_proj
try:
    testing.assert_equivalent(model, new, batch, steps=2)
except AssertionError as error:
    print(error)

# %% [markdown]
# ## Other graphs
#
# The assertions take plain `fx.GraphModule`s and programs of `torch.export` too.


# %%
class Gated(nn.Module):
    """A gate, written in two ways."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return up * gate.sigmoid() if self.swapped else torch.sigmoid(gate) * up


testing.assert_graphs_equal(torch.fx.symbolic_trace(Gated(False)), torch.fx.symbolic_trace(Gated(True)))
inputs = torch.randn(2, 4), torch.randn(2, 4)
program = torch.export.export(Gated(False), inputs)
testing.assert_graphs_equal(program, torch.export.export(Gated(False), inputs))
