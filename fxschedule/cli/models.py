"""Loading of the MODEL argument, without downloads and without remote code unless allowed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxschedule.cli.factories import from_factory
from fxschedule.cli.libraries import LIBRARIES
from fxschedule.cli.loaded import Loaded, first_line, missing
from fxschedule.cli.options import Asked
from fxschedule.cli.output import Code, CommandError
from schedule.util.errors import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Heads for a bare model type, in order of preference: the first available one is used.
_HEADS = (
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
)


def load_model(asked: Asked) -> Loaded:
    """Load the model of a command, without a batch.

    Raises:
        CommandError: there is no model of this name here, or it needs a missing package or remote code that is not
            allowed.
    """
    return _Wanted(asked).load()


@dataclass(frozen=True)
class _Wanted:
    asked: Asked

    def load(self) -> Loaded:
        library, colon, name = self.asked.name.partition(":")
        if colon and self.asked.attention:
            raise CommandError("--attention is for models of transformers", Code.USAGE, fix="leave it out")
        if colon and library in LIBRARIES:
            return LIBRARIES[library].load(library, name, self.asked.tiny)
        if colon and self.asked.tiny:
            why = f"--tiny does not change what {self.asked.name} makes"
            raise CommandError(why, Code.USAGE, fix="leave it out, or make a small model")
        if colon:
            return from_factory(self.asked.name)
        try:
            return self._from_transformers()
        except ImportError as error:
            raise missing(f"{self.asked.name} needs a package: {error}", fix="pip install transformers") from error

    # -- transformers -------------------------------------------------------------------------------------

    def _from_transformers(self) -> Loaded:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._refuse_attention()
        stored = self._stored()
        config = self._stored_config() if stored else _default_config(self.asked.name)
        cls = _model_class(config)
        if stored and not self.asked.tiny:
            return Loaded(self._with_weights(cls), None, f"weights of {stored}")
        return Loaded(self._random(cls, config), None, "random weights" + (", tiny" if self.asked.tiny else ""))

    def _refuse_attention(self) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        known = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]
        if self.asked.attention and self.asked.attention not in known:
            near = did_you_mean(self.asked.attention, known)
            raise CommandError(
                f"transformers has no attention {self.asked.attention!r}",
                Code.USAGE,
                fix=f"{near}{near and ' '}the choices are {', '.join(known)}",
            )

    def _stored(self) -> str:
        """Describe the local location of the model, or return "" if it is not stored here."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        if Path(self.asked.name).is_dir():
            if not (Path(self.asked.name) / "config.json").is_file():
                raise missing(f"the folder {self.asked.name} has no config.json", fix="name what save_pretrained wrote")
            return f"the folder {self.asked.name}"
        try:
            cached = try_to_load_from_cache(self.asked.name, "config.json")
        except HFValidationError:  # not a model id, such as a path
            return ""
        return "the local cache" if isinstance(cached, str) else ""

    def _stored_config(self) -> PreTrainedConfig:
        from transformers import AutoConfig, PreTrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        written, _ = PreTrainedConfig.get_config_dict(self.asked.name, local_files_only=True)
        remote = "auto_map" in written and written.get("model_type") not in CONFIG_MAPPING_NAMES
        if remote and not self.asked.trust_remote_code:
            why = f"{self.asked.name} comes with code of its own"
            raise missing(why, fix="--trust-remote-code, once you have read it")
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                self.asked.name, local_files_only=True, trust_remote_code=self.asked.trust_remote_code
            )
        except (ValueError, OSError) as error:
            raise missing(f"the config of {self.asked.name} cannot be read: {first_line(error)}") from error
        return config

    def _with_weights(self, cls: Any) -> nn.Module:
        settings = {"attn_implementation": self.asked.attention} if self.asked.attention else {}
        if self.asked.trust_remote_code:
            settings["trust_remote_code"] = True  # type: ignore[assignment]
        try:
            model: nn.Module = cls.from_pretrained(self.asked.name, local_files_only=True, **settings)
        except (OSError, ValueError) as error:
            raise missing(
                f"the weights of {self.asked.name} cannot be loaded: {first_line(error)}",
                fix="--tiny takes the config alone; `hf download` fetches the weights",
            ) from error
        return model

    def _random(self, cls: Any, config: PreTrainedConfig) -> nn.Module:
        from fxschedule.cli.tiny.small_configs import shrink

        written = shrink(config.to_dict()) if self.asked.tiny else config.to_dict()
        settings = {"attn_implementation": self.asked.attention} if self.asked.attention else {}
        torch.manual_seed(0)
        try:
            model: nn.Module = cls._from_config(type(config).from_dict(written), **settings)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise missing(
                f"no {'tiny ' * self.asked.tiny}{cls.__name__} can be built: {first_line(error)}",
                fix="leave --tiny out" if self.asked.tiny else "save a model to a folder, and name that",
            ) from error
        return model


def _default_config(name: str) -> PreTrainedConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    if name not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(name.rpartition("/")[2], CONFIG_MAPPING_NAMES, n=3)
        alike = f"; model types alike: {', '.join(near)}" if near else ""
        raise missing(
            f"{name!r} is not a folder, a model in the local cache or a model type of transformers; "
            "nothing is downloaded",
            fix=f"`hf download {name}` first, or name a folder, a model type or module:factory{alike}",
        )
    config: PreTrainedConfig = CONFIG_MAPPING[name]()
    return config


def _model_class(config: PreTrainedConfig) -> Any:
    """Return the architecture class named in the config, else the first of transformers' classes for it."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    remote = [name for name in getattr(config, "auto_map", ()) if name.startswith("AutoModel")]
    if remote:
        return getattr(transformers, remote[0])
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING", {}) for head in _HEADS]
    for mapping in (*mappings, modeling_auto.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise missing(f"transformers has no model for {type(config).__name__}", fix="name the model that holds this part")
