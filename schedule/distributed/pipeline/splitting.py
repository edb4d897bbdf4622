"""Splitting of a traced forward into pipeline stages.

A stage sends tensors only to the next one; tensors needed by a later stage are forwarded by the stages in between.
Values that depend only on the inputs of the model and on no parameter (masks, positions, rotary angles, sizes) are
computed on every stage that needs them, since every rank has the batch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from schedule.capture import (
    REGION_FUNCTIONS,
    Specialization,
    TensorSpec,
    check_output,
    device_condition,
    end_region,
    pack_graph,
    unpack_graph,
)
from schedule.distributed.pipeline.purity import is_repeatable, may_draw
from schedule.patterns.hazards import Hazards
from schedule.util.errors import NotApplicable
from schedule.util.tensors import tensor_at


@dataclass(frozen=True)
class StageGraph:
    """Graph of one stage.

    Attributes:
        graph: its placeholders are ``received``, then ``inputs``.
        received: names of the values sent by the previous stage.
        inputs: placeholders of the whole graph read by this stage.
        sent: names of the values sent to the next stage; empty for the last stage, which returns the whole output.
    """

    graph: fx.Graph
    received: tuple[str, ...]
    inputs: tuple[str, ...]
    sent: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules called by this stage."""
        return tuple(dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "call_module"))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Paths of the parameters and buffers read directly by this stage."""
        return tuple(dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "get_attr"))


def split(graph: fx.Graph, cuts: Sequence[str], root: nn.Module) -> list[StageGraph]:
    """Split ``graph`` into stages after the modules at the paths ``cuts``, in the order of their calls.

    Raises:
        NotApplicable: a cut is called more than once or not at all, a stage would have no parameters, or a value that
            is not a tensor would have to be sent.
    """
    return _Splitting(graph, cuts, root).stages()


def _in_region(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes in a block, such as ``autocast``, that changes what they compute."""
    found: set[fx.Node] = set()
    depth = 0
    for node in graph.nodes:
        if node.target in REGION_FUNCTIONS:
            depth += -1 if node.target is end_region else 1
        elif depth:
            found.add(node)
    return found


