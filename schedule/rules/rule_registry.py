"""Registry of rules, built-in and user-defined alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, overload

from schedule.patterns import GraphMatch, search
from schedule.rules.rule import SETS, Build, Rule
from schedule.util.errors import MatchError, did_you_mean

RULES: dict[str, Rule] = {}


@overload
def register_rule(rule: Rule, *, replace: bool = False) -> Rule: ...
@overload
def register_rule(
    *, name: str, family: str, patterns: Iterable[Any], replace: bool = False, **rest: Any
) -> Callable[[Build], Rule]: ...


def register_rule(rule: Rule | None = None, *, replace: bool = False, **settings: Any) -> Any:
    """Register a rule, by a call or as the decorator of its ``build``.

    Both forms::

        register_rule(Rule("square", "powers", patterns=(lambda x: x * x,), build=build_square))

        @register_rule(name="square", family="powers", patterns=[lambda x: x * x])
        def build_square(graph, inputs, scalars):
            return graph.call_function(torch.square, (inputs["x"],))

    It is applied where it is asked for: ``optimize(model, batch, rules=["default", "square"])``; with
    ``sets=("default",)`` it joins a set.

    Args:
        rule: the rule; None to decorate its ``build``.
        replace: take the place of a rule of this name, as when a cell of a notebook runs again.
        settings: of :class:`Rule`, without ``build``.

    Raises:
        MatchError: there is a rule of this name already.
    """
    if rule is None:

        def decorate(build: Build) -> Rule:
            made = Rule(build=build, **{**settings, "patterns": tuple(settings["patterns"])})
            return register_rule(made, replace=replace)

        return decorate
    if rule.name in RULES and not replace:
        raise MatchError(
            f"there is a rule {rule.name!r} already", fix="choose another name, or register_rule(…, replace=True)"
        )
    RULES[rule.name] = rule
    return rule


def unregister_rule(name: str) -> None:
    """Remove the rule ``name``."""
    if RULES.pop(name, None) is None:
        raise unknown_rule(name)


def unknown_rule(name: str) -> MatchError:
    """Return the error for a name that no rule has."""
    return MatchError(f"there is no rule {name!r}", fix=did_you_mean(name, RULES) or "schedule.list_rules() names them")


def list_rules(family: str | None = None) -> list[Rule]:
    """Return every registered rule, or those of one family, in order of registration."""
    return [rule for rule in RULES.values() if family in (None, rule.family)]


def listed(rules: str | Iterable[str | Rule]) -> str | list[str | Rule]:
    """Return ``rules=`` to be read more than once.

    Raises:
        MatchError: it names nothing.
    """
    if isinstance(rules, Iterable) and (found := rules if isinstance(rules, str) else list(rules)):
        return found
    raise MatchError(f"no rule is named by {rules!r}", asked="choose the rules", fix='rules="default", or a list')


def select_rules(rules: str | Iterable[str | Rule], applied: Collection[str] | None = None) -> list[Rule]:
    """Return the rules named by ``rules=``.

    Args:
        rules: one of the sets ``"default"`` (profitable), ``"memory"`` (saves bytes, in part at the cost of time),
            ``"attention"`` and ``"inference"``, or ``"all"`` of them; the name of a rule or a family; or several of
            these, or rules themselves.
            Of ``"all"`` and the sets, rules without a gain on this machine are left out.
        applied: names of the rules that a recipe says were applied. Of a set only these are returned, whether they
            have left it since or not: rules that joined it, or gain something on this machine only, do not count.

    Raises:
        MatchError: there is no rule or family of a given name.
    """
    chosen: dict[str, Rule] = {}
    named = listed(rules)
    for item in [named] if isinstance(named, str) else named:
        chosen.update((rule.name, rule) for rule in _named(item, applied))
    return list(chosen.values())


def _named(item: str | Rule, applied: Collection[str] | None) -> list[Rule]:
    if isinstance(item, Rule):
        return [item]
    if item == "all" or item in SETS:
        if applied is not None:
            return [rule for rule in RULES.values() if rule.name in applied]
        found = [rule for rule in RULES.values() if (rule.sets if item == "all" else item in rule.sets)]
        return [rule for rule in found if not rule.no_gain_here()]
    found = [RULES[item]] if item in RULES else list_rules(item)
    if not found:
        families = sorted({rule.family for rule in RULES.values()})
        known = f"all; sets: {', '.join(SETS)}; families: {', '.join(families)}; or a rule: schedule.list_rules()"
        near = did_you_mean(item, ["all", *SETS, *families, *RULES])
        raise MatchError(
            f"there is no rule or family {item!r}",
            asked="choose the rules",
            fix=f"{near} schedule.list_rules() names all" if near else known,
        )
    return found


def rule_for(pattern: Any) -> Rule | None:
    """Return the rule with this pattern or this name, or None if there is none."""
    for rule in RULES.values():
        if pattern in rule.patterns or pattern == rule.name:
            return rule
    return None


def rule_at(graph_match: GraphMatch) -> tuple[Rule, GraphMatch] | None:
    """Return the rule rewriting exactly the nodes of ``graph_match``, with the rule's own match, or None.

    This is how a user's pattern finds its fused op: a rule that matches the same nodes says how to replace them,
    regardless of the names of the pattern and its inputs.
    """
    rule = rule_for(graph_match.pattern)
    if rule is not None:
        return rule, graph_match
    nodes = set(graph_match.nodes)
    for rule in RULES.values():
        for pattern in rule.patterns:
            for other in search(graph_match.graph, pattern).graph_matches:
                if set(other.nodes) == nodes and other.outputs == graph_match.outputs and not rule.extra_check(other):
                    return rule, other
    return None
