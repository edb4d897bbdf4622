"""Each op of the reference has an example; ``tests/test_docs.py`` runs them."""

from __future__ import annotations

import inspect

import fused
from docs.generate.op_examples import EXAMPLES

WITHOUT = {
    "apply_swiglu_sharded_factory",  # of Megatron's checkpoints
    "vocab_parallel_cross_entropy",  # needs a process group
    "compute_dtype requested saved_tensors transformed",  # for new ops: docs/adding.md
    "make_viewless_tensor assert_viewless_tensor safely_set_viewless_tensor_data",  # one example for all of them
    "deallocate_output backward_from_deallocated",
}


def test_each_op_has_an_example() -> None:
    functions = {name for name in fused.__all__ if inspect.isfunction(getattr(fused, name))}
    assert functions - {name for names in WITHOUT for name in names.split()} <= EXAMPLES.keys() <= set(fused.__all__)
