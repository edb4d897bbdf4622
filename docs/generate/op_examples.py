"""An example of each fused op, one line each, which runs after the lines of ``SETUP``."""

from __future__ import annotations

SETUP = """\
import torch
import fused

x, gate, up = (torch.randn(2, 5, 64, requires_grad=True) for _ in range(3))
packed, weights = torch.randn(2, 5, 128), torch.rand(2, 5, 1)  # gate and up side by side; one number a token
weight, bias, bias_2 = torch.ones(64), torch.zeros(64), torch.zeros(128)
scores = torch.randn(2, 4, 5, 5)  # [batch, heads, queries, keys]
hidden, head, targets = torch.randn(10, 64), torch.randn(1000, 64), torch.randint(1000, (10,))
logits = hidden @ head.T
image, mean, variance = torch.randn(2, 64, 8, 8), torch.zeros(64), torch.ones(64)
q, k, angles = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 16)
chosen, rejected = torch.randn(4), torch.randn(4)  # log-probabilities of sequences
"""

EXAMPLES = {
    "GEGLU": 'fused.GEGLU("none")(gate, up)',
    "SwiGLU": "fused.SwiGLU()(packed)",
    "RMSNorm": "fused.RMSNorm(64)(x)",
    "LayerNorm": "fused.LayerNorm(64)(x)",
    "CrossEntropyLoss": "fused.CrossEntropyLoss(z_loss=1e-4)(logits, targets)",
    "LinearCrossEntropyLoss": "fused.LinearCrossEntropyLoss()(hidden, head, targets)",
    "adaptive_layer_norm": "fused.adaptive_layer_norm(x, torch.randn(2, 1, 64), torch.randn(2, 1, 64))",
    "add_layer_norm": "normed, total = fused.add_layer_norm(x, gate, weight, bias)",
    "add_rms_norm": "normed, total = fused.add_rms_norm(x, gate, weight)",
    "apply_rotary": "fused.apply_rotary(q, angles.cos()[:, None], angles.sin()[:, None])",
    "batch_norm": 'fused.batch_norm(image, mean, variance, weight, bias, training=True, activation="relu")',
    "bias_activation": 'fused.bias_activation(x, bias, "silu")',
    "bias_dropout": "fused.bias_dropout(x, bias, 0.1)",
    "bias_dropout_add": "fused.bias_dropout_add(x, bias, gate, 0.1)",
    "bias_geglu": "fused.bias_geglu(packed, bias_2)",
    "bias_geglu_impl": "fused.bias_geglu_impl(packed, bias_2)",
    "bias_gelu": 'fused.bias_gelu(x, bias, approximate="none")',
    "bias_gelu_impl": "fused.bias_gelu_impl(x, bias)",
    "bias_new_gelu": "fused.bias_new_gelu(x, bias)",
    "bias_quick_geglu": "fused.bias_quick_geglu(packed, bias_2)",
    "bias_reglu": "fused.bias_reglu(packed, bias_2)",
    "bias_swiglu": "fused.bias_swiglu(packed, bias_2)",
    "bias_swiglu_impl": "fused.bias_swiglu_impl(packed, bias_2)",
    "causal_softmax": "fused.causal_softmax(scores, scale=0.25)",
    "conv_batch_norm": "fused.conv_batch_norm(image, torch.randn(64, 64, 3, 3), None, mean, variance, weight, bias)",
    "cross_entropy": "fused.cross_entropy(logits, targets, label_smoothing=0.1)",
    "cross_entropy_with_metrics": "fused.cross_entropy_with_metrics(logits, targets).token_accuracy",
    "distillation_loss": "fused.distillation_loss(logits, logits + 1, temperature=2.0)",
    "dpo_loss": "fused.dpo_loss(chosen, rejected, chosen - 1, rejected + 1, beta=0.1)",
    "gated_activation": 'fused.gated_activation(gate, up, "silu")',
    "gated_residual": "fused.gated_residual(x, gate, weight)",
    "geglu": "fused.geglu(packed)",
    "gelu": "fused.gelu(x)",
    "get_bias_dropout_add": "fused.get_bias_dropout_add(True, True)((x, bias), gate, 0.1)",
    "group_norm": 'fused.group_norm(image, 8, weight, bias, activation="silu")',
    "grpo_loss": "fused.grpo_loss(torch.randn(4, 7), advantages=torch.randn(4))",
    "kto_loss": "fused.kto_loss(chosen, rejected, torch.tensor([True, False, True, False]), 0.1)",
    "layer_norm": "fused.layer_norm(x, weight, bias)",
    "linear": "fused.linear(hidden, head)",
    "linear_batch_norm": "fused.linear_batch_norm(hidden, torch.randn(64, 64), bias, mean, variance, weight, bias)",
    "linear_cross_entropy": "fused.linear_cross_entropy(hidden, head, targets)",
    "linear_cross_entropy_with_metrics": "fused.linear_cross_entropy_with_metrics(hidden, head, targets).loss",
    "linear_distillation_loss": 'fused.linear_distillation_loss(hidden, head, hidden, head, kind="tvd")',
    "masked_softmax": "fused.masked_softmax(scores, torch.ones(5, 5, dtype=torch.bool).triu(1), scale=0.25)",
    "mish": "fused.mish(x)",
    "new_gelu": "fused.new_gelu(x)",
    "orpo_loss": "fused.orpo_loss(-chosen.abs(), -rejected.abs())",
    "quick_geglu": "fused.quick_geglu(packed)",
    "quick_gelu": "fused.quick_gelu(x)",
    "recomputed_input": "fused.recomputed_input(torch.nn.functional.linear, fused.gelu(x), torch.randn(8, 64))",
    "reglu": "fused.reglu(packed)",
    "rms_norm": 'fused.rms_norm(x, weight, casting="gemma")',
    "rotary_embedding": "turned_q, turned_k = fused.rotary_embedding(q, k, angles.cos(), angles.sin())",
    "scaled_masked_softmax": "fused.scaled_masked_softmax(scores, scale=0.25, causal=True, dropout_p=0.1)",
    "sequence_log_probs": "fused.sequence_log_probs(hidden[None], head, targets[None])",
    "simpo_loss": "fused.simpo_loss(chosen, rejected)",
    "star_relu": "fused.star_relu(x, torch.tensor([0.89]), torch.tensor([-0.45]))",
    "swiglu": "fused.swiglu(packed)",
    "token_log_probs": "fused.token_log_probs(hidden, head, targets)",
    "weighted_bias_geglu": "fused.weighted_bias_geglu(packed, bias_2, weights)",
    "weighted_bias_quick_geglu": "fused.weighted_bias_quick_geglu(packed, bias_2, weights)",
    "weighted_bias_quick_geglu_impl": "fused.weighted_bias_quick_geglu_impl(packed, bias_2, weights)",
    "weighted_bias_reglu": "fused.weighted_bias_reglu(packed, bias_2, weights)",
    "weighted_bias_swiglu": "fused.weighted_bias_swiglu(packed, bias_2, weights)",
    "weighted_bias_swiglu_impl": "fused.weighted_bias_swiglu_impl(packed, bias_2, weights)",
    "weighted_geglu": "fused.weighted_geglu(packed, weights)",
    "weighted_quick_geglu": "fused.weighted_quick_geglu(packed, weights)",
    "weighted_reglu": "fused.weighted_reglu(packed, weights)",
    "weighted_squared_relu": "fused.weighted_squared_relu(x, weights)",
    "weighted_swiglu": "fused.weighted_swiglu(packed, weights)",
}
