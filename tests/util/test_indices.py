"""Indices out of range, on a device that does not raise for them: here the CPU, taken for one."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config

import schedule
from fused.torch_internals.modes import TorchDispatchMode
from schedule.util import indices
from schedule.util.indices import indices_checked

LONG = torch.tensor([[0, 3], [1, 2]])


class Reached(TorchDispatchMode):
    """Counts what the device is asked to compute."""

    observes_only = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device_without_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "RAISING", frozenset())


@pytest.mark.usefixtures("device_without_errors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("embedding", lambda x, index: F.embedding(index, x)),
        ("index", lambda x, index: x[index]),
        ("gather", lambda x, index: x.gather(1, index)),
        ("index_select", lambda x, index: x.index_select(1, index[0])),
        ("take", lambda x, index: x.take(index + 8)),
        ("scatter", lambda x, index: x.scatter(0, index, x[:2, :2])),
        ("scatter", lambda x, index: x.scatter(0, index, 1.0)),
        ("index_add", lambda x, index: x.index_add(1, index[0], x[:, :2])),
        ("index_put", lambda x, index: x.index_put((index[0],), x[0, 0])),
        ("index_copy", lambda x, index: x.index_copy(1, index[0], x[:, :2])),
        ("nll_loss_forward", lambda x, index: F.nll_loss(x[:2], index[0])),
        # In float32, as the CPU, taken for the device here, has it in no other dtype.
        ("embedding_bag", lambda x, index: F.embedding_bag(index, x.float())),
    ],
)
def test_the_device_never_sees_them(name: str, run: Callable[..., Any], dtype: torch.dtype) -> None:
    right, wrong = torch.randn(4, 4, dtype=dtype), torch.randn(3, 3, dtype=dtype)
    with Reached() as reached, indices_checked(right):
        run(right, LONG)
    of_name = [count for found, count in reached.calls.items() if found.strip("_").startswith(name)]
    assert max(of_name) == 2, "once on the CPU and once on the device"
    with Reached() as reached, indices_checked(wrong), pytest.raises(IndexError, match=r"range|bounds"):
        run(wrong, LONG)
    of_name = [count for found, count in reached.calls.items() if found.strip("_").startswith(name)]
    assert max(of_name) == 1, "the device was asked"


@pytest.mark.usefixtures("device_without_errors")
def test_operators_of_others_run_once() -> None:
    runs: list[int] = []

    @torch.library.custom_op("tests_util_indices::chosen", mutates_args=())
    def chosen(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        runs.append(len(index))
        return x[:2].clone()

    with indices_checked(LONG):
        chosen(torch.randn(4, 4), LONG[0])
    assert runs == [2]


def test_where_torch_raises_nothing_is_watched() -> None:
    with indices_checked([torch.ones(2)]), Reached() as reached:
        F.embedding(LONG, torch.randn(4, 4))
    assert reached.calls["embedding"] == 1


@pytest.mark.usefixtures("device_without_errors")
def test_sizes_that_a_model_does_not_take_are_tried_without_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[bool] = []
    embedding = F.embedding

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return embedding(*args, **kwargs)
        except IndexError as error:
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            noticed.append(indices.__file__ in files)
            raise

    monkeypatch.setattr(F, "embedding", watched)
    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(31, (2, 8))  # as long as there are positions: longer ones are tried too
    batch = {"input_ids": ids, "labels": ids.clone()}
    report = schedule.optimize(model, batch, cost_guard=False)
    assert report.applied["add_layer_norm"] and report.applied["cross_entropy"]
    tried = len(noticed)
    assert report.verify(), str(report.verify())
    assert 0 < tried < len(noticed) and all(noticed)
