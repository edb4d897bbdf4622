"""Model of the cost of a training step on many devices: messages by α–β, products by FLOPs, without running it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn

from schedule.distributed.tensor_parallel.expert_proof import has_experts
from schedule.util.errors import NotApplicable

BYTES = 2
"""Bytes of a bf16 number."""
INDEX = 8
"""Bytes of an index."""
STATES = 16
"""Bytes per parameter: bf16 weight and gradient; float32 weight and two moments of AdamW (Rajbhandari et al. 2020)."""


@dataclass(frozen=True)
class Network:
    """Cost of a message.

    Attributes:
        alpha: seconds per message.
        bandwidth: bytes per second, of each device.
    """

    alpha: float
    bandwidth: float

    def send(self, size: float, messages: float = 1) -> float:
        """Return the seconds in which a device sends ``size`` bytes in this number of messages."""
        return messages * self.alpha + size / self.bandwidth

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds for a ring all-reduce of ``size`` bytes: a reduce-scatter and an all-gather."""
        return self.send(2 * size * (ranks - 1) / ranks, 2 * (ranks - 1))


@dataclass(frozen=True)
class Machine:
    """Devices in nodes, by default A100s with eight per node.

    Attributes:
        peak: FLOP/s of a device.
        reached: fraction of the peak reached by products.
        inside: network between the devices of a node.
        between: network between nodes.
        node: devices per node.
    """

    peak: float = 312e12
    reached: float = 0.6
    inside: Network = Network(5e-6, 235e9)
    between: Network = Network(10e-6, 25e9)
    node: int = 8

    def linking(self, devices: int) -> Network:
        """Return the network between this number of consecutive devices."""
        return self.inside if devices <= self.node else self.between


@dataclass(frozen=True)
class Mixture:
    """Sizes of the experts of a mixture.

    Attributes:
        parameters: number in the experts of all layers.
        layers: number of layers with experts.
        experts: number in each of them.
        chosen: number of experts for each token.
    """

    parameters: int
    layers: int
    experts: int
    chosen: int

    @classmethod
    def of(cls, model: nn.Module) -> Mixture | None:
        """Read the sizes of a HuggingFace model, or return None if it has no experts of one number and size."""
        chosen = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
        layers = [[*module.parameters(recurse=False)] for module in model.modules() if has_experts(module)]
        counts = {parameters[0].shape[0] for parameters in layers}
        if not isinstance(chosen, int) or len(counts) != 1:
            return None
        sizes = sum(parameter.numel() for parameters in layers for parameter in parameters)
        return cls(sizes, len(layers), counts.pop(), chosen)

    @property
    def idle(self) -> float:
        """Number of parameters without a part in the computation of a token."""
        return self.parameters * (1 - self.chosen / self.experts)


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer relevant for its costs.

    Attributes:
        parameters: total number.
        layers: number of identical layers.
        hidden: size of the hidden states.
        heads: number of heads by which attention can be sharded.
        mixture: of experts, if there are any.
        keys: features of the keys of a layer, as many as of its values; 0 for those of the hidden states.
        outside: number of the parameters that are in no layer: the embedding, the head and the last norm.
    """

    parameters: int
    layers: int
    hidden: int
    heads: int
    mixture: Mixture | None = None
    keys: int = field(default=0, compare=False)
    outside: int = field(default=0, compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Shape:
        """Read the sizes of a HuggingFace model, possibly on the meta device, from its ``config``.

        Raises:
            NotApplicable: the model has no config with these sizes.
        """
        config = getattr(model, "config", None)
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        if not all(isinstance(getattr(config, name, None), int) for name in names):
            raise NotApplicable(
                f"{type(model).__name__} has no config with {', '.join(names)}",
                fix="Shape(parameters=…, layers=…, hidden=…, heads=…)",
            )
        layers, hidden, heads = (getattr(config, name) for name in names)
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        keys = key_heads * (getattr(config, "head_dim", None) or hidden // heads)
        sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
        outside = sum(size for path, size in sizes.items() if not any(map(str.isdigit, path.split("."))))
        return cls(sum(sizes.values()), layers, hidden, math.gcd(heads, key_heads), Mixture.of(model), keys, outside)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        compute: products.
        tensor: all-reduces of hidden states, not overlapped with compute.
        data: the all-reduce of the gradients, which up to half of the compute may hide.
        stages: additional time of a pipeline: its bubble, and messages from stage to stage.
        reached: fraction of the peak reached by products.
        experts: all-to-alls between tokens and experts, not overlapped with compute.
        context: messages of shared sequences, not overlapped with compute.
    """

    compute: float
    tensor: float
    data: float
    stages: float = 0.0
    reached: float = 1.0
    experts: float = 0.0
    context: float = 0.0

    @property
    def hidden(self) -> bool:
        """Whether the compute hides the gradients' all-reduce."""
        return self.data <= self.compute / 2

    def seconds(self, hiding: bool = True) -> float:
        """Return the total time."""
        seen = max(0.0, self.data - self.compute / 2) if hiding else self.data
        return self.compute + self.tensor + self.experts + self.context + self.stages + seen

    def of_peak(self, hiding: bool = True) -> float:
        """Return the reached FLOP/s as a fraction of the peak."""
        return self.reached * self.compute / self.seconds(hiding)


