"""One gradient reduction for several column-parallel modules with the same input.

Llama's q, k and v projections each have a partial gradient of the same ``hidden_states``. Adding the three first and
reducing the sum once needs a third of the communication, so the module that calls them reduces the gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from schedule.capture import Specialization, original_class
from schedule.core.edits import SetState
from schedule.core.wrapping import rewrapped, wrappers_of
from schedule.distributed.tensor_parallel.sharded_modules import COLUMN, sharding_of
from schedule.runtime.scheduled import install
from schedule.util.errors import ShardError


def shared_inputs(
    caller: nn.Module, whole: Specialization, is_column: Callable[[nn.Module], bool]
) -> dict[str, list[str]]:
    """Return the arguments of ``caller`` read only by its column-parallel modules: name → paths of the modules.

    Args:
        caller: the calling module.
        whole: its forward, traced before any module was sharded.
        is_column: returns whether a module is column-parallel.

    Raises:
        ShardError: a column-parallel module does not read an argument directly, an argument has other users too,
            or a module reduces its own gradient already.
    """
    names: dict[str, list[str]] = {}
    for node in whole.graph.nodes:
        if not _is_column(node, caller, is_column):
            continue
        source = node.all_input_nodes[0]
        text = whole.signature.inputs.get(str(source.target), "") if source.op == "placeholder" else ""
        if text not in inspect.signature(original_class(caller).forward).parameters:
            raise ShardError(
                f"{node.target} does not read an argument of this module as it is",
                where=node.format_node() or "",
                fix=f'sync("bwd_post", "all_reduce") {node.target} itself',
            )
        _check_users(source, caller, is_column)
        names.setdefault(text, []).append(str(node.target))
    return names


def check_columns(caller: nn.Module) -> None:
    """Raise a :class:`ShardError` if ``caller`` contains no column-parallel module."""
    if not any(_has_column_role(child) for child in caller.modules()):
        raise ShardError(
            "it calls no column-parallel module, so there is no partial gradient",
            fix="shard the projections in it first",
        )


def _has_column_role(child: nn.Module) -> bool:
    sharding = sharding_of(child)
    return sharding is not None and sharding.role(child) == COLUMN


def _is_column(node: fx.Node, caller: nn.Module, is_column: Callable[[nn.Module], bool]) -> bool:
    return node.op == "call_module" and is_column(caller.get_submodule(str(node.target)))


def _check_users(source: fx.Node, caller: nn.Module, is_column: Callable[[nn.Module], bool]) -> None:
    for user in source.users:
        if user.target is getattr:  # its shape or dtype
            continue
        if not _is_column(user, caller, is_column):
            raise ShardError(
                f"{source.target} is used by {user.name} as well, whose gradient is not a partial sum",
                where=user.format_node() or "",
                fix="shard all of its users along their outputs, or sync each projection itself",
            )
        child = caller.get_submodule(str(user.target))
        sharding = sharding_of(child)
        if sharding is not None and sharding.reduces_gradients(child):
            raise ShardError(f"{user.target} synchronizes its own input already", fix="undo that, or leave this out")


class WrapForward(SetState):
    """Edit to replace the fallback forward of a module. Its graphs are traced from the new forward."""

    def __init__(self, module: nn.Module, make: Callable[[], Callable[..., Any]], name: str) -> None:
        super().__init__(module)
        self.make, self.name = make, name

    def install(self) -> None:
        """Install the forward and keep its wrappers, such as a checkpoint."""
        install(self.module, (), self.name, rewrapped(self.make(), wrappers_of(self.module)))
