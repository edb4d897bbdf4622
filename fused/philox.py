"""Random numbers of CUDA's dropout by position, so that a kernel can draw the mask instead of reading it.

torch's fused dropout runs a fixed number of threads. Each has a Philox 4×32-10 sequence of its own, of which it takes
four 32-bit numbers at a time, for four consecutive elements; it goes on with the elements that all threads together
have left. So the number of an element follows from its position, the seed, and the generator's offset.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

BLOCK = 256  # threads per block of torch's kernel
_WORD = 2**32 - 1
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True)
class DropoutStream:
    """Random numbers of one call of dropout on contiguous elements.

    Args:
        seed: of the generator.
        first: counter of the first four numbers of a thread: a quarter of the generator's offset.
        threads: number of threads.
        vector: number of consecutive elements of a thread, 4 or 8.
        threshold: an element is kept if its number is below it.
    """

    seed: int
    first: int
    threads: int
    vector: int
    threshold: int

    def mask(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the keep mask, bool, for a number of elements divisible by 4."""
        count = torch.Size(shape).numel()
        quad = torch.arange(count // 4, device=device)
        each = self.vector // 4
        chunk = quad // each
        counter = self.first + chunk // self.threads * each + quad % each
        words = philox(self.seed, counter, chunk % self.threads)
        return (torch.stack(words, -1) < self.threshold).reshape(shape)


def philox(seed: int, counter: Tensor, sequence: Tensor) -> tuple[Tensor, ...]:
    """Compute the four 32-bit numbers, in int64, at each 64-bit counter of the sequences.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    c = [counter & _WORD, counter >> 32 & _WORD, sequence & _WORD, sequence >> 32 & _WORD]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        # A product of two 32-bit numbers wraps around in int64 and keeps its 64 bits.
        first, second = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = [
            (second >> 32 & _WORD) ^ c[1] ^ key[0],
            second & _WORD,
            (first >> 32 & _WORD) ^ c[3] ^ key[1],
            first & _WORD,
        ]
        key = [(part + step) & _WORD for part, step in zip(key, _KEYS, strict=True)]
    return tuple(c)


@functools.lru_cache
def threshold(keep: float) -> int:
    """Return the least 32-bit number that torch's dropout drops, if it keeps with this probability.

    It compares ``number·2⁻³² + 2⁻³³``, rounded to float32, with the probability.
    """
    low, high = 0, 2**32 - 1
    limit = torch.tensor(keep, dtype=torch.float32)
    while low < high:
        middle = (low + high) // 2
        uniform = torch.tensor(middle, dtype=torch.float32) * 2.0**-32 + 2.0**-33
        low, high = (low, middle) if uniform >= limit else (middle + 1, high)
    return low


def dropout_stream(elements: int, p: float, itemsize: int, device: torch.device) -> DropoutStream | None:
    """Take the random numbers of ``F.dropout(x, p)`` from the generator of a CUDA device.

    Args:
        elements: their number, divisible by 8, in aligned contiguous memory.
        p: probability of being dropped, between 0 and 1.
        itemsize: bytes of an element of x, at most 4.
        device: of x.

    Returns:
        The stream, or None during graph capture, where the offset is unknown, and on GPUs where torch draws otherwise.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    vector = _vector(itemsize, device)
    return None if vector is None else _taken(elements, threshold(1.0 - p), vector, device)


def _taken(elements: int, limit: int, vector: int, device: torch.device) -> DropoutStream:
    threads = BLOCK * min(_most_blocks(device), -(-elements // BLOCK))
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4 * -(-elements // (4 * threads)))
    return DropoutStream(generator.initial_seed(), offset // 4, threads, vector, limit)


@functools.lru_cache
def _most_blocks(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK))


@functools.lru_cache
def _vector(itemsize: int, device: torch.device) -> int | None:
    """Return the number of consecutive elements of a thread in torch's dropout, as found by comparison with it.

    It is 4, or 16 bytes, depending on torch's version; None if neither gives torch's mask.
    """
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    # More than two passes of all threads.
    ones = torch.ones(20 * BLOCK * _most_blocks(device), dtype=dtype, device=device)
    expected = torch.native_dropout(ones, 0.5, True)[1]
    after, found = generator.get_offset(), None
    for vector in (4, 16 // itemsize):
        generator.set_offset(offset)
        stream = _taken(len(ones), threshold(0.5), vector, device)
        if generator.get_offset() == after and torch.equal(stream.mask(ones.shape, device), expected):
            found = vector
    generator.set_offset(offset)
    return found
