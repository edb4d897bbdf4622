"""Exponentials and quotients of the kernels, in as few instructions as their accuracy needs."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fused.backends.triton.launch import INTERPRETED, Constant

LOG2E = Constant(math.log2(math.e))
LN2 = Constant(math.log(2))
_PTX = Constant(not INTERPRETED and torch.version.hip is None)


@triton.jit
def exp(x):
    """Compute eˣ in float32, with 0 for results below 2⁻¹²⁶: `tl.exp` takes three more instructions to keep these."""
    return tl.exp2(x * LOG2E)


@triton.jit
def reciprocal(x):
    """Compute 1/x in float32 for x from 2⁻¹²⁶ to 2¹²⁶, to one unit in the last place, in one instruction."""
    if _PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / x


@triton.jit
def tanh(z):
    """Compute tanh in float32, by the polynomial of Cephes' tanhf if exponentials would cancel."""
    square = z * z
    near = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    near = ((near + 1.33314422036e-1) * square - 3.33332819422e-1) * square * z + z
    far = 1 - 2 * reciprocal(tl.exp2(tl.abs(z) * (2 * LOG2E)) + 1)
    return tl.where(tl.abs(z) < 0.625, near, tl.where(z < 0, -far, far))


@triton.jit
def coarse_tanh(z):
    """Compute tanh in float32, with the absolute error everywhere that numbers near 1 have."""
    return 1 - 2 * reciprocal(tl.exp2(z * (2 * LOG2E)) + 1)


@triton.jit
def normal(z):
    """Compute the normal distribution Φ(z) in float32, within 2⁻²², and exp(−z²/2), from one exponential.

    Φ(−|z|) = exp(−z²/2)·t·P(t) with t = 1/(1 + 0.335·|z|): Hastings' form, with coefficients that make the largest
    error least, the relative one where Φ < 0.005.
    """
    e = tl.exp2(z * z * (-0.5 * LOG2E))
    t = reciprocal(tl.abs(z) * 0.335 + 1)
    p = ((t * 0.04356292 - 0.20311821) * t + 0.28321881) * t - 0.04560441
    p = ((p * t + 0.16118822) * t + 0.12664765) * t + 0.13410502
    tail = p * t * e
    return tl.where(z < 0, tail, 1 - tail), e


@triton.jit
def add_pairs(a, b, c, d):
    """Add two pairs, for `tl.reduce` of two tensors at once."""
    return a + c, b + d
