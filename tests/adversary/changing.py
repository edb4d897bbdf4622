"""State that code in a call changes: reads of it in a forward, and the changes."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import install

GAIN = 2.0


class Settings:
    """Settings, as in a config."""

    def __init__(self) -> None:
        self.gain, self.gains, self.by_name = 2.0, [2.0, 3.0], {"gain": 2.0}


class Child(nn.Module):
    """A submodule that may change the state of its parent, which it holds outside of its submodules."""

    def __init__(self, holder: list[Any]) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.holder, self.change = holder, None

    def forward(self, x: Tensor) -> Tensor:
        if self.change is not None:
            self.change(self.holder[0])
        return self.proj(x)


Read = Callable[[Any], Any]


class Parent(nn.Module):
    """A forward that reads ``before`` and ``after`` the call of its child."""

    def __init__(self, before: Read, after: Read) -> None:
        super().__init__()
        self.before, self.after, self.config, self.gain = before, after, Settings(), 2.0
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("table", torch.ones(2))
        self.child = Child([self])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        early = self.before(self)
        y = self.child(x * early)
        return self.last(torch.tanh(y * self.after(self)))


def nothing(m: Any) -> float:
    return 1.0


def of_attribute(m: Any) -> Any:
    return m.gain


def of_config(m: Any) -> Any:
    return m.config.gain


def of_list(m: Any) -> Any:
    return m.config.gains[0]


def of_length(m: Any) -> Any:
    return len(m.config.gains)


def of_dict(m: Any) -> Any:
    return m.config.by_name["gain"]


def of_global(m: Any) -> Any:
    return GAIN


def of_presence(m: Any) -> Any:
    return 3.0 if hasattr(m, "extra") else 2.0


def of_training(m: Any) -> Any:
    return 3.0 if m.last.training else 2.0


def set_attribute(m: Any) -> None:
    m.gain = 5.0


def set_config(m: Any) -> None:
    m.config.gain = 5.0


def replace_config(m: Any) -> None:
    m.config = Settings()
    m.config.gain, m.config.gains, m.config.by_name = 7.0, [7.0], {"gain": 7.0}


def set_item(m: Any) -> None:
    m.config.gains[0] = 5.0


def append(m: Any) -> None:
    m.config.gains.append(5.0)


def set_entry(m: Any) -> None:
    m.config.by_name["gain"] = 5.0


def set_global(m: Any) -> None:
    sys.modules[__name__].GAIN = 5.0  # type: ignore[attr-defined]


def add_attribute(m: Any) -> None:
    m.extra = True


def set_training(m: Any) -> None:
    m.last.training = not m.last.training


def of_gradient(m: Any) -> Any:
    return 3.0 if m.last.weight.requires_grad else 2.0


def of_text_of_gradient(m: Any) -> Any:
    return len(str(m.last.weight.requires_grad))


def of_size(m: Any) -> Any:
    return 3.0 if m.table.shape[0] > 3 else 2.0


def set_gradient(m: Any) -> None:
    m.last.weight.requires_grad_(False)


def set_table(m: Any) -> None:
    m.table = torch.ones(7)


def resize_table(m: Any) -> None:
    m.table.data = torch.ones(7)


class Common:
    """State of a class."""

    gain = 2.0
    by_name: dict[str, float] = {"gain": 2.0}  # noqa: RUF012

    @staticmethod
    def static() -> float:
        return 2.0


def _closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    gain = 2.0

    def put(value: float) -> None:
        nonlocal gain
        gain = value

    return lambda: gain, put


held, put_held = _closure()


SETTINGS: Any = types.ModuleType("adversary_settings")
SETTINGS.gain = 2.0


def five() -> float:
    return 5.0


def two() -> float:
    return 2.0


def of_class(m: Any) -> Any:
    return Common.gain


def of_dict_of_class(m: Any) -> Any:
    return Common.by_name["gain"]


def of_static_method(m: Any) -> Any:
    return Common.static()


def of_closure(m: Any) -> Any:
    return held()


def of_code(m: Any) -> Any:
    return two()


def of_grad_mode(m: Any) -> Any:
    return 2.0 if torch.is_grad_enabled() else 5.0


def of_default_dtype(m: Any) -> Any:
    return 2.0 if torch.get_default_dtype() is torch.float32 else 5.0


def of_determinism(m: Any) -> Any:
    return 5.0 if torch.are_deterministic_algorithms_enabled() else 2.0


def of_python_module(m: Any) -> Any:
    return SETTINGS.gain


def set_python_module(m: Any) -> None:
    SETTINGS.gain = 5.0


def set_class(m: Any) -> None:
    Common.gain = 5.0


def set_dict_of_class(m: Any) -> None:
    Common.by_name["gain"] = 5.0


def set_static_method(m: Any) -> None:
    Common.static = staticmethod(five)  # type: ignore[method-assign]


def set_closure(m: Any) -> None:
    put_held(5.0)


def set_code(m: Any) -> None:
    two.__code__ = five.__code__


def set_grad_mode(m: Any) -> None:
    torch.set_grad_enabled(False)


def set_default_dtype(m: Any) -> None:
    torch.set_default_dtype(torch.float64)


def set_determinism(m: Any) -> None:
    torch.use_deterministic_algorithms(True)


OUTSIDE: list[tuple[Read, Callable[[Any], None]]] = [
    (of_class, set_class),
    (of_dict_of_class, set_dict_of_class),
    (of_static_method, set_static_method),
    (of_closure, set_closure),
    (of_code, set_code),
    (of_grad_mode, set_grad_mode),
    (of_default_dtype, set_default_dtype),
    (of_determinism, set_determinism),
    (of_python_module, set_python_module),
]
"""Changes of what does not belong to the module."""

CHANGES: list[tuple[Read, Callable[[Any], None]]] = [
    (of_attribute, set_attribute),
    (of_config, set_config),
    (of_config, replace_config),
    (of_list, set_item),
    (of_list, replace_config),
    (of_length, append),
    (of_dict, set_entry),
    (of_global, set_global),
    (of_presence, add_attribute),
    (of_training, set_training),
    (of_gradient, set_gradient),
    (of_text_of_gradient, set_gradient),
    (of_size, set_table),
    (of_size, resize_table),
    *OUTSIDE,
]


def set_global_by_name(m: Any) -> None:
    global GAIN
    GAIN = 5.0


_STATIC, _CODE = vars(Common)["static"], two.__code__


def put_back() -> None:
    """Put back what changes outside of modules have changed."""
    sys.modules[__name__].GAIN = 2.0  # type: ignore[attr-defined]
    Common.gain, Common.by_name["gain"], two.__code__ = 2.0, 2.0, _CODE
    Common.static = _STATIC  # type: ignore[method-assign]
    SETTINGS.gain = 2.0
    put_held(2.0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def traced(before: Read, after: Read) -> tuple[Parent, Parent, Tensor]:
    """Return a model with graphs for itself alone, an untouched copy, and an input."""
    torch.manual_seed(0)
    module = Parent(before, after)
    return module, *running_graphs(module)


def running_graphs(module: nn.Module) -> tuple[Any, Tensor]:
    """Give ``module`` graphs for itself alone, and return an untouched copy and an input."""
    x, twin = torch.randn(2, 4), copy.deepcopy(module)
    sch = schedule.create_schedule(module, (x,))
    sch.trace()
    install(module, sch.specializations)
    torch.testing.assert_close(module(x), twin(x))
    return twin, x
