"""A rank's shard of a tensor, as any number of blocks for ``torch.distributed.checkpoint``.

A torch DTensor saves one block; the shard of packed q, k, and v consists of three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fused.torch_internals.tensor_kinds import make_wrapper_subclass
from schedule.distributed.checkpoint.stored_layout import Layout, Piece


class Pieces(torch.Tensor):
    """One ``state_dict`` value to save or load, implementing torch's ``_Checkpointable`` protocol.

    It is a tensor subclass only because torch accepts tensors only. It has the shape of the whole tensor and supports
    no operations.

    Args:
        share: this rank's shard, to save or to load into.
        layout: position of the shard in the whole tensor.
    """

    share: Tensor
    _pieces: dict[torch.Size, Piece]

    @staticmethod
    def __new__(cls, share: Tensor, layout: Layout) -> Pieces:
        """Create a wrapper tensor with the shape of the whole tensor."""
        made: Pieces = make_wrapper_subclass(
            cls, layout.shape, dtype=share.dtype, device=share.device, requires_grad=False
        )
        made.share = share.detach()
        made._pieces = {piece.offsets: piece for piece in layout.pieces()}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a share is saved or loaded, nothing else")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Pieces({len(self._pieces)} of {list(self.shape)})"

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.share)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(piece.offsets, piece.sizes) for piece in self._pieces.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = index.offset if index.offset is not None else torch.Size([0] * self.ndim)
        return self.share[self._pieces[torch.Size(offsets)].local]
