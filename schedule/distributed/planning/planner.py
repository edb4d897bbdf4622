"""Search for a tensor-parallel plan in the traced graph alone.

Every unblocked factor of the model's dimensions (:mod:`~schedule.distributed.planning.propagation`) can be sharded over
the ranks at every location in the model. All weight axes with this factor, such as the heads of an attention or the
width of an MLP, form one *group*. The graph also determines the collectives of a group. An operation that sums over the
factor computes partial sums, which need an all-reduce in the forward pass. A tensor without the factor that is combined
with one that has it has partial gradients, which need an all-reduce in the backward pass. The planner uses no knowledge
of any architecture or of module names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn

from schedule.capture import Call, original_class, specialize
from schedule.distributed.planning.candidates import INNER, Candidate, candidates_of
from schedule.distributed.planning.factored_values import Layer, Propagated, nbytes
from schedule.distributed.planning.factors import Factor, factors
from schedule.distributed.planning.foreign_reads import Reads
from schedule.distributed.planning.gradients import differentiable, parameters_of, users_of
from schedule.distributed.planning.owned import holds, is_in_any, owners, synchronized
from schedule.distributed.planning.partial import NoReduction, PartialGradients
from schedule.distributed.planning.plan_data import Plan, common_path
from schedule.distributed.planning.plan_steps import FEATURES, HEADS, Group, ShardStep, SyncStep, steps_below
from schedule.distributed.planning.propagation import propagate
from schedule.distributed.planning.rehearsal import CannotRun, rehearse
from schedule.distributed.planning.vocabularies import Vocabularies
from schedule.distributed.tensor_parallel.callers import shared_inputs
from schedule.distributed.tensor_parallel.output_propagation import follow
from schedule.distributed.tensor_parallel.sharded_modules import COLUMN, OWN, ROW, projection_of, role_of, stays_call
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.util.errors import ShardError, TraceError
from schedule.util.tensors import tensor_at

ATTENDING = ("matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")


def find_plan(
    graph: fx.Graph, root: nn.Module, state: Sharded, vocabulary: bool = True, averages: bool = False
) -> Plan:
    """Return the plan for ``graph``, traced from ``root`` with its calls flattened.

    Args:
        graph: the graph.
        root: the module.
        state: the tensor-parallel state with the recorded run.
        vocabulary: whether to shard embeddings by rows, and projections onto the vocabulary.
        averages: whether norms may be over sharded features, their means averaged over the ranks.
    """
    return _Planner(propagate(graph, root, averages=averages), root, state).plan(vocabulary)


class _Planner:
    def __init__(self, found: Propagated, root: nn.Module, state: Sharded) -> None:
        self.found, self.root, self.state, self.ranks = found, root, state, state.tp.size
        self.layers = {layer.node: layer for layer in found.layers}
        self.differentiable = differentiable(found, root)
        self.taken: set[int] = set()  # parameters, by id: a tied one has several paths
        self.layered = {f"{layer.path}.{name}" for layer in found.layers for name in ("weight", "bias")}
        self.users = users_of(found)
        self.reads = Reads(found, root)

    def plan(self, vocabulary: bool) -> Plan:
        groups: list[Group] = []
        left: dict[str, str] = {}
        lookups = {id(tensor_at(self.root, f"{layer.path}.weight")) for layer in self.found.layers if layer.lookup}
        for candidate in sorted(candidates_of(self.found), key=lambda one: -self.worth(one)):
            paths = {path for path, _ in candidate.axes}
            tensors = {id(tensor_at(self.root, path)) for path in paths}
            if tensors & self.taken or tensors <= lookups:
                continue
            group = self.group(candidate)
            if group is None:
                if candidate.refused != INNER:
                    left.update(dict.fromkeys(paths, candidate.refused))
                continue
            self.taken |= tensors
            groups.append(group)
        if vocabulary:
            whole = self.taken | self.reads.tensors
            found = Vocabularies(self.found, self.root, self.ranks, self.users, self.differentiable, whole)
            groups += found.groups()
            self.taken |= found.taken
        return Plan(self.ranks, groups, self.whole(left))

    def worth(self, candidate: Candidate) -> float:
        """Return the sharded bytes for each all-reduce of the forward pass."""
        sums = sum(self.sums(node, candidate.factor) for node in (*self.found.contracted, *self.found.averaged))
        return sum(self.nbytes(path) for path, _ in candidate.axes) / max(sums, 1)

    def nbytes(self, path: str) -> int:
        tensor = tensor_at(self.root, path)
        return tensor.numel() * tensor.element_size()

    def group(self, candidate: Candidate) -> Group | None:
        """Return the group of a candidate, or None with the reason in ``candidate.refused``."""
        if candidate.refused or not self.divides(candidate):
            return None
        steps = self.shards(candidate)
        syncs = self.syncs(candidate) if steps is not None else None
        if steps is None or syncs is None:
            return None
        if not any(sync.mode == "fwd_post" for sync in syncs):
            candidate.refused = "nothing that is returned is made of it"
            return None
        name = common_path(step.path for step in steps) or "the root"
        return Group(name, candidate.factor.size, steps, syncs, self.kind(candidate.factor))

    def kind(self, factor: Factor) -> str:
        """Return the kind of group of ``factor``.

        It is ``HEADS`` if the output of a softmax, or the output and two activations of a product, have the factor.
        """
        for node in self.found.nodes:
            given = [one for one in operands(node.args) if one.op != "get_attr" and one.attr is None]
            products = node.op in ATTENDING and sum(self.holds(one, factor) for one in given) > 1
            if self.holds(node, factor) and (node.op in ("softmax", "log_softmax") or products):
                return HEADS
        return FEATURES

    def divides(self, candidate: Candidate) -> bool:
        size = candidate.factor.size
        if size % self.ranks == 0:
            return True
        if self.ranks % size == 0 and size > 1 and not candidate.common:
            return self.replicated(candidate, self.ranks // size)
        candidate.refused = f"{size} cannot be shared evenly by {self.ranks} ranks"
        return False

    def replicated(self, candidate: Candidate, replicas: int) -> bool:
        """Check whether a factor smaller than the number of ranks can be sharded with replicas.

        On an axis with a repeated factor after it, this one is sharded as well and must be divisible by ``replicas``.
        On the other axes, ``replicas`` ranks have the same shard.
        """
        for path, axis in candidate.axes:
            dim = factors(self.found.tensors[path][axis])
            at = dim.index(candidate.factor)
            following = dim[at + 1] if at + 1 < len(dim) else None
            if following is None or not following.repeated:
                candidate.replicas[path, axis] = replicas
            elif following.size % replicas:
                candidate.refused = f"{candidate.factor.size} × {following.size} cannot be shared by {self.ranks} ranks"
                return False
        return True

    def shards(self, candidate: Candidate) -> list[ShardStep] | None:
        """Return the shard steps of a candidate, or None with the reason in ``candidate.refused``."""
        steps = []
        for (path, axis), parts in candidate.axes.items():
            owner, _, name = path.rpartition(".")
            module, replicas = self.root.get_submodule(owner), candidate.replicas.get((path, axis), 1)
            role = role_of(module, name, axis)
            common = candidate.common.get((path, axis), 0)
            if role is None or ((replicas > 1 or common) and projection_of(module) is None):
                candidate.refused = f"{type(module).__name__} cannot split axis {axis} of its {name}"
                return None
            if sum(own == path for own, _ in candidate.axes) > 1:
                candidate.refused = f"it is on two axes of {path}"
                return None
            if (replicas > 1 or common) and role == ROW:
                candidate.refused = f"{path} would be summed over replicas"
                return None
            summed = self.nbytes(path) if replicas > 1 or common else 0
            step = ShardStep(owner, name, axis, parts, replicas, common, summed)
            located = step if role == OWN else self.reads.located(step)
            if located is None:
                candidate.refused = f"{path} is read by the code of another module"
                return None
            steps.append(located)
        candidate.refused = self.unfollowed(steps)
        return None if candidate.refused else steps

    def unfollowed(self, steps: list[ShardStep]) -> str:
        """Return the reason if sizes in the code of a caller cannot be adapted to the shards, otherwise ""."""
        callers: dict[nn.Module, dict[str, ShardStep]] = {}
        for step in steps:
            found = self.state.caller_of(step.path)
            if "." in step.name:
                callers.setdefault(self.root.get_submodule(step.path), {})
            elif found is not None and step.name == "weight" and self.role(step) == COLUMN:
                callers.setdefault(found[0], {})[found[1]] = step
        for caller, columns in callers.items():
            whole = self.state.whole_forward(caller)
            if isinstance(whole, TraceError):
                return f"sizes in {type(caller).__name__} cannot be followed: {whole.why}"
            how = [{p: getattr(s, n) for p, s in columns.items()} for n in ("parts", "replicas", "common")]
            try:
                settings = follow(whole.graph, caller, how[0], self.ranks, how[1], how[2], every=True)
                own = {name: here for name, (_, here) in settings.items()}
                below = steps_below(steps, self.state.tree.path_of(caller))
                rehearse(caller, whole, self.state.recording, below, own, self.ranks, whole.call)
            except CannotRun:  # another sharded module may give it its arguments, and it raises on every rank if not
                continue
            except ShardError as error:
                return error.why
        return ""

    def role(self, step: ShardStep) -> str | None:
        return role_of(self.root.get_submodule(step.path), step.name, step.axis)

    # -- collectives -------------------------------------------------------------------------------------

    def holds(self, value: Any, factor: Factor) -> bool:
        return holds(self.found, value, factor)

    def sums(self, node: OpNode, factor: Factor) -> bool:
        """Check whether ``node`` sums over the factor."""
        dims = (*self.found.contracted.get(node, ()), *self.found.averaged.get(node, ()))
        return any(factor in factors(dim) for dim in dims)

    def syncs(self, candidate: Candidate) -> list[SyncStep] | None:
        """Return the sync steps of a candidate, or None with the reason in ``candidate.refused``."""
        factor, columns, made = candidate.factor, dict[str, Layer](), dict[SyncStep, None]()
        partial: list[tuple[OpNode, OpNode]] = []
        owned = owners(self.root, candidate.axes)
        for node in self.found.nodes:
            if is_in_any(node, owned):
                continue
            layer = self.layers.get(node)
            if self.sums(node, factor):
                if layer is not None:
                    made[SyncStep(layer.path, "fwd_post", "all_reduce", nbytes=nbytes(node.spec))] = None
                else:
                    candidate.refused = f"{node.op} sums over it inside of a module's own code"
                    return None
            for operand in self.whole_operands(node, factor):
                if layer is not None and operand is layer.given:
                    columns[layer.path] = layer
                    continue
                parameters = parameters_of(self.found, self.users, self.differentiable, operand, factor)
                if parameters is not None and self.layered & set(parameters):
                    parameters = None
                if parameters is None:
                    partial.append((operand, node))
                made.update(dict.fromkeys(map(self.whole_parameter, parameters or ())))
        if partial or candidate.common:
            steps = self.reduced(factor, partial, columns)
            if isinstance(steps, str):
                candidate.refused = steps
                return None
            made.update(dict.fromkeys(steps))
        steps = self.all_synchronized(owned)
        if isinstance(steps, str):
            candidate.refused = steps
            return None
        return [*self.inputs(columns), *dict.fromkeys([*made, *steps])]

    def all_synchronized(self, owned: dict[str, dict[str, tuple[int, int]]]) -> list[SyncStep] | str:
        """Return the sync steps of modules computing with shards of their own parameters, or the first refusal."""
        found: list[SyncStep] = []
        for path, axes in owned.items():
            steps = self.synchronized(path, axes)
            if isinstance(steps, str):
                return f"{path}: {steps}"
            found += steps
        return found

    def whole_operands(self, node: OpNode, factor: Factor) -> list[OpNode]:
        """Return the replicated operands with a gradient if ``node`` is sharded, otherwise an empty list."""
        if not self.holds(node, factor):
            return []
        given = dict.fromkeys(operands(node.args))
        return [one for one in given if not self.holds(one, factor) and one in self.differentiable]

    def whole_parameter(self, path: str) -> SyncStep:
        owner, _, name = path.rpartition(".")
        return SyncStep(owner, "bwd_post", "all_reduce", argument=name, nbytes=self.nbytes(path))

    def reduced(
        self, factor: Factor, partial: list[tuple[OpNode, OpNode]], columns: dict[str, Layer]
    ) -> list[SyncStep] | str:
        """Return the all-reduces of the partial gradients of replicated values, or the reason for a refusal.

        Layers covered by these all-reduces are removed from ``columns``.
        """
        edges = {(layer.given, layer.node) for layer in columns.values()}
        moving, cut = self.differentiable, set(partial)
        try:
            found = PartialGradients(self.found, self.root, self.users, moving, factor, cut, edges).reductions()
        except NoReduction as error:
            return str(error)
        for path in [path for path, layer in columns.items() if layer.node in found.columns]:
            del columns[path]
        for path in found.parameters:
            if path in self.layered or not self.state.whole_calls.get(self.root.get_submodule(path.rpartition(".")[0])):
                return f"the gradient of {path} would be a partial sum in the code of another module"
        outputs = [(str(node.fx.target), nbytes(node.spec)) for node in found.modules if node.fx is not None]
        return [
            *(SyncStep(path, "bwd_pre", "all_reduce", nbytes=size) for path, size in outputs),
            *map(self.whole_parameter, found.parameters),
        ]

    def synchronized(self, path: str, axes: dict[str, tuple[int, int]]) -> list[SyncStep] | str:
        module, recording = self.root.get_submodule(path), self.state.whole
        if recording is None or not recording.calls.get(module):
            return "it was not called in the recorded run"
        call = recording.calls[module][0]

        def inlined(child: nn.Module, path: str) -> bool:
            return not stays_call(child)

        try:
            whole = specialize(module, original_class(module).forward, call, recording, False, inlined)
        except TraceError as error:
            return f"it cannot be traced: {error.why}"

        def rehearsed(call: Call) -> dict[fx.Node, Any]:
            shards = [ShardStep("", name, axis, parts) for name, (axis, parts) in axes.items()]
            return rehearse(module, whole, recording, shards, {}, self.ranks, call, inlined)

        try:
            return synchronized(path, module, whole, axes, self.ranks, rehearsed)
        except ShardError as error:
            return error.why

    def inputs(self, columns: dict[str, Layer]) -> Iterator[SyncStep]:
        """Yield the all-reduces of the input gradients of column-parallel layers.

        Layers that read the same argument of one caller share a single all-reduce.
        """
        callers: dict[str, list[str]] = {}
        for path in columns:
            found = self.state.caller_of(path)
            callers.setdefault("" if found is None else self.state.tree.path_of(found[0]), []).append(path)
        for caller, paths in callers.items():
            names = self.shared(caller, paths) if len(paths) > 1 else {}
            size = max(nbytes(columns[path].given.spec) for path in paths)
            for name in names:
                yield SyncStep(caller, "bwd_post", "all_reduce", argument=name, nbytes=size)
            if not names:
                for path in paths:
                    size = nbytes(columns[path].given.spec)
                    yield SyncStep(path, "bwd_post", "all_reduce", nbytes=size)

    def shared(self, caller: str, paths: Iterable[str]) -> dict[str, list[str]]:
        """Map the arguments of the caller read only by these column-parallel layers to the paths of the layers."""
        module = self.root.get_submodule(caller)
        whole = self.state.whole_forward(module)
        if isinstance(whole, TraceError):
            return {}
        columns = {self.root.get_submodule(path) for path in paths}
        try:
            return shared_inputs(module, whole, columns.__contains__)
        except ShardError:
            return {}

    # -- what stays whole --------------------------------------------------------------------------------

    def whole(self, left: dict[str, str]) -> dict[str, str]:
        """Map the path of each unsharded parameter of at least two dimensions to the reason."""
        found = {}
        for path, parameter in self.root.named_parameters():
            if id(parameter) in self.taken or parameter.ndim < 2:
                continue
            reasons = [
                next((factor.blocked for factor in factors(dim) if factor.blocked), "")
                for dim in self.found.tensors.get(path, ())
            ]
            default = "; ".join(dict.fromkeys(filter(None, reasons))) or (
                INNER if path in self.found.tensors else "not reached by the traced graph"
            )
            found[path] = left.get(path) or default
        return found
