"""Metadata of tensors: shape, dtype and device, without data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from schedule.util.errors import NotApplicable


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a recorded tensor, without data.

    Attributes:
        shape: sizes seen in the recorded run, such as ``(2, 16, 768)``.
        dtype: element type.
        device: its device.
        requires_grad: whether it required gradients.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of ``tensor``.

        Raises:
            NotApplicable: it is a nested tensor, whose rows differ in size, or a quantized one.
        """
        if tensor.is_nested:
            raise NotApplicable("a nested tensor has no one shape to follow", fix="pad it: tensor.to_padded_tensor(0)")
        if tensor.is_quantized:
            raise NotApplicable(
                "a quantized tensor cannot be traced without data", fix="dequantize it before the model"
            )
        return cls(tuple(int(n) for n in tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.itemsize
