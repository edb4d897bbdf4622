"""Objects that a forward hands to a submodule, found in attributes of modules and of the objects there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

import schedule
from schedule.runtime.scheduled import install, state_of


class Settings:
    """A setting, as a part of a config has it."""

    def __init__(self, gain: float) -> None:
        self.gain = gain


class Config:
    """A config with others in it."""

    def __init__(self) -> None:
        self.text = Settings(2.0)
        self.layers = [Settings(3.0), Settings(5.0)]
        self.by_name = {"vision": Settings(7.0)}

    @property
    def main(self) -> Settings:
        return self.text

    @functools.cached_property
    def kept(self) -> Settings:
        return Settings(13.0)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, settings: Settings) -> Tensor:
        return self.proj(x) * settings.gain


class Parent(nn.Module):
    def __init__(self, find: Callable[[Any], Settings]) -> None:
        super().__init__()
        self.config, self.child, self.find = Config(), Child(), find

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(x, self.find(self)))


def of_attribute(m: Any) -> Settings:
    return m.config.text  # type: ignore[no-any-return]


def of_property(m: Any) -> Settings:
    return m.config.main  # type: ignore[no-any-return]


def of_list(m: Any) -> Settings:
    return m.config.layers[1]  # type: ignore[no-any-return]


def of_dict(m: Any) -> Settings:
    return m.config.by_name["vision"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("find", [of_attribute, of_property, of_list, of_dict])
@pytest.mark.parametrize("flatten", [False, True])
def test_the_graph_reads_the_object_at_each_call(find: Callable[[Any], Settings], flatten: bool) -> None:
    module, x = Parent(find), torch.randn(2, 4)
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, (x,))
    sch.trace(flatten=flatten)
    install(module, sch.specializations)

    def compare(one: nn.Module, other: nn.Module, missed: int) -> None:
        before = state_of(one).fallbacks  # type: ignore[union-attr]
        torch.testing.assert_close(one(x), other(x))
        assert state_of(one).fallbacks - before == missed  # type: ignore[union-attr]

    compare(module, twin, 0)
    compare(copy.deepcopy(module), twin, 0)  # a copy has a config of its own
    for each in (module, twin):
        each.config = Config()
    compare(module, twin, 0)
    for each in (module, twin):
        find(each).gain = 11.0
    compare(module, twin, int(flatten))  # a child that stays a call reads the number itself


class WithDefault(Config):
    """A config whose class has what an instance may lack."""

    text = Settings(17.0)


def remove(m: Any, name: str) -> None:
    vars(m.config).pop(name, None)


@pytest.mark.parametrize(("find", "name"), [(of_attribute, "text"), (lambda m: m.config.kept, "kept")])
@pytest.mark.parametrize("called_before", [False, True])
def test_what_is_no_longer_there_is_not_read(find: Callable[[Any], Settings], name: str, called_before: bool) -> None:
    module, x = Parent(find), torch.randn(2, 4)
    module.config = WithDefault()
    twin = copy.deepcopy(module)
    if called_before:
        module(x)
    sch = schedule.create_schedule(module, (x,))
    sch.trace()
    install(module, sch.specializations)
    for _ in range(2):
        torch.testing.assert_close(module(x), twin(x))
        for each in (module, twin):
            remove(each, name)


class Cached(nn.Module):
    """Makes a cache from a part of its config, and changes it before a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.proj = Settings(2.0), nn.Linear(4, 4)
        self.config.text_config = PreTrainedConfig(num_hidden_layers=1)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        cache = DynamicCache(config=self.config.text_config)  # type: ignore[attr-defined]
        key, _ = cache.update(self.proj(x)[:, None], x[:, None], 0)
        return torch.tanh(key) if (x > -100).all() else key


def test_a_cache_made_of_a_config_found_so_is_local() -> None:
    """What is done to it before a check may be done again, so the graph may have one."""
    module, x = Cached(), torch.randn(2, 3, 4)
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, (x,))
    sch.trace(flatten=True)
    install(module, sch.specializations)
    for given in (x, x - 200):
        torch.testing.assert_close(module(given), twin(given))
