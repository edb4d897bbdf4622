"""``annotate``: tags on parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from schedule.core.edits import SetItem
from schedule.core.history import Edit
from schedule.primitives.registry import primitive
from schedule.util.errors import NotApplicable, did_you_mean

if TYPE_CHECKING:
    from schedule.core.node import NodeT, Tree


@primitive
def annotate(sch: NodeT, name: str, key: str, value: Any) -> NodeT:
    """Tag a parameter or buffer with an attribute, for optimizers and later primitives to read.

    ::

        sch["fc1"].annotate("weight", "decay", 0.0)      →  fc1.weight.decay == 0.0

    The tag belongs to the path: a parameter that replaces this one, by ``replace`` or ``shard``, gets it too.

    Args:
        name: of the parameter or buffer, relative to this module.
        key: attribute name.

    Raises:
        NotApplicable: there is no such parameter, or tensors have an attribute ``key`` themselves.
    """
    owner_path, _, own_name = name.rpartition(".")
    tensor = getattr(sch.at(owner_path).module, own_name, None)
    if not isinstance(tensor, torch.Tensor):
        names = [n for n, _ in sch.module.named_parameters()]
        near = did_you_mean(name, names)
        raise NotApplicable(
            f"{sch.label} has no parameter or buffer {name!r}", fix=near or f"it has {', '.join(names[:8]) or 'none'}"
        )
    if not key.isidentifier() or hasattr(torch.nn.Parameter, key):
        raise NotApplicable(
            f"{key!r} cannot be a tag: tensors have an attribute of that name, or it is not a name",
            fix='a name of your own, such as "weight_decay"',
        )
    path = f"{sch.path}.{name}".lstrip(".")
    annotations = sch.tree.annotations
    sch.commit(
        [SetItem(lambda: annotations, (path, key), value), SetItem(lambda: vars(tensor), key, value)],
    )
    return sch


def tags_carried(tree: Tree, path: str, tensor: torch.Tensor) -> list[Edit]:
    """Return the edits to tag ``tensor`` like the parameter at ``path`` it replaces."""
    return [
        SetItem(lambda: vars(tensor), key, value) for (tagged, key), value in tree.annotations.items() if tagged == path
    ]
