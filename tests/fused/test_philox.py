"""Random numbers of CUDA's dropout by position."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.nn.functional as F

import fused
from fused.philox import BLOCK, DropoutStream, dropout_stream, philox, threshold

WORD = 2**32 - 1


def philox_of_one(counter: list[int], key: list[int]) -> list[int]:
    """The generator of Salmon et al. in Python's integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k, y & WORD, (x >> 32) ^ d ^ m, x & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return [a, b, c, d]


def dropped_by_threads(elements: int, keep: float, seed: int, offset: int, blocks: int, vector: int) -> numpy.ndarray:
    """The keep mask, thread by thread as on a GPU."""
    kept = numpy.zeros(elements, dtype=bool)
    threads = BLOCK * blocks
    limit = numpy.float32(keep)
    for thread in range(threads):
        counter = offset // 4
        for start in range(thread * vector, elements, threads * vector):
            for four in range(start, start + vector, 4):
                words = philox_of_one([counter & WORD, counter >> 32, thread, 0], [seed & WORD, seed >> 32])
                uniform = numpy.float32(words) * numpy.float32(2**-32) + numpy.float32(2**-33)
                kept[four : four + 4] = uniform < limit
                counter += 1
    return kept


# From the authors' own implementation, Random123: counter, key, result.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_numbers(counter, key, result):
    assert philox_of_one(counter, key) == result

    def joined(low: int, high: int) -> torch.Tensor:
        return torch.tensor(numpy.array([high << 32 | low], dtype=numpy.uint64).view(numpy.int64))

    words = philox(key[1] << 32 | key[0], joined(*counter[:2]), joined(*counter[2:]))
    assert [int(word) for word in words] == result


@pytest.mark.parametrize("vector", [4, 8])
@pytest.mark.parametrize("elements", [8, 2048, 13000])
def test_the_mask_is_that_of_the_threads(elements, vector):
    seed, offset = 2**40 + 9, 4 * (2**32 - 1)
    stream = DropoutStream(seed, offset // 4, 2 * BLOCK, vector, threshold(0.8))
    expected = dropped_by_threads(elements, 0.8, seed, offset, 2, vector)
    assert torch.equal(stream.mask((elements,), torch.device("cpu")), torch.from_numpy(expected))


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1, 1e-9, 1 - 1e-9, 2**-33])
def test_the_threshold_divides_as_the_comparison_in_float32_does(keep):
    limit = threshold(keep)
    near = numpy.arange(max(limit - 300, 0), min(limit + 300, 2**32), dtype=numpy.uint32)
    uniform = near.astype(numpy.float32) * numpy.float32(2**-32) + numpy.float32(2**-33)
    assert ((uniform < numpy.float32(keep)) == (near < limit)).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (64, 1000), (4096, 4096)])
def test_drops_what_torch_drops_on_a_gpu(dtype, shape):
    x, bias = (torch.randn(size, dtype=dtype, device="cuda") + 9 for size in (shape, shape[-1:]))
    stream = dropout_stream(x.numel(), 0.3, x.element_size(), x.device)
    assert stream is not None, "torch draws otherwise on this GPU"
    for p in (0.1, 0.7):
        torch.manual_seed(5)
        torch.rand(3, device="cuda")
        eager, after = F.dropout(x + bias, p), torch.rand(3, device="cuda")
        torch.manual_seed(5)
        torch.rand(3, device="cuda")
        with fused.backend("triton"):
            leaf = x.clone().requires_grad_()
            ours = fused.bias_dropout(leaf, bias, p)
        assert torch.equal(after, torch.rand(3, device="cuda"))
        assert torch.equal(ours == 0, eager == 0)
        assert torch.equal(torch.autograd.grad(ours.sum(), leaf)[0] == 0, eager == 0)
