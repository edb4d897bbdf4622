"""Names of the rules, to check ``--rules`` before torch is imported; a test compares them with the rules."""

SETS = ("all", "default", "memory", "attention", "inference")

FAMILIES = {
    "adaptive_layer_norm": ("adaptive_layer_norm",),
    "attention_softmax": ("attention_softmax",),
    "attention": (
        "sdpa",
        "sdpa_without_weights",
    ),
    "batch_norm": (
        "batch_norm_relu",
        "batch_norm_relu6",
        "batch_norm_hard_swish",
        "batch_norm_silu",
        "batch_norm_gelu",
        "batch_norm_gelu_tanh",
        "batch_norm_add",
    ),
    "bias_activation": (
        "bias_gelu_tanh",
        "bias_gelu",
        "bias_quick_gelu",
        "bias_silu",
        "bias_mish",
        "bias_relu2",
        "bias_relu",
        "bias_tanh",
    ),
    "bias_dropout": (
        "bias_dropout_add",
        "bias_dropout",
    ),
    "loss": (
        "cross_entropy",
        "linear_cross_entropy",
        "linear_cross_entropy_and_logits",
    ),
    "folding": (
        "conv_batch_norm_relu",
        "conv_batch_norm_relu6",
        "conv_batch_norm_hard_swish",
        "conv_batch_norm_silu",
        "conv_batch_norm_gelu",
        "conv_batch_norm",
    ),
    "gated_mlp": (
        "gated_silu",
        "gated_gelu_tanh",
        "gated_gelu",
        "gated_quick_gelu",
        "gated_relu",
    ),
    "gated_residual": ("gated_residual",),
    "group_norm": (
        "group_norm_silu",
        "group_norm_gelu",
        "group_norm_gelu_tanh",
        "group_norm_scale_shift",
    ),
    "layer_norm": (
        "layer_norm",
        "called_layer_norm",
        "called_scaled_layer_norm",
        "scaled_layer_norm",
        "add_layer_norm",
    ),
    "linear": (
        "linear_bias",
        "linear",
    ),
    "qkv_merge": ("qkv_merge",),
    "recomputed_input": (
        "recomputed_linear_bias",
        "recomputed_linear",
        "recomputed_conv1d",
        "recomputed_conv2d",
        "recomputed_conv3d",
    ),
    "rms_norm": (
        "rms_norm_llama",
        "rms_norm_gemma",
        "rms_norm_torch",
        "add_rms_norm_llama",
        "add_rms_norm_gemma",
        "add_rms_norm_torch",
        "rms_norm_normalize",
    ),
    "rotary_embedding": (
        "rotary_embedding",
        "rotary_embedding_interleaved",
    ),
    "star_relu": ("star_relu",),
    "unit_scale": ("unit_scale",),
}
"""Family → its rules."""
