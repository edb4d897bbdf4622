"""Every rule is proved: each way a construct is written, beside what the rule makes of it."""

from __future__ import annotations

import pytest

from schedule.rules import Rule, list_rules, prove


@pytest.mark.one_in(8)
@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: rule.name)
def test_rule_holds_for_every_form_shape_and_dtype(rule: Rule) -> None:
    assert rule.proof is not None and rule.proof.forms
    failures = prove(rule)
    assert not failures, "\n".join(map(str, failures))
