"""Size thresholds for profitable rewrites, and their measurements.

``python -m benchmarks.rules`` measures training steps (forward and backward) of each construct, eager against fused,
in turns. On 2 cores of an x86-64 server, torch 2.13, fused time as a multiple of eager's:

================  =====  =====  =====  =====  =====
elements           2^17   2^18   2^20   2^22   2^23
================  =====  =====  =====  =====  =====
formula            1.12   0.90   0.69   0.53   0.40
single             1.30   1.49   1.21   1.08   1.02
softmax            2.03   1.42   0.78   0.63   0.36
softmax, dropout   1.52   1.37   1.14   1.13   0.85
================  =====  =====  =====  =====  =====

================  =====  =====  =====  =====
elements           2^17   2^18   2^20   2^22
================  =====  =====  =====  =====
rms_norm           2.75   0.79   0.56   0.53
rms_norm, sum      1.10          0.62   0.47
rms_norm, single   0.70   0.64   0.93   0.68
layer_norm         0.44   0.64   0.18   0.43
layer_norm, sum    1.01   1.09   1.13   1.16
gated              3.87   0.79   0.54   0.87
gated, packed      1.05   0.85   0.50   0.59
rotary             1.63   0.96   0.18   0.28
dropout            1.11   1.24   0.86   1.26
================  =====  =====  =====  =====

Single calls that torch has a slow kernel for, on one core: Mish, with a bias and without, 1.2 at 2^14, 0.9 to 1.0 at
2^15, 0.5 to 0.6 at 2^16, 0.3 to 0.4 from 2^18 on, and 0.3 to 0.4 of ``torch.compile``. GELU's tanh form behind a small
Linear, both timed: 1.2 at 2^16, 0.9 at 2^17, 0.8 at 2^18, 0.6 to 0.7 from 2^20 on, and 0.6 of ``torch.compile``.

Softmax of scores that are filled where a bool mask is True, on one core: 1.1 at 2^16, 0.8 at 2^17, 0.6 at 2^18, 0.4
from 2^19 on (beside it, with a mask that is added: 1.6, 1.2, 0.9, 0.6).

Gated residual sums, on one core of a busy machine: 1.0 to 1.4 up to 2^18, 0.8 to 0.9 at 2^19, 0.4 to 1.0 above, and 0.6
to 1.1 of ``torch.compile``, which reads and writes the same bytes.

Batch norms with ReLU, on one core: 1.0 to 1.1 at 2^20, 0.8 to 1.0 at 2^22; with a residual sum 1.0 to 1.1 and 0.9 to
1.05. In a ResNet-50 those of 3·2^20 elements cost 2 % of a step: torch's own kernels of a batch norm are as good.

Group norms with SiLU were measured on one core and on two: 1.6 to 1.7 at 2^17, 1.0 to 1.2 at 2^18, 0.9 at 2^19, 0.8 to
1.2 above; with a scale and shift, on one, 0.9 at 2^17, 0.6 at 2^18, 0.4 to 0.5 from 2^20 on. Adaptive layer norms, on
one: 1.8 at 2^15, 0.5 from 2^18 on.

The second table was measured on a busy machine: its small sizes are unreliable (dropout with the sum: 0.88 to 1.08).
Merged projections (``qkv_merge``, three; elements of the input) gain little over three products of the same library,
since the weights are copied at every call: with 256 features 1.17 by torch's BLAS and 1.02 by oneDNN at 2^14, 1.07 and
1.04 at 2^18, 0.98 and 0.93 at 2^19, 0.95 and 0.95 at 2^20; with 768 features 1.06 at 2^18 and 1.00 to 1.02 from 2^20
on; 2.7 for a single token without gradients. The same tensors are kept for the backward pass. So the rule is in no
set.

Products by oneDNN (``linear``; an AMD EPYC, a layer of 256 → 256 features, its three products, by multiplications):
1.10 at 2^22, 0.94 at 2^23, 0.74 at 2^24, 0.65 at 2^26, 0.63 at 2^29. ``fused.linear`` defines the threshold, 2^24, and
applies it to every call too.

"formula" is an activation written out; "single" is one call such as ``F.gelu`` after a Linear that adds the bias in its
product: eager is hard to beat there, and no less memory is kept for backward. Dropout is worth a tenth of the time,
since it frees half of the memory. A layer norm that is one call already gains nothing from the sum, and a projection
gains nothing from moving its bias to the dropout: on the CPU they are left alone below the largest sizes. Devices other
than the CPU were not measured (``python -m benchmarks.gpu --part B`` does it): where a rewrite takes out kernels, that
is worth more than their elements, so the thresholds are low; where eager has a kernel nearly as good (``single``,
``dropout``, layer norms), only large tensors are sure to gain, so they are high.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedule.capture import TensorSpec


@dataclass(frozen=True)
class Threshold:
    """Minimum number of elements for a profitable rewrite, by device."""

    cpu: int
    other: int


THRESHOLDS: dict[str, Threshold] = {
    "adaptive_layer_norm": Threshold(cpu=2**17, other=2**14),
    "attention": Threshold(cpu=2**14, other=2**14),
    "batch_norm": Threshold(cpu=2**22, other=2**14),
    "batch_norm, folded": Threshold(cpu=2**16, other=2**14),
    "cross_entropy": Threshold(cpu=2**19, other=2**14),
    "formula": Threshold(cpu=2**18, other=2**14),
    "single, gelu_tanh": Threshold(cpu=2**17, other=2**22),
    "single, mish": Threshold(cpu=2**16, other=2**22),
    "single": Threshold(cpu=2**23, other=2**22),
    "qkv_merge": Threshold(cpu=2**19, other=2**14),
    "softmax": Threshold(cpu=2**20, other=2**14),
    "softmax, filled": Threshold(cpu=2**18, other=2**14),
    "rotary": Threshold(cpu=2**18, other=2**14),
    "gated_residual": Threshold(cpu=2**19, other=2**14),
    "gated": Threshold(cpu=2**18, other=2**14),
    "dropout": Threshold(cpu=2**23, other=2**22),
    "dropout, sum": Threshold(cpu=2**17, other=2**14),
    "group_norm": Threshold(cpu=2**20, other=2**16),
    "group_norm, scale": Threshold(cpu=2**18, other=2**14),
    "layer_norm": Threshold(cpu=2**18, other=2**22),
    "layer_norm, sum": Threshold(cpu=2**24, other=2**22),
    "rms_norm": Threshold(cpu=2**18, other=2**14),
    "rms_norm, single": Threshold(cpu=2**18, other=2**14),
}


def small(kind: str, spec: TensorSpec | None) -> str:
    """Return the reason if a tensor is too small for a rewrite of this kind, else ""."""
    if spec is None:
        return ""
    threshold = THRESHOLDS[kind]
    least = threshold.cpu if spec.device.type == "cpu" else threshold.other
    size = math.prod(spec.shape)
    if size >= least:
        return ""
    return (
        f"too small: {size:,} elements, profitable from {least:,} on {spec.device.type} "
        "(give example inputs of the size you run at, or cost_guard=False)"
    )
