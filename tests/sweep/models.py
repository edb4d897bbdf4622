"""Every architecture of the installed transformers, and a tiny model of each."""

from __future__ import annotations

import importlib
import inspect
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from fxschedule.cli.documented import documented_inputs
from fxschedule.cli.tiny.repairs import repaired
from fxschedule.cli.tiny.small_configs import CATEGORIES, Config, shrink
from schedule.batches import Inputs
from schedule.util.errors import NotApplicable
from tests.sweep import beyond
from tests.sweep.parts import REFUSED, holders, part_of

MAX_PARAMETERS = 40_000_000
SECONDS_TO_BUILD = 6.0
_PART = "the config is a part of others"

# The head that a model is most often trained with comes first; those without a head come last.
_FIRST = (
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "CTC",
)
_LAST = (
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_MAPPING_NAMES",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_BACKBONE_MAPPING_NAMES",
)


class NotBuilt(Exception):
    """No tiny model could be made; ``kind`` says where it ended."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind, self.why = kind, why
        super().__init__(f"{kind}: {why}")


@dataclass(frozen=True)
class Built:
    """A tiny model.

    Attributes:
        model: with random weights, eager attention.
        batch: what it can be called with.
        kept: the categories of fields that had to stay at their real size.
    """

    model: nn.Module
    batch: Inputs
    kept: frozenset[str]


@cache
def mappings() -> list[dict[str, Any]]:
    """Auto mappings, model type → name of the class, in order of preference."""
    every = {n: v for n, v in vars(modeling_auto).items() if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")}
    first = [f"MODEL_FOR_{part}_MAPPING_NAMES" for part in _FIRST]
    rest = [name for name in every if name not in first and name not in _LAST]
    return [every[name] for name in (*first, *rest, *_LAST)]


def architectures() -> list[str]:
    """The model types, one for each config class."""
    classes: dict[str, str] = {}
    for name, config in CONFIG_MAPPING_NAMES.items():
        if config not in classes or CONFIG_MAPPING[name].model_type == name:
            classes[config] = name
    return sorted(classes.values())


def model_class(name: str) -> type[nn.Module]:
    """The class that is trained with the config of ``name``.

    Raises:
        NotBuilt: there is none: the config is a part of others, or a package is missing.
    """
    return _available(next(model_classes(name)))


def model_classes(name: str) -> Iterator[type[nn.Module]]:
    """As :func:`model_class`, then the others, such as the one without the head."""
    config = CONFIG_MAPPING[name]
    mapped = list(_mapped(name))
    mine = (cls for cls in mapped if _is_dummy(cls) or getattr(cls, "config_class", config) is config)
    classes = dict.fromkeys((*mine, *_beside(config), *mapped))  # some borrow the models of another architecture
    if not classes:
        raise NotBuilt("no model of its own", _PART)
    yield from classes


def _mapped(name: str) -> Iterator[type[nn.Module]]:
    """The classes that the auto classes give for ``name``, in order of preference."""
    for mapping in mappings():
        if name in mapping:
            found = mapping[name]
            cls = getattr(transformers, found if isinstance(found, str) else found[0], None)
            if isinstance(cls, type):
                yield cls


def _beside(config: type) -> Iterator[type[nn.Module]]:
    """Models in the modeling file next to a config class that are made of exactly that config."""
    where = config.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(where)
    except ImportError:
        return
    for cls in vars(module).values():
        mine = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and cls.__module__ == where
        if mine and cls.config_class is config and "forward" in vars(cls):
            yield cls


def _is_dummy(cls: type) -> bool:
    """Whether this stands for a class whose packages are missing; it raises whatever it is asked."""
    return type(cls).__name__ == "DummyObject"


def _available(cls: Any) -> type[nn.Module]:
    if _is_dummy(cls):
        missing = [backend for backend in cls._backends if backend != "torch"]
        raise NotBuilt("needs a package", ", ".join(missing) or cls.__name__)
    return cls


def build(name: str, seed: int = 0) -> Built:
    """A tiny model of ``name``; for a part that nothing can be made up for, out of a tiny model of its whole.

    A name such as ``timm:resnet`` is that of another library's model.

    Raises:
        NotBuilt: none of these builds and runs.
    """
    if ":" in name:
        try:
            return Built(*beyond.build(name, seed), frozenset())
        except beyond.Unavailable as error:
            raise NotBuilt(error.kind, error.why[:300]) from error
    config = CONFIG_MAPPING[name]
    try:
        return _whole(name, _defaults(config), seed)
    except NotBuilt as failure:
        for holder, field in holders(config):
            try:
                defaults = _defaults(CONFIG_MAPPING[holder])
                whole = _whole(holder, {**defaults, field: defaults.get(field) or config().to_dict()}, seed)
                return Built(*part_of(whole.model, config), whole.kept)
            except (NotBuilt, NotApplicable):
                continue
        raise failure


def _defaults(config: Any) -> Config:
    try:
        defaults: Config = config().to_dict()
    except REFUSED as error:
        raise NotBuilt("no default config", _first_line(error)) from error
    return defaults


def _whole(name: str, default: Config, seed: int) -> Built:
    """Of the first class whose packages are there."""
    missing: NotBuilt | None = None
    for cls in model_classes(name):
        try:
            return _shrunk(_available(cls), name, default, seed)
        except NotBuilt as error:
            missing = missing or error
            if error.kind != "needs a package":
                raise
    raise missing or NotBuilt("no model of its own", _PART)


def _shrunk(cls: type[nn.Module], name: str, default: Config, seed: int) -> Built:
    """Everything small at first, then one category of sizes after another left as it is."""
    failure = NotBuilt("not shrunk", "every attempt is too large")
    until = time.process_time() + SECONDS_TO_BUILD
    for kept in _attempts():
        try:
            model = _with_forward(_built(cls, CONFIG_MAPPING[name], shrink(default, kept), seed))
            return Built(model, documented_inputs(model, repair=repaired), kept)
        except NotApplicable as question:
            failure = _later(failure, NotBuilt("no example inputs", _first_line(question)))
        except ImportError as error:
            raise NotBuilt("needs a package", _first_line(error)) from error
        except REFUSED as error:
            failure = _later(failure, NotBuilt("not shrunk", f"{type(error).__name__}: {_first_line(error)}"))
        except _TooLarge:
            continue
        if time.process_time() > until:
            break
    raise failure


def _with_forward(model: nn.Module) -> nn.Module:
    """``model``, or its first part that can be called: some models do nothing but hold parts and generate."""
    models = (m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))
    return next((m for m in models if type(m).forward is not nn.Module.forward), model)


def _later(first: NotBuilt, second: NotBuilt) -> NotBuilt:
    """The failure of the smallest model says most, that of one which builds more than that."""
    order = ("not shrunk", "no example inputs")
    fresh = first.why == "every attempt is too large"
    return second if fresh or order.index(second.kind) > order.index(first.kind) else first


def _attempts() -> Iterator[frozenset[str]]:
    for count in (0, 1):
        yield from map(frozenset, itertools.combinations(CATEGORIES, count))
    yield frozenset(CATEGORIES) - {"layers", "vocabulary"}
    yield from map(frozenset, itertools.combinations(CATEGORIES, 2))


class _TooLarge(Exception):
    pass


def _built(cls: Any, config_class: Any, config: dict[str, Any], seed: int) -> nn.Module:
    made = config_class.from_dict(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(made, attn_implementation="eager").parameters())
    if size > MAX_PARAMETERS:
        raise _TooLarge
    torch.manual_seed(seed)
    model: nn.Module = cls._from_config(config_class.from_dict(config), attn_implementation="eager")
    return model.float()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]


def sources(name: str) -> list[str]:
    """The files that define the architecture."""
    if ":" in name:
        return beyond.sources(name)
    config = CONFIG_MAPPING[name]
    paths = [inspect.getsourcefile(config) or ""]
    spec = importlib.util.find_spec(config.__module__.replace(".configuration_", ".modeling_"))
    return [*paths, *([spec.origin] if spec and spec.origin else [])]
