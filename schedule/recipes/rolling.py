"""Merging of steps repeated for every layer into steps over all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from schedule.recipes.recipe_values import Arguments, Joined, Made, Picked, changed, inner
from schedule.recipes.steps import Call, Find, Step, finds_used

Select = Callable[[str], list[str]]
"""Function from a glob to the paths it selects."""

_LONGEST = 8
"""Maximum number of steps in a repeated block."""


def rolled(steps: Sequence[Step], select: Select) -> list[Step]:
    """Return the steps with each block repeated for every layer number written once, with a glob."""
    out: list[Step] = []
    start = 0
    last = {name: at for at, step in enumerate(steps) for name in finds_used(step)}
    while start < len(steps):
        for period in range(1, _LONGEST + 1):
            block = _repeated(steps, start, period, select, last)
            if block is not None:
                out += block.once
                start += period * block.times
                break
        else:
            out.append(steps[start])
            start += 1
    return out


@dataclass(frozen=True)
class _Block:
    once: list[Step]
    times: int


def _repeated(steps: Sequence[Step], start: int, period: int, select: Select, last: Mapping[str, int]) -> _Block | None:
    """Return the block that begins at ``start`` and is repeated for other layers, or None.

    Args:
        last: name of each find → the last step that uses it. Those found in a block are used in it alone.
    """
    first = steps[start : start + period]
    if len(first) < period or not all(isinstance(step, (Find, Call)) for step in first):
        return None
    parts = _path(first[0]).split(".")
    for depth in (depth for depth, part in enumerate(parts) if part.isdigit()):
        template = _template(first, parts[: depth + 1])
        if template is None:
            continue
        blocks = [first]
        while (here := start + period * len(blocks)) + period <= len(steps):
            following = steps[here : here + period]
            beginning = [*parts[:depth], *_path(following[0]).split(".")[depth : depth + 1]]
            if _template(following, beginning) != template:
                break
            blocks.append(following)
        if any(last.get(find.name, 0) >= start + period * (i + 1) for i, find in _finds(blocks)):
            continue
        wanted = [[_path(block[i]) for block in blocks] for i in range(period)]
        globs = [step.at[0] for step in template]  # type: ignore[union-attr]
        if len(blocks) > 1 and all(select(glob) == paths for glob, paths in zip(globs, wanted, strict=True)):
            return _Block([_merged(i, blocks, glob) for i, glob in enumerate(globs)], len(blocks))
    return None


def _finds(blocks: Sequence[Sequence[Step]]) -> Iterator[tuple[int, Find]]:
    """Yield each find with the number of its block."""
    return ((i, step) for i, block in enumerate(blocks) for step in block if isinstance(step, Find))


def _path(step: Step) -> str:
    return step.at[0] if isinstance(step, (Find, Call)) and len(step.at) == 1 else ""


def _template(block: Sequence[Step], beginning: list[str]) -> list[Step] | None:
    """Return the block with layer numbers replaced by ``*``, for comparison with other layers.

    Return None if the block is not about one layer, or cannot be applied to several layers at once.
    """
    if not beginning or not beginning[-1].isdigit():
        return None
    names: dict[str, str] = {}
    found: list[Step] = []
    for step in block:
        parts = _path(step).split(".")
        if not isinstance(step, (Find, Call)) or parts[: len(beginning)] != beginning:
            return None
        at = (".".join([*beginning[:-1], "*", *parts[len(beginning) :]]),)
        if isinstance(step, Find):
            names[step.name] = f"m{len(names) + 1}"
            found.append(replace(step, name=names[step.name], at=at, counts=0))
            continue
        values = [value for _, given in step.arguments for value in inner(given)]
        picked = [value for value in values if isinstance(value, Picked)]
        once = any(isinstance(value, (Made, Joined)) for value in values)  # one module cannot replace several
        if once or any(p.find not in names or p.which == "one" or _nested(p) for p in picked):
            return None
        found.append(replace(step, at=at, arguments=_renamed(step.arguments, names)))
    return found


def _nested(picked: Picked) -> bool:
    return any(isinstance(position, tuple) for position in picked.positions)


def _merged(index: int, blocks: Sequence[Sequence[Step]], glob: str) -> Step:
    step = blocks[0][index]
    if isinstance(step, Find):
        counts = [count for block in blocks if isinstance(one := block[index], Find) for count in _counts(one)]
        return replace(step, at=(glob,), counts=counts[0] if len(set(counts)) == 1 else tuple(counts))
    return replace(step, at=(glob,), arguments=changed(step.arguments, _in_each)) if isinstance(step, Call) else step


def _counts(find: Find) -> tuple[int, ...]:
    return find.counts if isinstance(find.counts, tuple) else (find.counts,)


def _in_each(picked: Picked) -> Picked:
    return replace(picked, which="each") if picked.which == "these" else picked


def renamed(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Rename the finds of the steps to m1, m2, … in order."""
    names: dict[str, str] = {}
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Find):
            names[step.name] = f"m{len(names) + 1}"
            step = replace(step, name=names[step.name])
        elif isinstance(step, Call):
            step = replace(step, arguments=_renamed(step.arguments, names))
        found.append(step)
    return tuple(found)


def _renamed(arguments: Arguments, names: dict[str, str]) -> Arguments:
    return changed(arguments, lambda picked: replace(picked, find=names.get(picked.find, picked.find)))
