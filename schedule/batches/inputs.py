"""Example inputs for a model, made from the model itself."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from schedule.batches.argument_makers import MAKERS, labels_like, make
from schedule.batches.config_values import Configs
from schedule.batches.questions import because, no_forward, nothing_says, question
from schedule.batches.requested_sizes import Layouts, Makers, Sizes
from schedule.capture import undisturbed
from schedule.util.internal_errors import perform
from schedule.util.user_code import UserCodeError, user_code

Inputs = dict[str, torch.Tensor]
Repair = Callable[[Inputs, Exception], Iterator[Inputs]]

MAX_TRIALS = 64
MAX_REPAIRS = 3

_MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "past_values", "pixel_values_videos")
_TEXT = ("input_ids", "attention_mask", "bbox")
_DECODER = ("decoder_input_ids",)
_IMAGE = (
    "pixel_values",
    "image_grid_thw",
    "image_grid_hw",
    "spatial_shapes",
    "pixel_attention_mask",
    "image_sizes",
    "target_sizes",
    "image_position_ids",
    "image_attention_mask",
    "image_embeds_position_mask",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "cross_attention_mask",
)
_SOUND = (
    "input_features",
    "input_values",
    "input_features_mask",
    "feature_attention_mask",
    "feature_lens",
    "aftercnn_lens",
)
_SERIES = (
    "past_values",
    "past_observed_mask",
    "past_time_features",
    "future_values",
    "future_time_features",
    "static_categorical_features",
    "static_real_features",
    "states",
    "actions",
    "rewards",
    "returns_to_go",
    "timesteps",
)
_KINDS = {"image": _IMAGE, "audio": _SOUND}
_SELDOM = ("pixel_attention_mask", "image_sizes", "input_features_mask", "feature_attention_mask")
_LEADING = 4  # ordinary tokens before the first placeholder


def example_inputs(
    model: nn.Module,
    rows: int = 2,
    length: int = 12,
    repair: Repair | None = None,
    further: Makers = MappingProxyType({}),
) -> Inputs:
    """Return a batch for ``model``: text, images, sound, series or several of them, with labels if it takes some.

    No model is known by name. The arguments come from the signature of the forward and from ``main_input_name``, and
    their sizes from the config and its sub-configs. Placeholders for images and sound are inserted into the text, one
    for each feature that the model computes. If this is not enough, the model's ``dummy_inputs`` are used. The model
    has run with the returned batch once, without gradients.

    Args:
        model: a transformers model, or one with a ``config`` like theirs.
        rows: batch size.
        length: text tokens of each row, without placeholders.
        repair: makes further batches from one that the model did not accept, and its error.
        further: makers of arguments that are not known by name.

    Raises:
        NotApplicable: no batch could be made; asks for what is missing.
    """
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind not in _VARIADIC]
    names = [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is p.empty]
    if type(model).forward is nn.Module.forward:
        raise no_forward(model)
    config = getattr(model, "config", None)
    if config is None:
        raise question(model, required or names[:1], "it has no config to make them from")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sizes = Sizes(Configs(config), rows, length, names, device, further)
    return _Search(model, sizes, required, repair).run()


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class _Search:
    def __init__(self, model: nn.Module, sizes: Sizes, required: Sequence[str], repair: Repair | None) -> None:
        self.model, self.sizes, self.required, self.repair = model, sizes, list(required), repair
        self.main = _listed(getattr(model, "main_input_name", None))
        self.why = ""  # the model refused the first batch: the richest one was meant
        self.named: list[str] = []  # in that refusal
        self.unknown: dict[str, None] = {}

    def run(self) -> Inputs:
        for batch in itertools.islice(itertools.chain(self.batches(), self.dummies()), MAX_TRIALS):
            found = self.accepted(batch)
            if found is not None:
                return self.labeled(*found)
        needed = [*self.unknown] or [*dict.fromkeys((*self.required, *self.named))] or self.main
        raise question(self.model, needed, self.why or nothing_says(needed))

    # -- what to try --------------------------------------------------------------------------------------

    def plans(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield arguments and kinds of placeholders, from all that the forward takes to the least."""
        known = [name for name in (*self.main, *_MAIN) if name in self.sizes.names and name in MAKERS]
        least = [*self.required, *(name for name in self.main if name in known)] or known[:1]
        seen: set[frozenset[str]] = set()
        for kinds in (["image", "audio"], ["image"], ["audio"], []):
            for extra in self.extras(kinds):
                chosen = self.chosen(least, extra)
                if chosen and frozenset(chosen) not in seen:
                    seen.add(frozenset(chosen))
                    yield chosen, kinds
        embedded = [name for name in ("inputs_embeds",) if name in self.sizes.names]  # some have no embeddings
        for main in (*known, *embedded):  # in place of the one that it says is the main one
            decoder = [n for n in _DECODER if make(n, self.sizes)]
            yield [n for n in self.sizes.names if n in (*self.required, *decoder, main)], []

    def extras(self, kinds: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the optional arguments of a plan, from all to none."""
        of_kinds = [name for kind in kinds for name in _KINDS[kind]]
        series = [name for name in _SERIES if name in self.sizes.names]
        plain = [*_TEXT, *_DECODER, *series, *(name for name in of_kinds if name not in _SELDOM)]
        yield from (plain, [*plain, *of_kinds], [*_TEXT, *_DECODER], _DECODER, [])

    def chosen(self, least: Sequence[str], extra: Sequence[str]) -> list[str]:
        """Return the arguments of the forward that are required, or optional and can be made."""
        chosen = [n for n in self.sizes.names if n in least or (n in extra and make(n, self.sizes))]
        masked = "input_ids" in chosen or "attention_mask" in self.required
        return chosen if masked else [name for name in chosen if name != "attention_mask"]

    def batches(self) -> Iterator[Inputs]:
        for names, kinds in self.plans():
            layouts: list[Layouts] = [make(name, self.sizes) for name in names]
            self.unknown.update(dict.fromkeys(n for n, each in zip(names, layouts, strict=True) if not each))
            if not all(layouts):
                continue
            for chosen in _together(layouts):
                batch = dict(zip(names, chosen, strict=True))
                yield from self.with_placeholders(batch, kinds)

    def dummies(self) -> Iterator[Inputs]:
        """Yield the batches of transformers' own tests of the model, with ids in the vocabulary."""
        try:
            with user_code():
                dummies = dict(getattr(self.model, "dummy_inputs", {}))
        except UserCodeError:
            return
        if not dummies.keys() >= set(self.required):
            return
        vocabulary = self.sizes.configs.number("vocab_size", default=1)
        for name, value in dummies.items():
            if isinstance(value, torch.Tensor):
                ids = name.endswith("input_ids")
                dummies[name] = (value % vocabulary if ids else value).to(self.sizes.device)
        if dummies:
            yield dummies

    # -- placeholders -------------------------------------------------------------------------------------

    def with_placeholders(self, batch: Inputs, kinds: Sequence[str]) -> Iterator[Inputs]:
        """Yield ``batch`` with placeholders for images and sound inserted into its text."""
        if "input_ids" not in batch or not kinds:
            yield batch
            return
        added: list[torch.Tensor] = []
        kind_of: list[int] = []
        for number, kind in enumerate(_KINDS, start=1):
            names = [kind, "video"] if kind == "image" else [kind]  # some take images as videos of one frame
            token = self.sizes.configs.find(*(f"{name}_token_{end}" for name in names for end in ("id", "index")))
            if kind not in kinds or token is None:
                continue
            count = self.features(kind, batch)
            if count:
                added.append(torch.full((self.sizes.rows, count), token, device=self.sizes.device))
                kind_of += [number if kind == "image" else 3] * count
        if added:
            yield self.lengthened(batch, torch.cat(added, dim=1), kind_of)
        else:
            yield batch

    def features(self, kind: str, batch: Inputs) -> int:
        """Return the number of features per row that the model puts in place of the placeholders of ``kind``."""
        method = getattr(self.model, f"get_{kind}_features", None)
        if method is None and kind == "image":
            method = getattr(self.model, "get_video_features", None)
        if method is None or not any(name in batch for name in _KINDS[kind]):
            return 0
        taken = inspect.signature(method).parameters.values()
        wanted = {*_KINDS[kind], *(p.name for p in taken if p.default is p.empty)}
        given = {name: batch[name] for name in batch if name in wanted}
        try:
            with user_code(), self.evaluating(batch):
                found = perform(method, **given)
        except UserCodeError as failed:
            self.note(failed.error, given)
            return 0
        found = getattr(found, "pooler_output", found)
        parts = [part for part in _flattened(found) if part.ndim >= 2]
        return sum(part.numel() // part.shape[-1] for part in parts) // self.sizes.rows

    def lengthened(self, batch: Inputs, placeholders: torch.Tensor, kind_of: Sequence[int]) -> Inputs:
        batch = dict(batch)
        ids = batch["input_ids"]
        batch["input_ids"] = torch.cat([ids[:, :_LEADING], placeholders, ids[:, _LEADING:]], dim=1)
        types = torch.zeros_like(batch["input_ids"])
        types[:, _LEADING : _LEADING + len(kind_of)] = torch.tensor(kind_of, device=types.device)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self.sizes.names:
                batch[name] = types
        mask = batch.get("attention_mask")
        if mask is not None:
            batch["attention_mask"] = torch.cat([mask.new_ones(placeholders.shape), mask], dim=1)
        return batch

    # -- trying -------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self, batch: Inputs) -> Iterator[None]:
        """Run the model in evaluation mode, and restore all state afterwards."""
        with undisturbed(self.model, batch), torch.no_grad():
            self.model.eval()
            yield

    def accepted(self, batch: Inputs, repairs: int = MAX_REPAIRS) -> tuple[Inputs, Any] | None:
        """Return an accepted batch, repaired if necessary, and the output of the model for it.

        The result is None if the model accepts none, or returns None.
        """
        try:
            with user_code(), self.evaluating(batch):
                output = self.model(**batch)
        except UserCodeError as failed:
            self.note(failed.error, batch)
            better = self.better(batch, failed.error) if repairs else ()
            others = (self.accepted(other, repairs - 1) for other in better)
            return next((found for found in others if found is not None), None)
        return (batch, output) if output is not None else None

    def better(self, batch: Inputs, error: Exception) -> Iterator[Inputs]:
        """Yield batches to try in place of one that was not accepted."""
        if self.repair is not None:
            yield from self.repair(batch, error)
        yield from self.completed(batch, error)

    def completed(self, batch: Inputs, error: Exception) -> Iterator[Inputs]:
        """Yield ``batch`` with the arguments named by ``error``: each of them, then all."""
        made = {name: make(name, self.sizes) for name in self.missing(batch, error)}
        added = {name: layouts[0] for name, layouts in made.items() if layouts}
        for name in added if len(added) > 1 else ():
            yield {**batch, name: added[name]}
        if added:
            yield {**batch, **added}

    def missing(self, batch: Inputs, error: Exception) -> list[str]:
        """Return the arguments named by ``error`` and missing from ``batch``."""
        words = set(re.findall(r"\w+", str(error)))
        return [name for name in self.sizes.names if name in words and name not in batch and name != "labels"]

    def note(self, error: Exception, batch: Inputs) -> None:
        """Save the first error of the model for the final error."""
        if not self.why:
            self.why, self.named = because(error, batch), self.missing(batch, error)

    def labeled(self, batch: Inputs, output: Any) -> Inputs:
        """Return ``batch`` with labels if the model then returns a loss, else ``batch``."""
        if "labels" not in self.sizes.names or _loss(output) is not None:
            return batch
        tokens: Inputs = {n: batch[n] for n in ("decoder_input_ids", "input_ids") if n in batch}
        labels = labels_like(getattr(output, "logits", None), tokens, self.sizes)
        if labels is None:
            return batch
        with_labels = {**batch, "labels": labels}
        found = self.accepted(with_labels, repairs=0)
        loss = _loss(found[1]) if found is not None else None
        return with_labels if loss is not None and bool(torch.isfinite(loss).all()) else batch


def _loss(output: Any) -> torch.Tensor | None:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _together(layouts: Sequence[Layouts]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the most likely layout of each argument first, then change one after the other."""
    longest = max(len(each) for each in layouts)
    seen: set[tuple[int, ...]] = set()
    aligned = (tuple(min(i, len(each) - 1) for each in layouts) for i in range(longest))
    every = itertools.product(*(range(len(each)) for each in layouts))
    for choice in itertools.islice(itertools.chain(aligned, every), 16):
        if choice not in seen:
            seen.add(choice)
            yield tuple(each[index] for each, index in zip(layouts, choice, strict=True))


def _flattened(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flattened(item)
