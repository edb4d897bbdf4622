"""Containers and leaves of the arguments and results of a forward, and the metadata of tensors.

Lists, tuples, named tuples, mappings (such as ``ModelOutput``), dataclasses and slices are containers, and are rebuilt
with the same type. Everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from schedule.util.errors import NotApplicable

# -- Metadata of tensors ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a recorded tensor, without data.

    Attributes:
        shape: sizes seen in the recorded run, such as ``(2, 16, 768)``.
        dtype: element type.
        device: its device.
        requires_grad: whether it required gradients.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of ``tensor``.

        Raises:
            NotApplicable: it is a nested tensor, whose rows differ in size, or a quantized one.
        """
        if tensor.is_nested:
            raise NotApplicable("a nested tensor has no one shape to follow", fix="pad it: tensor.to_padded_tensor(0)")
        if tensor.is_quantized:
            raise NotApplicable(
                "a quantized tensor cannot be traced without data", fix="dequantize it before the model"
            )
        return cls(tuple(int(n) for n in tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.itemsize


# -- Containers and leaves of the arguments and results of a forward ----------------------------------------


Path = tuple[tuple[str, Any], ...]


def is_dataclass_value(value: Any) -> bool:
    """Check whether ``value`` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_plain_mapping(value: Any) -> bool:
    """Check whether ``value`` can be rebuilt from its items: a dict, or one that is a dataclass (``ModelOutput``)."""
    return type(value) is dict or (isinstance(value, dict) and is_dataclass_value(value)) or _is_ordered(value)


def _is_ordered(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value).__name__ in ("OrderedDict", "mappingproxy", "BatchEncoding")


def is_plain_dataclass(value: Any) -> bool:
    """Check whether ``value`` is a dataclass without other state than its fields."""
    if not is_dataclass_value(value) or isinstance(value, (torch.nn.Module, TensorSpec)):
        return False
    fields = type(value).__dataclass_fields__  # a placeholder would note a read of its object
    return not hasattr(type(value), "__post_init__") and vars(value).keys() == fields.keys()


def map_structure(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Rebuild ``value`` with ``leaf`` applied to each leaf."""
    if isinstance(value, (list, tuple)):
        return rebuilt_sequence(value, [map_structure(item, leaf) for item in value])
    if is_plain_mapping(value):
        items = {key: map_structure(item, leaf) for key, item in value.items()}
        beside = {name: map_structure(each, leaf) for name, each in attributes_beside(value).items()}
        return rebuilt_mapping(type(value), items, beside)
    if isinstance(value, slice):
        return slice(*(map_structure(item, leaf) for item in (value.start, value.stop, value.step)))
    if is_plain_dataclass(value):
        fields = {f.name: map_structure(getattr(value, f.name), leaf) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return leaf(value)


def attributes_beside(value: Any) -> dict[str, Any]:
    """Return the fields of a plain mapping that is a dataclass whose values are not its items of these names.

    What a ``ModelOutput`` is given after it was made may be in one of both alone: before transformers 5.24 a field that
    was None became an attribute without an item.
    """
    if not is_dataclass_value(value):
        return {}
    fields = type(value).__dataclass_fields__.values()
    held = {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}
    return {
        f.name: held[f.name]
        for f in fields
        if f.name in held and held[f.name] is not dict.get(value, f.name, f.default)
    }


def is_as_constructed(value: Any) -> bool:
    """Check whether a plain mapping has the items, in that order, which its class makes of them."""
    if not is_dataclass_value(value):
        return True
    return [*value] == [name for name in value.__dataclass_fields__ if name in value] and not attributes_beside(value)


def rebuilt_mapping(cls: Any, items: dict[Any, Any], beside: dict[str, Any]) -> Any:
    """Return a plain mapping of class ``cls``.

    Args:
        cls: its class.
        items: its items, in their order.
        beside: its attributes that are not among them, as :func:`attributes_beside` returns them.
    """
    if cls is dict:
        return items
    if not hasattr(cls, "__dataclass_fields__"):
        return cls(items)
    fields, others = constructor_arguments(cls, items, beside)
    made: Any = cls(**fields)
    return with_items(made, (*items,), others) if others or [*made] != [*items] else made


def constructor_arguments(
    cls: Any, items: dict[Any, Any], beside: dict[str, Any]
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return the fields of a mapping that is a dataclass of type ``cls``, and the items that are not its fields."""
    own = {key for key in items if key in cls.__dataclass_fields__ and key not in beside}
    fields = {**{key: items[key] for key in items if key in own}, **beside}
    return fields, {key: item for key, item in items.items() if key not in own}


def with_items(mapping: Any, keys: tuple[Any, ...], others: dict[Any, Any]) -> Any:
    """Return ``mapping`` with items of these keys, in this order (graph target).

    Args:
        mapping: one that was just constructed.
        keys: what it then holds. Items that are not among ``others`` are its attributes.
        others: the items that are not its attributes.
    """
    base: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict  # without the checks of its class
    base.clear(mapping)
    for key in keys:
        base.__setitem__(mapping, key, others[key] if key in others else getattr(mapping, key))
    return mapping


def rebuilt_sequence(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        return items
    if isinstance(value, torch.Size) and all(type(item) is int for item in items):
        return torch.Size(items)
    if isinstance(value, torch.Size) or type(value) is tuple:
        return tuple(items)
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)  # torch.return_types


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each leaf of ``value`` with its path, of steps ``("[]", key)`` and ``(".", name)``."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, ("[]", index)))
    elif is_plain_mapping(value):
        for key, item in value.items():
            yield from leaves(item, (*path, ("[]", key)))
        for name, each in attributes_beside(value).items():
            yield from leaves(each, (*path, (".", name)))
    elif is_plain_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), (*path, (".", field.name)))
    else:
        yield path, value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor among the leaves of ``value``."""
    for _, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def module_source(path: str) -> str:
    """Return Python source for the submodule of ``self`` at ``path``. The empty path is ``self``."""
    return "self" + "".join(f"._modules[{part!r}]" for part in path.split(".") if part)


def member_source(base: str, name: str) -> str:
    """Return Python source for an attribute of any name, given the source of its owner."""
    plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    return f"{base}.{name}" if plain else f"getattr({base}, {name!r})"


def literal(value: Any) -> str:
    """Return Python source for a number, string, flag, dtype or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


def map_fields(value: Any, function: Callable[[str, Any], Any]) -> Any:
    """Rebuild a dataclass with ``function(field name, field value)``."""
    fields = {name: function(name, getattr(value, name)) for name in value.__dataclass_fields__}
    return type(value)(**fields)


def original_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the user's class of ``module``, also if it is scheduled or its class was swapped since."""
    cls = type(module)
    if (original := vars(cls).get("_schedule_original")) is not None:
        return original
    state = object.__getattribute__(module, "__dict__").get("_schedule_state")
    if state is not None and generated_class(cls, state.module_class) is not None:
        found: type[torch.nn.Module] = state.module_class
        return found
    return cls


def generated_class(cls: type, original: type) -> type | None:
    """Return the generated class of ``original`` among the bases of ``cls``, or None."""
    return next((each for each in cls.__mro__ if vars(each).get("_schedule_original") is original), None)
