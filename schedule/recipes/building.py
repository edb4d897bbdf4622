"""Construction of a recipe from the history of a schedule."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule.capture import original_class
from schedule.core import history
from schedule.core.matching import Found, Match, Wanted
from schedule.recipes.describing import Chosen, Refused, Undescribable, described
from schedule.recipes.recipe import Recipe
from schedule.recipes.recipe_values import changed, inner
from schedule.recipes.rolling import renamed, rolled
from schedule.recipes.step_recording import Recorded, placed, selected
from schedule.recipes.steps import Call, Find, Step, Undo
from schedule.util.errors import RecipeError, ScheduleError
from schedule.verify.bisection import undone

if TYPE_CHECKING:
    from schedule.core.node import Tree


def recipe_of(tree: Tree, singly: bool = False) -> Recipe:
    """Return the recipe of a schedule, as :meth:`schedule.Schedule.recipe` describes."""
    calls = list(_calls(tree, singly))
    finds = _finds(tree.history.steps, calls)
    names = {found: f"m{number}" for number, found in enumerate(finds, 1)}
    steps: list[Step] = []
    for start, record, times in calls:
        for found, (position, users) in list(finds.items()):
            if position <= start:
                steps.append(_find(tree, found, names[found], users))
                del finds[found]
        steps.append(_call(record, names))
        steps += [Undo(times)] if times else []
    architecture = original_name(tree.root)
    return Recipe(architecture, renamed(rolled(steps, lambda glob: selected(tree, glob))), _versions())


def original_name(module: nn.Module) -> str:
    """Return the name of a module's original class, before it was scheduled."""
    return original_class(module).__name__


def _calls(tree: Tree, singly: bool) -> Iterator[tuple[int, Recorded, int]]:
    """Yield (index of its first step, call, number of its undone steps) for each call."""
    runs: list[tuple[int, Recorded, int]] = []
    for index, step in enumerate(tree.history.steps):
        if runs and runs[-1][1] is step.record:
            start, record, count = runs[-1]
            runs[-1] = start, record, count + 1
        else:
            runs.append((index, step.record, 1))
    for start, record, count in runs:
        if record.rules and singly:
            for index, rule in zip(range(start, start + count), record.rules, strict=False):
                yield index, _as_fuse(tree, index, record, rule), 0
        else:
            yield start, record, len(record.rules) - count if record.rules else 0


def _finds(steps: Sequence[history.Step], calls: Sequence[Any]) -> dict[Found, tuple[int, list[Recorded]]]:
    """Return each find used by calls → (number of steps made before it, these calls), in chronological order."""
    finds: dict[Found, tuple[int, list[Recorded]]] = {}
    for _, record, _ in calls:
        for chosen in _chosen(record):
            same = [old is new for old, new in zip(chosen.found.after, steps, strict=False)]
            position = (*same, False).index(False)
            finds.setdefault(chosen.found, (position, []))[1].append(record)
    return dict(sorted(finds.items(), key=lambda item: item[1][0]))


def _chosen(record: Recorded) -> list[Chosen]:
    return [value for _, given in record.arguments for value in inner(given) if isinstance(value, Chosen)]


def _find(tree: Tree, found: Found, name: str, users: Sequence[Recorded]) -> Find:
    paths = found.paths
    at = next((user.at for user in users if list(user.paths) == paths), None) or placed(tree, paths)
    counts = tuple(len(search.matches) for search in found.searches)
    try:
        rule = found.wanted.rule
        pattern = described(rule if rule is not None else found.wanted.given)
    except Undescribable as error:
        raise _refused(f"find({found.wanted.name})", at, "pattern", error) from None
    return Find(name, at, pattern, counts[0] if len(set(counts)) == 1 else counts)


def _call(record: Recorded, names: dict[Found, str]) -> Call:
    for name, value in record.arguments:
        if isinstance(value, Refused):
            raise _refused(record.primitive, record.at, name, value)
    arguments = changed(record.arguments, lambda chosen: chosen.named(names[chosen.found]))
    return Call(record.primitive, record.at, arguments, tuple(record.rules) if record.rules else None)


def _refused(primitive: str, at: Sequence[str], argument: str, why: Refused | Undescribable) -> RecipeError:
    return RecipeError(
        f"{argument}: {why.why}", asked=f"write {primitive} down", where=", ".join(at) or "the root", fix=why.fix
    )


def _as_fuse(tree: Tree, index: int, record: Recorded, rule: str) -> Recorded:
    """Return the rewrites of one rule of ``optimize`` as a fuse of matches of a find.

    Raises:
        RecipeError: a find of the rule would not return these matches.
    """
    matches = record.rules[rule]
    with undone(tree.node(tree.root), index):
        members = list(dict.fromkeys(match.schedule for match in matches))
        try:
            found = Found(members, Wanted.of(rule))
        except ScheduleError as error:
            raise _not_single(rule, error.why) from error
        own = {_location(match): match for match in found.matches}
        if any(_location(match) not in own for match in matches):
            raise _not_single(rule, "a search for this rule alone finds other matches")
        paths = [member.path for member in members]
        at = placed(tree, paths)
        found.after = tree.history.steps
        picked = described([own[_location(match)] for match in matches])
    return Recorded("fuse", tuple(paths), at, (("matches", picked),))


def _location(match: Match) -> tuple[Any, ...]:
    return match.schedule, tuple(node.name for node in match.sites[0].graph_match.outputs)


def _not_single(rule: str, why: str) -> RecipeError:
    return RecipeError(f"{rule}: {why}", asked="write optimize as single fuses", fix="recipe() writes its rules")


def _versions() -> dict[str, str]:
    names = [name for name in ("torch", "transformers") if name in sys.modules]
    return {name: str(sys.modules[name].__version__) for name in names}