class _Splitting:
    def __init__(self, graph: fx.Graph, cuts: Sequence[str], root: nn.Module) -> None:
        self.graph, self.modules = graph, dict(root.named_modules(remove_duplicate=False))
        self.root, self.hazards = root, Hazards(self.modules)
        self.stage = self._stages_of(cuts)
        self.count = len(cuts) + 1
        self._free: dict[fx.Node, bool] = {}
        self._in_region = _in_region(graph)

    # -- where each node is computed ---------------------------------------------------------------------------

    def _stages_of(self, cuts: Sequence[str]) -> dict[fx.Node, int]:
        calls: dict[str, list[fx.Node]] = {path: [] for path in cuts}
        for node in self.graph.nodes:
            if node.op == "call_module" and node.target in calls:
                calls[str(node.target)].append(node)
        for path, nodes in calls.items():
            if not nodes:
                raise NotApplicable(
                    f"the forward of the root does not call {path}",
                    fix="cut after a module that every forward calls",
                )
            if len(nodes) > 1:
                raise NotApplicable(
                    f"{path} is called {len(nodes)} times: the cut would be inside a loop",
                    node=nodes[0],
                    fix="cut after a module that is called once",
                )
        ends = {nodes[0] for nodes in calls.values()}
        stage, found = 0, {}
        for node in self.graph.nodes:
            found[node] = stage
            if node.target in (operator.getitem, check_output) and isinstance(node.args[0], fx.Node):
                found[node] = found[node.args[0]]  # what is in an output is looked at where it is made
            if node in ends:
                stage += 1
        return found

    def is_free(self, node: fx.Node) -> bool:
        """Check whether every stage can compute ``node`` itself from the inputs, without parameters."""
        if node not in self._free:
            alone = node not in self._in_region and self._computed_freely(node)
            self._free[node] = alone and all(map(self.is_free, node.all_input_nodes))
        return self._free[node]

    def _computed_freely(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return not isinstance(tensor_at(self.root, str(node.target)), nn.Parameter)
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            repeatable = is_repeatable(module, True) and not may_draw(module)
            return repeatable and not any(True for _ in module.parameters())
        return node.op != "output" and self._is_pure(node)

    def _is_pure(self, node: fx.Node) -> bool:
        return self.hazards.effects(node).pure and not any(
            not self.hazards.effects(user).pure and node in self.hazards.effects(user).mutates for user in node.users
        )

    # -- what goes between -------------------------------------------------------------------------------------

    def stages(self) -> list[StageGraph]:
        """Return one graph per stage."""
        wanted: list[dict[fx.Node, None]] = [{} for _ in range(self.count)]  # from earlier stages
        for number in range(self.count):
            for node in self.graph.nodes:
                if self.stage[node] == number and not self.is_free(node):
                    for source in node.all_input_nodes:
                        self._want(source, number, wanted[number])
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        received: list[list[fx.Node]] = []
        for number in range(self.count):
            through = {n for later in wanted[number:] for n in later if self.stage[n] < number}
            received.append(sorted(through, key=order.__getitem__))
        made = [
            self._written(i, received[i], received[i + 1] if i + 1 < self.count else None) for i in range(self.count)
        ]
        for number, stage in enumerate(made):
            self._refuse_empty(number, stage)
        return made

    def _want(self, node: fx.Node, number: int, wanted: dict[fx.Node, None]) -> None:
        """Add to ``wanted`` the values stage ``number`` must receive to read ``node``."""
        if self.is_free(node) or self.stage[node] >= number:
            return
        if isinstance(node.meta.get("spec"), TensorSpec):
            wanted[node] = None
        elif node.op in ("call_function", "call_method") and self._is_pure(node):
            for source in node.all_input_nodes:  # a size: computed again from the tensor it is of
                self._want(source, number, wanted)
        else:
            raise NotApplicable(
                f"{node.name} is not a tensor and would go from stage {self.stage[node]} to stage {number}",
                node=node,
                fix="cut elsewhere; with a transformers model, give use_cache=False with the example inputs",
            )

    def _written(self, number: int, received: Sequence[fx.Node], sent: Sequence[fx.Node] | None) -> StageGraph:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in received:
            copies[node] = graph.placeholder(f"received_{node.name}")
            copies[node].meta.update(node.meta)
        needed = self._needed(number, set(received))
        inputs = [node for node in self.graph.nodes if node.op == "placeholder" and node in needed]
        for node in inputs:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for node in self.graph.nodes:
            if node in copies or node.op == "output" or node not in needed:
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if sent is None:
            (end,) = (node for node in self.graph.nodes if node.op == "output")
            graph.output(fx.node.map_arg(end.args[0], copies.__getitem__))
        else:
            graph.output(tuple(copies[node] for node in sent))
        graph.lint()
        names = tuple(node.name for node in received), tuple(str(node.target) for node in inputs)
        return StageGraph(graph, *names, tuple(node.name for node in sent or ()))

    def _needed(self, number: int, received: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes computed by stage ``number``: its own nodes and their inputs not received."""
        own = [node for node in self.graph.nodes if self.stage[node] == number and not self.is_free(node)]
        needed, pending = set(own), list(own)
        while pending:
            for source in pending.pop().all_input_nodes:
                if source not in needed and source not in received:
                    needed.add(source)
                    pending.append(source)
        return needed

    def _refuse_empty(self, number: int, stage: StageGraph) -> None:
        reads = any(isinstance(tensor_at(self.root, path), nn.Parameter) for path in stage.tensors)
        if reads or any(True for path in stage.modules for _ in self.modules[path].parameters()):
            return
        raise NotApplicable(
            f"stage {number} of {self.count} would have no parameters",
            where=f"it calls {', '.join(stage.modules) or 'no module'}",
            fix="cut earlier or later",
        )


def on_device(made: Specialization, device: torch.device) -> Specialization:
    """Convert a forward traced on the meta device to ``device``, or return any other forward unchanged."""
    name, first = next(iter(made.signature.tensors.items()), ("", None))
    if first is None or first.device.type != "meta":
        return made
    graph = unpack_graph(pack_graph(made.graph))
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda v: _moved(v, device))
    traced, here = (device_condition(name, each) for each in ("meta", device.type))
    conditions = [here if each == traced else each for each in made.signature.conditions]
    conditions.append(f"not torch.is_autocast_enabled({device.type!r})")
    return replace(made, graph=graph, signature=replace(made.signature, conditions=conditions))


def _moved(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) and value.type == "meta" else value


def state_of_stages(root: nn.Module, stages: Sequence[StageGraph]) -> Mapping[str, Any]:
    """Path → module or tensor of ``root`` that the stages use."""
    return {
        **{path: root.get_submodule(path) for stage in stages for path in stage.modules},
        **{path: tensor_at(root, path) for stage in stages for path in stage.tensors},
    }
