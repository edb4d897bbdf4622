"""Replay of a recipe on another model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from schedule.capture import original_class
from schedule.core.matching import Match, find_in
from schedule.core.node import Node
from schedule.optimizer import optimize_by
from schedule.primitives.group import Group
from schedule.primitives.registry import registered
from schedule.recipes.building import original_name
from schedule.recipes.recipe import Recipe
from schedule.recipes.recipe_values import live
from schedule.recipes.steps import Call, Find, Step, Undo
from schedule.rules import select_rules
from schedule.util.errors import RecipeError, ScheduleError
from schedule.util.globs import is_glob
from schedule.util.wording import counted

_FIX = "edit this step of the recipe; nothing was changed"

Finds = dict[str, list[list[Match]]]


def replay_on(sch: Node, recipe: Recipe) -> None:
    """Apply ``recipe`` to the model of ``sch``, for :func:`schedule.replay`.

    Raises:
        RecipeError: it is for another architecture, or a step fails or differs from the recipe; the model is restored.
    """
    sch = sch.root
    kinds = [kind.__name__ for kind in original_class(sch.module).__mro__]
    if recipe.architecture and recipe.architecture not in kinds:
        raise RecipeError(
            f"it was made for a {recipe.architecture}, and this is a {original_name(sch.module)}",
            asked="replay the recipe",
            fix='give a model of that class, or try dataclasses.replace(recipe, architecture="")',
        )
    sch.tree.history.refuse_while_pending("replay")
    finds: Finds = {}
    with sch.tree.history.all_or_nothing():
        start = len(sch.history)
        for number, step in enumerate(recipe.steps, 1):
            try:
                _again(sch, step, finds, start)
            except (ScheduleError, TypeError, ValueError, AttributeError, KeyError) as error:
                raise _diverged(recipe, number, step, error) from error


def _again(sch: Node, step: Step, finds: Finds, start: int) -> None:
    if isinstance(step, Find):
        finds[step.name] = _found(sch, step)
    elif isinstance(step, Call):
        _called(sch, step, finds)
    else:
        _undone(sch, step, start)


def _found(sch: Node, step: Find) -> list[list[Match]]:
    members = list(_members(sch, step.at))
    counts = step.counts if isinstance(step.counts, tuple) else (step.counts,) * len(members)
    found = find_in(members, live(step.pattern, {}), sum(counts))
    own = [[match for match in found if match.schedule is member] for member in members]
    for member, matches, count in zip(members, own, counts, strict=False):
        if len(matches) != count:
            here = counted(len(matches), "match", "matches")
            raise RecipeError(f"{member.label} has {here}, it had {count}", fix=_FIX)
    if len(counts) != len(members):
        here = counted(len(members), "module was", "modules were")
        raise RecipeError(f"{here} searched, there were {len(counts)}, which differed", fix=_FIX)
    return own


def _members(sch: Node, at: Sequence[str]) -> Group[Node] | list[Node]:
    if len(at) == 1:
        found = sch.select(at[0])
        return Group(found, at[0]) if is_glob(at[0]) else found
    return Group([sch.at(path) for path in at], ", ".join(at))


def _called(sch: Node, step: Call, finds: Finds) -> None:
    members = _members(sch, step.at)
    target = members if isinstance(members, Group) else members[0]
    arguments = {name: live(value, finds) for name, value in step.arguments}
    before = len(sch.history)
    if step.primitive == "optimize":
        selected = select_rules(arguments.get("rules", "default"), step.rules)
        report = optimize_by(selected, target, **arguments)
        made = [made.arguments["rules"][0] for made in sch.history[before:]]
        if step.rules is not None and made != list(step.rules):
            raise _other_rules(step.rules, made, report)
    else:
        method = registered()[step.primitive]
        inspect.signature(method).bind(None, **arguments)
        on_target = getattr(target, step.primitive) if isinstance(target, Group) else partial(method, target)
        on_target(**arguments)


def _other_rules(wanted: Sequence[str], made: Sequence[str], report: Any) -> RecipeError:
    missing = [rule for rule in wanted if rule not in made]
    more = [rule for rule in made if rule not in wanted]
    said = [f"{rule} found nothing" for rule in missing] + [
        f"{rule} has matches now, and had none then" for rule in more
    ]
    near = [f"{e.path or 'the root'}: {e.rule}: {e.reason}" for e in report.entries if e.status != "applied"]
    ours = [line for line in near if any(rule in line for rule in missing)]
    return RecipeError(
        "; ".join(said) or "the rules came in another order",
        where="\n".join((ours or near)[:3]),
        fix="optimize with the rules that are wanted here, and take a new recipe",
    )


def _undone(sch: Node, step: Undo, start: int) -> None:
    made = len(sch.history) - start
    if step.times > made:
        raise RecipeError(f"only {counted(made, 'step')} of this recipe to undo", fix="take the undo out")
    for _ in range(step.times):
        sch.undo()


def _diverged(recipe: Recipe, number: int, step: Step, error: Exception) -> RecipeError:
    why = getattr(error, "why", None) or str(error)
    made = ", ".join(f"{name} {version}" for name, version in recipe.made_with.items())
    where = [f"step {number} of {len(recipe.steps)}: {step}", *filter(None, [getattr(error, "where", "")])]
    where += [f"the recipe was made with {made}"] if made else []
    return RecipeError(
        why,
        asked=f"replay step {number}, {_short(step)}",
        where="\n".join(where),
        fix=getattr(error, "fix", "") or _FIX,
    )


def _short(step: Step) -> str:
    return step.primitive if isinstance(step, Call) else "find" if isinstance(step, Find) else "undo"
