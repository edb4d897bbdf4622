"""Example inputs by trial, for models with arguments that neither a config nor a docstring describes.

The sizes come from the model's own weights: a convolution gives the channels of an image, a linear layer the features
of a vector. One batch is better than another if the model runs more operations before it refuses it, and does so at
another line, so the arguments of a forward are found one after the other.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxschedule.cli.documented import documented_inputs
from schedule.batches.argument_makers import make
from schedule.batches.config_values import Configs
from schedule.batches.images import image_size
from schedule.batches.inputs import Inputs, Repair
from schedule.batches.questions import because, no_forward, question
from schedule.batches.requested_sizes import Sizes
from schedule.capture import undisturbed
from schedule.util.errors import NotApplicable
from schedule.util.indices import indices_checked
from schedule.util.internal_errors import perform
from schedule.util.user_code import UserCodeError, user_code

MAX_TRIALS = 512
MAX_NUMBERS = 2**18  # of one row
SIDES = (32, 48, 64, 224)  # of an image, in pixels
FRAMES = 8  # of a video
FEW = 2  # ids if there is no embedding to count them


def found_inputs(
    model: nn.Module,
    rows: int = 2,
    length: int = 12,
    repair: Repair | None = None,
    shapes: Sequence[Sequence[int]] = (),
) -> Inputs:
    """Return a batch made from the config of ``model`` and the docstring of its forward, else one found by trial.

    Args:
        model: any module.
        rows: batch size.
        length: tokens of each row.
        repair: as for :func:`schedule.batches.example_inputs`.
        shapes: as for :func:`tried_inputs`.

    Raises:
        NotApplicable: neither gives a batch; asks for what is missing.
    """
    try:
        return documented_inputs(model, rows, length, repair)
    except NotApplicable as refused:
        try:
            return tried_inputs(model, rows, length, shapes)
        except NotApplicable:
            if getattr(model, "config", None) is None:
                raise
            raise refused from None


def tried_inputs(model: nn.Module, rows: int = 2, length: int = 12, shapes: Sequence[Sequence[int]] = ()) -> Inputs:
    """Return a batch that ``model`` accepts, found by calling it with one candidate after the other.

    Candidates for an argument are images, videos and signals ``[rows, channels, ...]``, sequences ``[rows, length,
    features]``, vectors ``[rows, features]``, ids ``[rows, length]`` and numbers ``[rows]``. Ids are below the size of
    the smallest embedding. Arguments with a default of None are given only if the model does not run without them. The
    state of the model is restored.

    Args:
        model: any module.
        rows: batch size.
        length: tokens of each row.
        shapes: shapes of one row to try first.

    Raises:
        NotApplicable: the model accepts no candidate; quotes the reason for the batch with which it ran furthest.
    """
    if type(model).forward is nn.Module.forward:
        raise no_forward(model)
    return _Trials(model, rows, length, shapes).run()


@dataclass(frozen=True)
class _Trial:
    """One call.

    Attributes:
        batch: its inputs.
        reached: how many operations began and ended until the model refused them; infinite if it did not.
        why: its reason.
        lines: where it was: the lines of all calls on the stack.
    """

    batch: Inputs
    reached: float
    why: str = ""
    lines: tuple[tuple[str, int | None], ...] = ()

    @property
    def accepted(self) -> bool:
        return self.reached == math.inf

    def beats(self, other: _Trial) -> bool:
        """Check whether the model ran further than in another call, to another line."""
        return self.reached > other.reached and (self.accepted or self.lines != other.lines)


class _Trials:
    def __init__(self, model: nn.Module, rows: int, length: int, shapes: Sequence[Sequence[int]]) -> None:
        parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in _NAMED]
        self.required = [p.name for p in parameters if p.default is p.empty]
        self.optional = [p.name for p in parameters if p.default is None]
        self.weights = list(model.parameters())
        first = next((weight for weight in self.weights if weight.is_floating_point()), torch.empty(0))
        config = getattr(model, "config", None)
        self.sizes = Sizes(Configs(config), rows, length, [*self.required, *self.optional], first.device)
        self.model, self.dtype, self.left = model, first.dtype, MAX_TRIALS
        features = {weight.shape[1] for weight in self.weights if weight.ndim == 2}
        made = sorted(self.shapes_of_weights(), key=lambda shape: len(shape) > 2 and shape[-1] in features)
        self.shapes = [*dict.fromkeys((*(tuple(shape) for shape in shapes), *made))]
        embeddings = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
        self.ids = min(embeddings, default=FEW)

    def run(self) -> Inputs:
        with undisturbed(self.model), torch.no_grad():
            self.model.eval()
            best = self.tried({name: next(self.candidates(name)) for name in self.required})
            while not best.accepted:
                before = best
                best = self.improved(best, self.required)
                if best is before:
                    best = self.improved(best, self.optional)
                if best is before:
                    needed = self.required or self.optional
                    raise question(self.model, needed, best.why or "its arguments cannot be given by name")
            for name in [name for name in best.batch if name in self.optional]:
                fewer = self.tried({other: value for other, value in best.batch.items() if other != name})
                best = fewer if fewer.accepted else best
        return best.batch

    # -- candidates ---------------------------------------------------------------------------------------

    def candidates(self, name: str) -> Iterator[torch.Tensor]:
        """Yield values of an argument, first those by its name if there is a config.

        Images as wide as a sequence has features come last: a linear layer would accept them.
        """
        sizes = self.sizes
        yield from make(name, sizes) if sizes.configs.named else ()
        for shape in self.shapes:
            yield sizes.normal(sizes.rows, *shape).to(self.dtype)
        yield sizes.whole(self.ids, sizes.rows, sizes.length)
        yield sizes.whole(self.ids, sizes.rows)

    def shapes_of_weights(self) -> Iterator[tuple[int, ...]]:
        """Yield shapes of one row of the input of a linear layer or convolution with each of the weights.

        Without weights, it is a vector.
        """
        if not self.weights:
            yield (self.sizes.length,)
        sides = dict.fromkeys((image_size(self.sizes.configs, SIDES[0])[0], *SIDES))
        for weight in self.weights:
            if weight.ndim == 2:
                yield from ((self.sizes.length, weight.shape[1]), (weight.shape[1],))
            elif weight.ndim > 2:
                sizes = ([FRAMES] * (weight.ndim - 4) + [side] * min(weight.ndim - 2, 2) for side in sides)
                yield from (
                    (weight.shape[1], *size) for size in sizes if weight.shape[1] * math.prod(size) <= MAX_NUMBERS
                )

    # -- trying -------------------------------------------------------------------------------------------

    def improved(self, best: _Trial, names: Sequence[str]) -> _Trial:
        """Return the best trial with other values of ``names``, or ``best`` itself."""
        for name in names:
            start = best
            for value in self.candidates(name):
                if best.accepted or self.left <= 0:
                    return best
                other = self.tried({**start.batch, name: value})
                best = other if other.beats(best) else best
        return best

    def tried(self, batch: Inputs) -> _Trial:
        self.left -= 1
        copies = {name: value.clone() for name, value in batch.items()}
        with indices_checked((self.weights, copies)), _Operations() as operations:
            try:
                with user_code():
                    output = self.model(**copies)
            except UserCodeError as failed:
                error = failed.error
                lines = tuple((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
                return _Trial(batch, operations.count, because(error, batch), lines)
        return _Trial(batch, operations.count if output is None else math.inf, "the model returns nothing")


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Operations(TorchFunctionMode):
    """Counts the calls of torch that begin, and those that end."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = perform(func, *args, **(kwargs or {}))
        self.count += 1
        return result
