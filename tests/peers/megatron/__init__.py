"""Megatron-LM's own layer tests on the CPU, with Megatron's MLP and with `fused.MLP` in its place."""
