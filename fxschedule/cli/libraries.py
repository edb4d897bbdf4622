"""Models of other libraries with random weights: ``timm:resnet50``, ``diffusers:UNet2DModel``.

A row of :data:`LIBRARIES` is what has to be known of a library. Example inputs are found from the model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxschedule.cli.loaded import Loaded, first_line, missing
from fxschedule.cli.trials import tried_inputs
from schedule.util.errors import NotApplicable, did_you_mean
from schedule.util.user_code import UserCodeError, raised_by, user_code

SMALL = 64
"""Height and width of images for ``--tiny``, in pixels."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """How to get a model of a library.

    Attributes:
        module: the module to import.
        names: returns the names of all models, from that module.
        make: returns the model of a name, tiny if asked for.
        image: returns the shape of one image for a model, or () if the library does not say it.
    """

    module: str
    names: Callable[[Any], Iterable[str]]
    make: Callable[[Any, str, bool], nn.Module]
    image: Callable[[nn.Module], Shape] = lambda model: ()

    def load(self, library: str, name: str, tiny: bool) -> Loaded:
        """Make a model with random weights. Nothing is downloaded.

        Raises:
            CommandError: the library is not installed, has no such model, or cannot make it.
        """
        module = self._imported(library)
        names = list(self.names(module))
        if name.partition(".")[0] not in names:  # timm adds the name of the weights
            near = did_you_mean(name, names)
            raise missing(
                f"{library} has no model {name!r}", fix=near or f"one of its {len(names)} names, such as {names[0]}"
            )
        torch.manual_seed(0)
        try:
            with user_code():
                model = self.make(module, name, tiny)
        except (NotApplicable, UserCodeError) as failed:
            error = raised_by(failed)
            raise missing(
                f"no {'tiny ' * tiny}{name} can be made: {first_line(error)}",
                fix=f"{'leave --tiny out, or ' * tiny}name a factory that returns it: module:factory",
            ) from error
        shape = self.image(model)
        shapes = ((*shape[:-2], SMALL, SMALL), shape) if tiny else (shape,)
        origin = f"{library}, random weights" + (", tiny" if tiny else "")
        return Loaded(model, None, origin, shapes if shape else ())

    def _imported(self, library: str) -> Any:
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            why = f"{library} is not installed" if error.name == library else f"{library} cannot be imported: {error}"
            raise missing(why, fix=f"pip install {error.name or library}") from error


def _of_timm(timm: Any, name: str, tiny: bool) -> nn.Module:
    model: nn.Module
    if tiny:
        try:
            with user_code():
                model = timm.create_model(name, pretrained=False, img_size=SMALL)
            return model
        except UserCodeError:  # most take images of any size, and no such argument
            pass
    model = timm.create_model(name, pretrained=False)
    return model


def _declared(model: nn.Module) -> Shape:
    declared = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    return tuple(declared.get("input_size") or ())


def _of_diffusers(diffusers: Any, name: str, tiny: bool) -> nn.Module:
    cls = getattr(diffusers, name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise NotApplicable("it is no nn.Module: name the model in it, such as UNet2DConditionModel")
    return _tiny(cls) if tiny else cls()


def _tiny(cls: type[nn.Module]) -> nn.Module:
    """Return the largest working reduction of ``cls``."""
    from fxschedule.cli.tiny.small_settings import reduced

    parameters = inspect.signature(cls).parameters.values()
    why: Exception | None = None
    for settings in reduced({p.name: p.default for p in parameters if p.default is not p.empty}):
        try:
            with user_code():
                model = cls(**settings)
            tried_inputs(model)
            return model
        except (NotApplicable, UserCodeError) as failed:
            why = why or raised_by(failed)
    raise NotApplicable(str(why)) from why


LIBRARIES = {
    "timm": Library("timm", lambda timm: timm.list_models(), _of_timm, _declared),
    "torchvision": Library(
        "torchvision.models",
        lambda models: models.list_models(),
        lambda models, name, tiny: models.get_model(name, weights=None),
        lambda model: (3, 224, 224),
    ),
    "diffusers": Library("diffusers", lambda diffusers: [n for n in dir(diffusers) if n[0].isupper()], _of_diffusers),
}
