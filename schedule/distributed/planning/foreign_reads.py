"""Parameters read by code other than that of their module, such as a convolution's weight passed to a kernel."""

from __future__ import annotations

from dataclasses import replace

from torch import fx, nn

from schedule.distributed.planning.factored_values import Propagated
from schedule.distributed.planning.plan_steps import ShardStep
from schedule.distributed.tensor_parallel.parameters import owners
from schedule.util.tensors import tensor_at


class Reads:
    """Parameters and buffers that the code of a module reads, and the paths of these modules.

    Args:
        found: the propagated dimensions of a flattened graph.
        root: the module at which its paths begin.

    Attributes:
        tensors: ids of all tensors that are read.
    """

    def __init__(self, found: Propagated, root: nn.Module) -> None:
        self.root = root
        nodes = [node.fx for node in found.nodes if node.fx is not None]
        self._called = {str(node.target) for node in nodes if node.op == "call_module"}
        self._nodes: dict[int, list[fx.Node]] = {}
        for node in nodes:
            if node.op == "get_attr":
                self._nodes.setdefault(id(tensor_at(root, str(node.target))), []).append(node)
        self.tensors = frozenset(self._nodes)

    def located(self, step: ShardStep) -> ShardStep | None:
        """Return ``step`` as a step of the only module whose code reads the parameter, or itself if none reads it.

        Return None if several modules read it, if the parameter is tied, if the module that holds it is called, or if
        that module is not inside the one that reads it.
        """
        path = f"{step.path}.{step.name}"
        tensor = tensor_at(self.root, path)
        if id(tensor) not in self.tensors:
            return step
        users = [user for node in self._nodes[id(tensor)] for user in node.users]
        readers = {str(user.meta.get("module", "")) for user in users if user.op in ("call_function", "call_method")}
        passed = any(user.op not in ("call_function", "call_method") for user in users)
        if passed or len(readers) != 1 or step.path in self._called or len(owners(self.root, tensor)) != 1:
            return None
        reader = readers.pop()
        if step.replicas > 1 or step.common or not path.startswith(f"{reader}." if reader else ""):
            return None
        return replace(step, path=reader, name=path.removeprefix(f"{reader}."))
