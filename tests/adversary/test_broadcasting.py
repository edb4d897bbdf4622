"""No rule takes two tensors for equal in shape because they were in the recorded run."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import fused
import schedule
from schedule.rules import Rule, list_rules
from schedule.rules.attention_forms import lucidrains
from schedule.rules.rule import Form
from tests.adversary.rewritten import arity, assert_same, results, rewritten

CASES = [
    pytest.param(rule, number, id=f"{rule.name}-{number}")
    for rule in list_rules()
    if rule.proof is not None and rule.name != "sdpa_without_weights"  # its forms are those of sdpa
    for number in range(len(rule.proof.forms))
]


def _sizes(rule: Rule, form: Form) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs of the rule's proof for a batch of 1, and for one of 3."""
    assert rule.proof is not None
    torch.manual_seed(3)
    small, large = (rule.proof.inputs((rows, *rule.proof.shapes[0][1:]), rule.proof.dtypes[0]) for rows in (1, 3))
    return list(small[: arity(form)]), list(large[: arity(form)])


def _replaced(tensors: Sequence[Tensor], others: Sequence[Tensor], where: Sequence[int]) -> list[Tensor]:
    return [others[n] if n in where else tensor for n, tensor in enumerate(tensors)]


def _subsets(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(numbers) + 1):
        yield from itertools.combinations(numbers, count)


def _eager(form: Form, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The results of the form; None where it refuses the shapes."""
    try:
        return results(form, tensors)
    except (RuntimeError, ValueError, IndexError):
        return None


IN_ANOTHER_ORDER = "einsum of operands that broadcast gives a result in another memory order, in which dropout draws"
BROADCAST = [
    pytest.param(*case.values, id=case.id, marks=pytest.mark.xfail(strict=True, reason=IN_ANOTHER_ORDER))
    if case.values[0].proof.forms[case.values[1]] is lucidrains
    else case
    for case in CASES
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("rule", "number"), BROADCAST)
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_what_was_recorded_with_one_row_holds_where_any_operand_has_more(rule: Rule, number: int) -> None:
    assert rule.proof is not None
    form, dtype = rule.proof.forms[number], rule.proof.dtypes[0]
    small, large = _sizes(rule, form)
    batched = [n for n, (one, three) in enumerate(zip(small, large, strict=True)) if one.shape != three.shape]
    compared = 0
    with fused.backend("reference"):
        for missing in [(), *((n,) for n in batched)]:
            recorded = [tensor[0] if n in missing else tensor for n, tensor in enumerate(small)]
            if _eager(form, recorded) is None:
                continue
            module, _ = rewritten(form, recorded, [rule])
            for more in _subsets([n for n in batched if n not in missing]):
                called = _replaced(recorded, large, more)
                expected = _eager(form, called)
                if expected is not None:
                    assert_same(results(module, called), expected, dtype)
                    compared += 1
    assert compared


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("rule", "number"), CASES)
def test_what_was_recorded_with_one_row_is_rewritten_and_runs_with_three(rule: Rule, number: int) -> None:
    assert rule.proof is not None
    form = rule.proof.forms[number]
    small, large = _sizes(rule, form)
    module, count = rewritten(form, small, [rule])
    assert count
    with warnings.catch_warnings(), fused.backend("reference"):
        warnings.simplefilter("error", schedule.FallbackWarning)
        assert_same(results(module, large), results(form, large), rule.proof.dtypes[0])


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}


def _classes() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "bert": hf.BertForMaskedLM(hf.BertConfig(**TINY)),
        "electra": hf.ElectraModel(hf.ElectraConfig(**TINY, embedding_size=16)),
        "albert": hf.AlbertModel(hf.AlbertConfig(**TINY, embedding_size=16)),
        "distilbert": hf.DistilBertModel(hf.DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=64)),
    }


@pytest.mark.parametrize("name", ["bert", "electra", "albert", "distilbert"])
@pytest.mark.parametrize("rules", ["default", "all"])
def test_models_recorded_with_one_row_take_more(name: str, rules: str) -> None:
    model = _classes()[name]
    model.set_attn_implementation("eager")
    twin = copy.deepcopy(model)
    schedule.optimize(model, {"input_ids": torch.randint(0, 99, (1, 6))}, rules=rules, cost_guard=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", schedule.FallbackWarning)
        for shape in ((4, 6), (3, 7), (1, 5)):
            ids = torch.randint(0, 99, shape)
            found, expected = [], []
            for each, kept in ((model, found), (twin, expected)):
                torch.manual_seed(0)
                each.zero_grad()
                output = each(input_ids=ids)[0]
                output.square().mean().backward()
                kept += [output, *(p.grad for p in each.parameters() if p.grad is not None)]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _halves_by_accident(y: Tensor) -> Tensor:
    return F.silu(y[..., :1]) * y[..., 1:]


def _parts_by_accident(y: Tensor) -> Tensor:
    parts = y.split(2, dim=-1)
    return F.silu(parts[0]) * parts[1]


def _choices(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(labels.shape[0], -1), labels)


def _classes_in_the_middle(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def _choices_of_a_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).view(labels.shape[0], -1), labels)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


ACCIDENTS = {
    "halves": (_halves_by_accident, [(torch.randn(3, 2),), (torch.randn(3, 4),)]),
    "parts": (_parts_by_accident, [(torch.randn(3, 4),), (torch.randn(3, 6),)]),
    "one choice": (_choices, [(torch.randn(6, 1), _zeros(6)), (torch.randn(24, 1), _zeros(6) + 2)]),
    "classes in the middle": (
        _classes_in_the_middle,
        [(torch.randn(2, 3, 3, 3), _zeros(2, 3, 3)), (torch.randn(2, 4, 3, 4), _zeros(2, 4, 4) + 2)],
    ),
    "one choice of a head": (
        _choices_of_a_head,
        [
            (torch.randn(6, 8), torch.randn(1, 8), _zeros(6)),
            (torch.randn(24, 8), torch.randn(1, 8), _zeros(6) + 2),
        ],
    ),
}


@pytest.mark.parametrize("name", ACCIDENTS)
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_sizes_that_agree_by_accident(name: str) -> None:
    form, (recorded, called) = ACCIDENTS[name]
    module, _ = rewritten(form, recorded, "all")
    with fused.backend("reference"):
        assert_same(results(module, called), results(form, called), torch.float32)
