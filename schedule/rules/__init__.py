"""Rewrite rules as data: a construct as models write it → a call of a fused op, with a proof of equality."""

from schedule.rules import (  # noqa: F401 - they register their rules
    adaptive_norm,
    attention,
    attention_softmax,
    batch_norm,
    batch_norm_folding,
    bias_activation,
    bias_dropout,
    cross_entropy,
    gated,
    gated_residual,
    group_norm,
    layer_norm,
    linear,
    linear_cross_entropy,
    qkv_merge,
    recomputed_input,
    rms_norm,
    rms_norm_normalize,
    rotary,
    star_relu,
    unit_scale,
)
from schedule.rules.proof import ProofFailure, prove
from schedule.rules.rule import Build, Judge, Proof, Rule
from schedule.rules.rule_registry import (
    list_rules,
    listed,
    register_rule,
    rule_at,
    rule_for,
    select_rules,
    unknown_rule,
    unregister_rule,
)

__all__ = [
    "Build",
    "Judge",
    "Proof",
    "ProofFailure",
    "Rule",
    "list_rules",
    "listed",
    "prove",
    "register_rule",
    "rule_at",
    "rule_for",
    "select_rules",
    "unknown_rule",
    "unregister_rule",
]