_NO_EXPERTS = Mixture(0, 0, 1, 1)


def step_time(
    shape: Shape,
    machine: Machine,
    sequence: int,
    tokens: int,
    tensor: int = 1,
    stages: int = 1,
    data: int = 1,
    parts: int = 1,
    recomputed: bool = False,
    experts: int = 1,
    context: int = 1,
) -> StepTime:
    """Compute the time of one step on ``tensor`` × ``context`` × ``stages`` × ``data`` devices.

    Args:
        shape: of the model.
        machine: to run on.
        sequence: tokens per row.
        tokens: per step, for each of the ``data`` groups.
        tensor: devices that share a layer: two all-reduces forward, two backward.
        stages: of the pipeline, with one forward and one backward alternating; each device of a stage sends its part
            of a message (Narayanan et al. 2021).
        data: groups that all-reduce their gradients.
        parts: micro-batches per group.
        recomputed: whether layers run forward once more for their backward pass.
        experts: of the ``data`` groups, how many have different experts, each with all devices of ``tensor``; 1 shards
            the width of each expert instead. It replaces the all-reduces around experts by all-to-alls over all of
            these devices, and all-gathers over ``tensor``.
        context: devices that share each sequence; what is outside the layers, each computes for all tokens.
    """
    passes = 4 if recomputed else 3  # a backward pass counts as two
    mixture = shape.mixture or _NO_EXPERTS
    inside = shape.parameters - mixture.idle - shape.outside
    layers = 2 * passes * inside + 4 * passes * shape.layers * shape.hidden * sequence
    flops = layers / context + 2 * passes * shape.outside
    compute = flops * tokens / (tensor * stages) / (machine.peak * machine.reached)
    message = BYTES * tokens / parts * shape.hidden / context
    reduced = machine.linking(tensor).all_reduce(message, tensor)
    reductions = 2 * (passes - 1) * shape.layers / stages * parts * reduced
    spread = mixture.parameters if experts > 1 else 0
    gradients = machine.between.all_reduce(BYTES * (shape.parameters - spread) / (tensor * stages), data)
    exchanged = 0.0
    if experts > 1:
        own = BYTES * spread / (tensor * stages * experts)
        gradients += machine.between.all_reduce(own, data // experts)
        sent, gathered = expert_bytes(shape, tokens / context, experts, tensor, stages, parts, recomputed)
        times = mixture.layers / stages * parts
        exchanged = machine.linking(tensor * experts).send(sent, (3 * passes - 4) * times * (tensor * experts - 1))
        gathering = machine.linking(tensor).send(gathered, (passes - 1) * times * (tensor - 1))
        reductions += gathering - (passes - 1) * times * reduced
    shared = machine.linking(tensor * context).send(
        context_bytes(shape, tokens, context, tensor, stages, parts, recomputed),
        (context - 1) * parts * ((passes - 1) * shape.layers / stages + 4),
    )
    slot = (compute + reductions + exchanged + shared) / parts
    passed = 2 * machine.linking(tensor * stages).send(message / tensor) if stages > 1 else 0.0
    added = (stages - 1) * slot + (parts + stages - 1) * passed
    return StepTime(compute, reductions, gradients, added, machine.reached, exchanged, shared)


def expert_bytes(
    shape: Shape,
    tokens: float,
    experts: int,
    tensor: int = 1,
    stages: int = 1,
    parts: int = 1,
    recomputed: bool = False,
    number: int = BYTES,
) -> tuple[float, float]:
    """Return the bytes sent by each device in a step because experts are spread over ``experts`` × ``tensor`` devices.

    In each forward pass of a layer, an all-to-all tells the number of tokens of each expert, one sends the tokens to
    their experts, and one the results back, as two do with the gradients. The outputs and the tokens' gradients are
    all-gathered over ``tensor``. Tokens are taken to be even among the experts. The gradients of the routing weights,
    a number for each expert of a token, are left out.

    Args:
        shape: of the model.
        tokens: per step, of the devices of ``tensor``, which have the same.
        experts: groups of these devices, each with tokens of its own.
        tensor: devices with the same tokens.
        stages: of the pipeline.
        parts: micro-batches per step.
        recomputed: whether layers run forward once more.
        number: bytes of a number.

    Returns:
        the bytes of the all-to-alls, over all of these devices, and those of the all-gathers.
    """
    mixture = shape.mixture or _NO_EXPERTS
    passes, ranks, layers = 3 if recomputed else 2, experts * tensor, mixture.layers / stages
    states = passes * number * tokens * shape.hidden
    counts = (passes - 1) * parts * INDEX * mixture.experts
    sent = (2 * states * mixture.chosen / tensor + counts) * (ranks - 1) / ranks
    return layers * sent, layers * states * (tensor - 1) / tensor


def context_bytes(
    shape: Shape,
    tokens: int,
    context: int,
    tensor: int = 1,
    stages: int = 1,
    parts: int = 1,
    recomputed: bool = False,
    number: int = BYTES,
) -> float:
    """Return the bytes sent by each device in a step because ``context`` devices share each sequence.

    The keys and values of a layer are all-gathered in each forward pass, and their gradients reduce-scattered. The
    hidden states after the last layer are all-gathered, and so is the gradient of those before the first. In each
    micro-batch the gradients of the layers' parameters are all-reduced.

    Args:
        shape: of the model.
        tokens: per step, of the devices that share sequences.
        context: those devices.
        tensor: devices that share a layer.
        stages: of the pipeline.
        parts: micro-batches per step.
        recomputed: whether layers run forward once more.
        number: bytes of a number.
    """
    passes = 3 if recomputed else 2
    keys = passes * tokens * 2 * (shape.keys or shape.hidden) * shape.layers / (stages * tensor)
    gradients = 2 * parts * (shape.parameters - shape.outside) / (stages * tensor)
    return number * (keys + 2 * tokens * shape.hidden + gradients) * (context - 1) / context


def peak_bytes(
    shape: Shape,
    tokens: int,
    tensor: int = 1,
    stages: int = 1,
    parts: int = 1,
    recomputed: bool = False,
    experts: int = 1,
    context: int = 1,
) -> int:
    """Return the bytes of the fullest device: weights, gradients, AdamW, and saved activations of the layers.

    A layer saves 34 bytes per token and hidden feature, 24 of them sharded by tensor parallelism, or two if layers are
    recomputed (Korthikanti et al. 2022, without attention's weights, which fused attention does not save). The first
    stage stores as many micro-batches as there are stages. Logits are not counted.

    Args:
        shape: of the model.
        tokens: per micro-batch.
        tensor: devices that share a layer.
        stages: of the pipeline.
        parts: micro-batches per step.
        recomputed: whether layers run forward once more.
        experts: groups with different experts, as for :func:`step_time`.
        context: devices that share each sequence.
    """
    elsewhere = (shape.mixture or _NO_EXPERTS).parameters * (1 - 1 / experts)
    tokens = tokens // context
    whole = (10 + 24 / tensor) * tokens * shape.hidden
    layers = shape.layers / stages * min(stages, parts)
    activations = 2 * tokens * shape.hidden * layers + whole if recomputed else whole * layers
    return int(STATES * (shape.parameters - elsewhere) / (tensor * stages) + activations)
