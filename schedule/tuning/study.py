"""Search by optuna: the next points to try, and the trials stored on disk."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from schedule.recipes.recipe import Recipe
from schedule.tuning.space import Choice, Knob, Knobs, Space
from schedule.tuning.surrogate import promising
from schedule.tuning.trial import Trial
from schedule.util.errors import NotApplicable

Sampler = Callable[[int], BaseSampler]

_ENUMERABLE = 2_000
"""Number of points to draw as candidates from a larger space."""
_AT_RANDOM = 5
"""Number of random trials before the surrogate is used."""
_PATIENCE = 4
"""Number of successive known points from a sampler before a new point is drawn instead."""
_FAILED = 10.0
"""Excess over the bound assigned to a failed trial: 1 is twice the bound."""


@dataclass(frozen=True)
class Asked:
    """A point to try.

    Attributes:
        knobs: the values.
        trial: the trial of optuna.
    """

    knobs: Knobs
    trial: optuna.Trial

    def outpaced(self, so_far: float) -> bool:
        """Check whether the median of the other trials was faster at this point."""
        step = len(self.trial._cached_frozen_trial.intermediate_values)
        self.trial.report(so_far, step)
        return self.trial.should_prune()


class Study:
    """Trials so far, in memory or on disk, and the next ones.

    Args:
        space: the search space.
        storage: a file, the URL of a database, or None.
        name: under which the study is stored.
        about: properties that must be equal for stored trials to be used.
        seed: of the search; trial n is the same whether the search was interrupted before or not.
        sampler: creates a sampler of optuna from a seed; None for :func:`~schedule.tuning.surrogate.promising`.

    Raises:
        NotApplicable: the stored study has other properties, or cannot be read.
    """

    def __init__(
        self,
        space: Space,
        storage: str | Path | None,
        name: str,
        about: Mapping[str, Any],
        seed: int,
        sampler: Sampler | None,
    ) -> None:
        self.space, self.seed = space, seed
        self._read: dict[int, Trial] = {}
        self.sampler, self.bound = sampler, about["bound"]
        try:
            with _quiet():
                self._study = optuna.create_study(
                    storage=_storage(storage),
                    study_name=name,
                    load_if_exists=True,
                    pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
                )
        except (OSError, ValueError, KeyError, SQLAlchemyError) as error:
            raise NotApplicable(
                f"{storage} holds no searches: {str(error).splitlines()[0]}",
                fix="a file that a search wrote, or a new one in a folder that exists",
            ) from error
        self._check(about, storage)
        for trial in self._frozen(TrialState.RUNNING):  # of a process that has ended
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _check(self, about: Mapping[str, Any], storage: str | Path | None) -> None:
        stored = self._study.user_attrs
        for key, value in about.items():
            if stored.get(key, value) != value:
                raise NotApplicable(
                    f"what is stored there is about another {key}: {stored[key]}, and this is {value}",
                    where=str(storage),
                    fix="another file, or another name=",
                )
            self._study.set_user_attr(key, value)

    def _frozen(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)

    # -- stored trials ------------------------------------------------------------------------------------

    @property
    def trials(self) -> list[Trial]:
        """Completed trials, in order."""
        return [self._trial(trial) for trial in self._ended()]

    def _ended(self) -> list[FrozenTrial]:
        return [t for t in self._frozen(TrialState.COMPLETE, TrialState.PRUNED) if "status" in t.user_attrs]

    def _trial(self, frozen: FrozenTrial) -> Trial:
        if frozen.number not in self._read:
            self._read[frozen.number] = self._made(frozen)
        return self._read[frozen.number]

    def _made(self, frozen: FrozenTrial) -> Trial:
        said = frozen.user_attrs
        knobs = self.space.draw(lambda name, knob: _external(knob, frozen.params[name]))
        recipe = None if said["recipe"] is None else Recipe.from_json(said["recipe"])
        return Trial(said["number"], knobs, said["status"], said["time"], said["memory"], said["reason"], recipe)

    # -- next points --------------------------------------------------------------------------------------

    def proposals(self, count: int) -> Iterator[Asked]:
        """Yield untried points until ``count`` trials have ended or the space is exhausted."""
        while len(self._ended()) < count:
            asked = self._new()
            if asked is None:
                return
            yield asked

    def _new(self) -> Asked | None:
        trials = self.trials
        known = {_key(self._internal(trial.knobs)) for trial in trials}
        if self.sampler is not None or len(trials) < _AT_RANDOM:
            for _ in range(_PATIENCE):
                asked = self._ask()
                if _key(asked.trial.params) not in known:
                    return asked
                self.drop(asked)
        left = self._left(known)
        if not left:
            return None
        draw = random.Random(f"{self.seed}:{len(trials)}: of what is left")
        which = promising(self.space, trials, self.bound, left) if self.sampler is None else draw.randrange(len(left))
        return self._ask(self._internal(left[which]))

    def _ask(self, fixed: Mapping[str, Any] | None = None) -> Asked:
        number = len(self._study.get_trials(deepcopy=False))
        with _quiet():
            self._study.sampler = (self.sampler or _at_random)(random.Random(f"{self.seed}:{number}").getrandbits(32))
            if fixed is not None:
                self._study.enqueue_trial(dict(fixed))
            trial = self._study.ask()
            return Asked(self.space.draw(lambda name, knob: _suggested(trial, name, knob)), trial)

    def _left(self, known: set[Any]) -> list[Knobs]:
        """Return the untried points, or a random sample of them for a large space."""
        draw = random.Random(f"{self.seed}:{len(known)}: some of them")
        if self.space.size <= _ENUMERABLE:
            points = list(self.space.points())
        else:
            points = [self.space.draw(lambda name, knob: _drawn(draw, knob)) for _ in range(_ENUMERABLE)]
        return [point for point in points if _key(self._internal(point)) not in known]

    def _internal(self, knobs: Knobs) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def note(name: str, knob: Knob) -> Any:
            found[name] = knob.values.index(knobs[name]) if isinstance(knob, Choice) else knobs[name]
            return knobs[name]

        self.space.draw(note)
        return found

    # -- results ------------------------------------------------------------------------------------------

    def tell(self, asked: Asked, trial: Trial, excess: float) -> None:
        """Store the result of a trial.

        Args:
            asked: the point.
            trial: the result.
            excess: memory over the bound, as a fraction of it; 0 or less is within.
        """
        said = {name: getattr(trial, name) for name in ("number", "status", "time", "memory", "reason")}
        said["recipe"] = None if trial.recipe is None else trial.recipe.to_json()
        for name, value in said.items():
            asked.trial.set_user_attr(name, value)
        asked.trial.set_constraint("memory", _FAILED if trial.status == "failed" else excess)
        measured = trial.status == "measured"
        with _quiet():
            self._study.tell(
                asked.trial, trial.time if measured else None, TrialState.COMPLETE if measured else TrialState.PRUNED
            )

    def drop(self, asked: Asked) -> None:
        """Discard a point not tried to the end."""
        self._study.tell(asked.trial, state=TrialState.FAIL)


def _at_random(seed: int) -> BaseSampler:
    return RandomSampler(seed=seed)


def _suggested(trial: optuna.Trial, name: str, knob: Knob) -> Any:
    return _external(knob, trial._suggest(name, _distribution(knob)))


def _external(knob: Knob, value: Any) -> Any:
    return knob.values[value] if isinstance(knob, Choice) else value


def _distribution(knob: Knob) -> BaseDistribution:
    if isinstance(knob, Choice):
        last = len(knob.values) - 1
        return IntDistribution(0, last) if knob.ordered else CategoricalDistribution(range(last + 1))
    if knob.whole:
        return IntDistribution(int(knob.low), int(knob.high), log=knob.log)
    return FloatDistribution(knob.low, knob.high, log=knob.log)


def _drawn(draw: random.Random, knob: Knob) -> Any:
    if isinstance(knob, Choice):
        return draw.choice(knob.values)
    return draw.randint(int(knob.low), int(knob.high)) if knob.whole else draw.uniform(knob.low, knob.high)


def _key(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def _storage(storage: str | Path | None) -> Any:
    """Open a file as a storage: ``.db``, ``.sqlite`` or ``.sqlite3`` as a database, any other as a journal."""
    if storage is None or "://" in str(storage):
        return storage
    path = Path(storage)
    if path.suffix in (".db", ".sqlite", ".sqlite3"):
        return f"sqlite:///{path}"
    from optuna.storages.journal import JournalFileBackend

    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress optuna's log messages, and its warnings about experimental arguments."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
