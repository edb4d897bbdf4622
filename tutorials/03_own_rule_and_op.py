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
# # A rule and an op of your own
#
# An op is an autograd function with a formula that defines it. A rule says which code it may stand for, and carries the
# proof that both are the same. The example is *snake*, `x + sin²(αx) / α`, the activation of audio codecs
# such as DAC, for which no rule is built in.

# %%
import matplotlib.pyplot as plt
import torch
import transformers as hf

import schedule
from schedule.rules import Proof, prove, register_rule, unregister_rule

hf.logging.set_verbosity_error()
torch.manual_seed(0)

config = hf.DacConfig(
    encoder_hidden_size=8,
    downsampling_ratios=[2, 2],
    decoder_hidden_size=32,
    upsampling_ratios=[2, 2],
    n_codebooks=2,
    codebook_size=16,
    codebook_dim=4,
    hidden_size=32,
)
model = hf.DacModel(config)
batch = {"input_values": torch.randn(2, 1, 256)}
sch = schedule.create_schedule(model, batch=batch)
print(sch["decoder.snake1"].graph.python_code("self").src)

# %% [markdown]
# ## The op
#
# First the formula in plain torch: it is what the op means. Eager torch keeps a tensor of most steps of this for the
# backward pass. `x` and `α` are enough, since the gradient can be worked out from them:
# `∂x = 1 + α / (α + ε) · sin(2αx)`.

# %%
EPS = 1e-9


def snake_formula(x, alpha):
    return x + (alpha + EPS).reciprocal() * torch.sin(alpha * x).pow(2)


class Snake(torch.autograd.Function):
    @staticmethod
    def forward(x, alpha):
        return snake_formula(x, alpha)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, alpha = ctx.saved_tensors
        double, inverse = torch.sin(2 * alpha * x), (alpha + EPS).reciprocal()
        dx = g * (1 + alpha * inverse * double)
        dalpha = g * inverse * (x * double - inverse * torch.sin(alpha * x).pow(2))
        return dx, dalpha.sum_to_size(alpha.shape)


def snake(x, alpha):
    """x + sin²(αx) / α, which saves x and α only."""
    return Snake.apply(x, alpha)


x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
alpha = torch.rand(1, 3, 1, dtype=torch.float64, requires_grad=True)
print("equal:", torch.equal(snake(x, alpha), snake_formula(x, alpha)))
print("gradients:", torch.autograd.gradcheck(snake, (x, alpha)), torch.autograd.gradgradcheck(snake, (x, alpha)))

# %% [markdown]
# ## The rule
#
# `patterns` is every way the construct is written, `build` puts in the call. `Proof` says how to check it:
#
# - `forms`: the code as models write it; the rule must match each one;
# - `inputs`: tensors for a shape and a dtype;
# - `refused`: lookalikes that it must leave alone.


# %%
def pattern(x, alpha):
    return x + (alpha + EPS).reciprocal() * torch.sin(alpha * x).pow(2)


def inputs(shape, dtype):
    return torch.randn(shape, dtype=dtype), torch.rand(1, shape[1], 1, dtype=dtype) + 0.5


proof = Proof(
    forms=(
        snake_formula,
        lambda x, alpha: x + torch.sin(alpha * x) ** 2 * (alpha + EPS).reciprocal(),
    ),
    inputs=inputs,
    shapes=((2, 3, 8), (1, 4, 1)),
    refused=(
        lambda x, alpha: x + (alpha + EPS).reciprocal() * torch.cos(alpha * x).pow(2),
        lambda x, alpha: x + (alpha + 0.1).reciprocal() * torch.sin(alpha * x).pow(2),
        lambda x, alpha: alpha + (alpha + EPS).reciprocal() * torch.sin(alpha * x).pow(2),
    ),
)


@register_rule(name="snake", family="snake", patterns=[pattern], proof=proof, summary="snake(x, alpha)")
def rule(graph, inputs, scalars):
    return graph.call_function(snake, (inputs["x"], inputs["alpha"]))


# %% [markdown]
# `prove` traces each form, lets the rule rewrite it, and compares outputs and the gradients of all inputs, in float64,
# float32 and bfloat16, at shapes that the graph was not made for. No failures means proved.

# %%
print(prove(rule))

# %% [markdown]
# ## What the proof refuses
#
# A wrong op. Forgetting the 2 in `sin(2αx)` is easy, and training goes on with it, only worse.


# %%
class WrongSnake(Snake):
    @staticmethod
    def backward(ctx, g):
        x, alpha = ctx.saved_tensors
        _, dalpha = Snake.backward(ctx, g)
        return g * (1 + torch.sin(alpha * x)), dalpha


def wrong_snake(x, alpha):
    return WrongSnake.apply(x, alpha)


def refused(**changes):
    """A rule like ours but for ``changes``, and what its proof says."""
    settings = {"name": "wrong", "family": "snake", "patterns": (pattern,), "build": rule.build, "proof": proof}
    for failure in prove(schedule.Rule(**{**settings, **changes})):
        print(failure)


refused(build=lambda graph, inputs, scalars: graph.call_function(wrong_snake, (inputs["x"], inputs["alpha"])))

# %%
points = torch.linspace(-4, 4, 200, dtype=torch.float64, requires_grad=True)
one = torch.ones((), dtype=torch.float64)
figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharex=True)
axes[0].plot(points.detach(), snake(points, one).detach(), color="#70ad47")
axes[0].set_title("snake")
for op, style in ((snake_formula, "-"), (snake, ":"), (wrong_snake, "--")):
    (slope,) = torch.autograd.grad(op(points, one).sum(), points)
    axes[1].plot(points.detach(), slope, style, linewidth=2, label=op.__name__)
axes[1].set_title("its gradient")
axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
figure.tight_layout()

# %% [markdown]
# A pattern that is too generous. `scalar("eps")` takes any constant, and the op has one of its own.


# %%
def any_eps(x, alpha):
    return x + (alpha + schedule.scalar("eps")).reciprocal() * torch.sin(alpha * x).pow(2)


refused(patterns=(any_eps,))

# %% [markdown]
# And one that is too narrow: a form that the rule does not find is a failure too, so that a construct which models
# write in two ways is not missed in silence.


# %%
def with_square(x, alpha):
    return x + (alpha + EPS).reciprocal() * torch.square(torch.sin(alpha * x)) * 1.0


refused(patterns=(with_square,))

# %% [markdown]
# ## Use it
#
# A registered rule is like a built-in one: `optimize` applies it, `find("snake")` finds it, reports name it.

# %%
report = schedule.optimize(sch, rules="snake", measure=True)
report

# %% [markdown]
# The activation is a small module, which the graph around it opens: the call stands there.

# %%
print(sch["decoder"].graph.python_code("self").src)

# %%
schedule.verify(sch, batch, steps=2)

# %% [markdown]
# The rule is written down by name in a recipe, which replays wherever the rule is registered.

# %%
print(sch.recipe().to_python())
again = schedule.replay(hf.DacModel(config), sch.recipe(), batch)
print([step.description for step in again.history])
unregister_rule("snake")

# %% [markdown]
# A rule that others can use goes into `schedule/rules/`, a row of a table with its proof, and its op into `fused/`,
# where it gets compiled and Triton kernels beside the formula.
#
# Next: [more than one process](04_parallel.ipynb).
