"""``optimize``: apply every rule to every module reached in the recorded run, and report the results.

Nothing here knows a model by name. Only modules with operations of a rule in the recorded run are traced. Overlapping
matches in a graph are resolved together for all rules, by benefit; then each rule is one undoable step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from schedule.capture import GuardSet, Path, expand, is_hooked, module_state_guards, original_class
from schedule.core.adapting import Adapter, adapter_for
from schedule.core.edits import SetSpecializations
from schedule.core.matching import Match, Site
from schedule.core.node import Node
from schedule.patterns import Effects, GraphMatch, effects
from schedule.patterns.ops import find_form, operation_of
from schedule.patterns.rewriting import Build
from schedule.patterns.side_effects import is_plain_module
from schedule.primitives.group import Group
from schedule.primitives.registry import query
from schedule.primitives.rewrites import ByRules
from schedule.primitives.splicing import MatchGroup, splice_in
from schedule.report.comparing import costs_since, ratio_since
from schedule.report.costs import collector_paused
from schedule.report.entries import Entry
from schedule.report.report import Report
from schedule.rules import Rule, listed, select_rules
from schedule.rules.applying import Candidate, Findings, explain, find_all
from schedule.runtime.scheduled import state_of
from schedule.util.errors import MatchError, NotApplicable, ScheduleError
from schedule.util.internal_errors import InternalError, contained, own_errors
from schedule.util.logs import is_on, log, of_mode
from schedule.util.printing import in_progress
from schedule.util.wording import counted

Rules = str | Iterable[str | Rule]


@query
def optimize(sch: Node, rules: Rules = "default", strict: bool = False, cost_guard: bool = True) -> Report:
    """Optimize this module and all below, like :func:`schedule.optimize`."""
    rules = listed(rules)
    return optimize_by(select_rules(rules), sch, rules=rules, strict=strict, cost_guard=cost_guard)


def optimize_by(
    selected: Sequence[Rule],
    target: Node | Group[Any],
    batch: Any = None,
    *,
    rules: Rules = "default",
    strict: bool = False,
    cost_guard: bool = True,
) -> Report:
    """Apply the ``selected`` rules, like :func:`schedule.optimize`.

    ``rules`` is the argument to record for replay. It may select other rules on another machine.
    """
    nodes: list[Node] = list(target) if isinstance(target, Group) else [target]
    glob = target.glob if isinstance(target, Group) else ""
    top = nodes[0].root
    top.tree.use_batch(batch)
    given = {"rules": rules, "cost_guard": cost_guard}
    record = top.tree.history.record("optimize", [node.path for node in nodes], glob, given)
    return _Optimization(top, nodes, selected, cost_guard, record).run(strict)


@dataclass
class _Planned:
    """Planned matches and report entries of one module."""

    node: Node
    matches: dict[str, list[Match]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    adapter: Adapter | None = None  # as it was before
    error: InternalError | None = None

    def failed(self, error: InternalError, rule: str = "all rules") -> _Planned:
        """Add an internal error to the entries, warn of it, and return this."""
        self.error = contained(error)
        self.entries.append(Entry.of(error, self.node.path, rule))
        return self

    def adapter_with(self, rules: Sequence[Rule], done: Collection[Rule], cost_guard: bool) -> Adapter | None:
        """Return the adapter of further graphs with ``rules`` applied, or None without an adapter.

        Rule families of ``done`` with matches in this module are exempt from the cost guard there.
        """
        if self.adapter is None:
            return None
        settled = frozenset(rule.family for rule in done if rule.name in self.matches)
        again = ByRules(tuple(rules), settled, cost_guard)
        return replace(self.adapter, rewrites=(*self.adapter.rewrites, again))


@dataclass(frozen=True)
class _Called:
    """State of the modules called by a graph, as far as a search in the graph depends on it.

    Attributes:
        effects: of each call.
        plain: path → class and state of each layer that is matched as its operation, such as a convolution.
    """

    effects: list[Effects]
    plain: dict[str, tuple[type, GuardSet]]

    @classmethod
    def of(cls, graph: fx.Graph, modules: Mapping[str, nn.Module]) -> _Called:
        called = [effects(node, modules) for node in _calls(graph)]
        return cls(
            called,
            {path: (type(layer), module_state_guards(layer)) for path, layer in _plain_layers(graph, modules).items()},
        )

    def fits(self, graph: fx.Graph, modules: Mapping[str, nn.Module]) -> bool:
        """Check whether a search for other modules with the same graph has the same results."""
        layers = _plain_layers(graph, modules)
        if layers.keys() != self.plain.keys() or self.effects != [effects(node, modules) for node in _calls(graph)]:
            return False
        return all(type(layers[path]) is cls and state.holds(layers[path]) for path, (cls, state) in self.plain.items())


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_module"))


def _plain_layers(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    called = {str(node.target): modules[str(node.target)] for node in _calls(graph)}
    return {path: module for path, module in called.items() if is_plain_module(module)}


class _Optimization:
    def __init__(self, top: Node, nodes: Sequence[Node], rules: Sequence[Rule], cost_guard: bool, record: Any) -> None:
        self.top, self.nodes, self.rules, self.cost_guard, self.record = top, nodes, rules, cost_guard, record
        self.graphs = top.tree.graphs
        self.inlined: set[nn.Module] = set()
        self._found: dict[tuple[fx.Graph, frozenset[Path]], list[tuple[_Called, Findings]]] = {}

    def run(self, strict: bool) -> Report:
        before = len(self.top.history)
        with collector_paused(), self.top.tree.history.all_or_nothing():
            planned = self.planned()
            if strict:
                _refuse_leftovers(planned)
            planned = [each for each in planned if each.matches or each.entries]
            for rule in self.rules:
                self.apply(rule, planned)
            if strict:
                _refuse_internal_errors(planned)
        entries = [entry for each in planned for entry in each.entries]
        batch, top = self.graphs.batch, self.top
        module = self.nodes[0].module if len(self.nodes) == 1 else top.module
        costs, ratio = partial(costs_since, top, batch, before), partial(ratio_since, top, batch, before)
        return Report(entries, module, costs, ratio, top)

    # -- where to look ------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[nn.Module]:
        """Yield the modules with operations of a rule, outer modules first.

        Leaf modules follow unless they are inlined in an outer graph. What is inlined in a flat graph is part of that.
        """
        recording = self.graphs.recording
        reached: dict[nn.Module, None] = {}
        for node in self.nodes:
            for module in node.module.modules():
                if module in recording.calls and self.concerns(self.computed(module)):
                    reached[module] = None
        for module in list(reached):
            for child in self.flattened(module):
                reached.pop(child, None)
        inner = [module for module in reached if next(module.children(), None) is not None]
        self.graphs.ensure(inner)
        yield from inner
        leaves = [m for m in reached if m not in inner and m not in self.inlined and operation_of(type(m)) is None]
        self.graphs.ensure(leaves)
        yield from leaves

    def computed(self, module: nn.Module) -> set[str]:
        """Return the operations of ``module`` and its direct leaf modules in the recorded run.

        Those of modules that are inlined in a flat graph are among them.
        """
        computed = self.graphs.recording.computed
        functions: set[Any] = set()
        for part in (module, *self.flattened(module)):
            functions |= computed.get(part, set())
            for child in part.children():
                if next(child.children(), None) is None:
                    functions |= computed.get(child, set())
        forms = (find_form("call_function", function) for function in functions)
        return {form.definition.name for form in forms if form is not None}

    def flattened(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that are inlined in the graphs of ``module`` traced by request."""
        paths = {path for made in self.graphs.explicit.get(module, ()) for path in made.inlined}
        return [module.get_submodule(path) for path in sorted(paths)]

    def concerns(self, ops: Collection[str]) -> bool:
        return any(rule.concerns(ops) for rule in self.rules)

    # -- what is there ------------------------------------------------------------------------------------

    def planned(self) -> list[_Planned]:
        """Return the matches and report entries of all modules, without changing them.

        After an internal error that is not about one module, there are no matches.
        """
        try:
            with own_errors("searching the model"), in_progress(None, "tracing and matching"):
                return [self.plan(module) for module in self.candidates()]
        except InternalError as error:
            return [_Planned(self.top).failed(error)]

    def plan(self, module: nn.Module) -> _Planned:
        """Return the matches and report entries of the rules in ``module`` without changing it."""
        node = self.top.tree.node(module)
        try:
            with own_errors("matching"):
                planned = self._plan(node, module)
                planned.adapter = adapter_for(node, []) if planned.matches else None
                return planned
        except InternalError as error:
            return _Planned(node).failed(error)

    def _plan(self, node: Node, module: nn.Module) -> _Planned:
        planned = _Planned(node)
        try:
            node.refuse_inside_other_graph()
            made = node.specializations
        except InternalError:
            raise
        except ScheduleError as error:
            planned.entries += self.skipped(node, error)
            return planned
        if (one_mode := self.graphs.in_one_mode.get(module)) is not None:
            mode = "evaluation" if made[0].training else "training"
            planned.entries += self.skipped(node, one_mode, f"in {mode}: ")
        modules = dict(module.named_modules(remove_duplicate=False))
        sites: dict[tuple[str, ...], tuple[Rule, list[Site]]] = {}
        rejected: dict[tuple[str, str], Candidate] = {}
        for specialization in made:
            expansion = expand(specialization, module, self.graphs.recording)
            self.inlined.update(modules[path] for path in expansion.inlined)
            findings = self.found(expansion.graph, module, modules, explained=specialization is made[0])
            if is_on("match"):
                _log_matches(node.path, specialization.training, findings)
            for rule, graph_match in findings.chosen:
                key = (rule.name, *(output.name for output in graph_match.outputs))
                site = Site(specialization, graph_match, expansion.origin)
                sites.setdefault(key, (rule, []))[1].append(site)
            for candidate in findings.rejected:
                rejected.setdefault(
                    (candidate.rule, candidate.node), _with_opaque_module(candidate, expansion.graph, modules)
                )
        for rule, together in sites.values():
            planned.matches.setdefault(rule.name, []).append(Match(node, together, rule))
        taken = {(rule, name) for rule, *names in sites for name in names}
        planned.entries += _entries(node.path, [p for key, p in rejected.items() if key not in taken])
        if not planned.matches:
            planned.entries += self.hooked(node, " ".join(entry.reason for entry in planned.entries))
        return planned

    def skipped(self, node: Node, error: ScheduleError, where: str = "") -> list[Entry]:
        """Return a skipped entry per relevant rule family, for a module without a graph."""
        families = dict.fromkeys(r.family for r in self.rules if r.concerns(self.computed(node.module)))
        why = where + error.why.splitlines()[0]
        return [Entry(family, node.path, "skipped", 1, why, error.where) for family in families]

    def hooked(self, node: Node, told: str) -> list[Entry]:
        """Return skipped entries if layers of a module have hooks not mentioned in ``told``."""
        children = [(name, child) for name, child in node.module.named_children() if not any(child.children())]
        names = [name for name, child in children if is_hooked(child)]
        if not names or any(name in told for name in names):
            return []
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        fix = "register them after the model is scheduled: the original forward runs there then"
        return self.skipped(node, NotApplicable(f"hooks on {some} would not run in a rewritten operation", fix=fix))

    def found(self, graph: fx.Graph, module: nn.Module, modules: dict[str, nn.Module], explained: bool) -> Findings:
        """Return the matches of the rules in ``graph``.

        Structurally equal modules share one graph, so it is searched only once for those whose layers are set alike.
        """
        read = frozenset(self.graphs.recording.read.get(module, ()))
        known = self._found.setdefault((graph, read), [])
        for called, found in known:
            if called.fits(graph, modules):
                return found
        findings = find_all(graph, self.rules, modules, self.cost_guard, read=read)
        if explained:
            findings.rejected += explain(graph, self.rules, modules, findings)
        known.append((_Called.of(graph, modules), findings))
        return findings

    # -- doing it -----------------------------------------------------------------------------------------

    def apply(self, rule: Rule, planned: Sequence[_Planned]) -> None:
        """Rewrite all matches of ``rule`` as one step, or none after an internal error."""
        ours = [each for each in planned if rule.name in each.matches]
        try:
            with own_errors(f"applying {rule.name}"):
                self._apply(rule, ours, planned)
        except InternalError as error:
            for each in ours:
                del each.matches[rule.name]
                each.entries = [entry for entry in each.entries if (entry.rule, entry.status) != (rule.name, "applied")]
                each.failed(error, rule.name)

    def _apply(self, rule: Rule, ours: Sequence[_Planned], planned: Sequence[_Planned]) -> None:
        if not ours:
            return
        count = sum(len(each.matches[rule.name]) for each in ours)
        description = f"optimize({rule.name}) on {counted(count, 'match', 'matches')} in {counted(len(ours), 'module')}"
        arguments = {"rules": [rule.name], "cost_guard": self.cost_guard}
        paths = [node.path for node in self.nodes]
        done = self.rules[: self.rules.index(rule) + 1]
        again = [r for r in self.rules if r in done or not any(r.name in each.matches for each in planned)]
        adapters = {each.node: each.adapter_with(again, done, self.cost_guard) for each in planned if each.matches}
        with self.top.tree.history.transaction("optimize", paths, arguments, description, record=self.record):
            for each in ours:
                matches = each.matches[rule.name]
                splice_in(self.top, [[match] for match in matches], _prepare, lambda node, _: adapters.pop(node))
                first = matches[0].source
                each.entries.append(Entry(rule.name, each.node.path, "applied", len(matches), "", first))
            for node, adapter in adapters.items():  # modules without a match adapt to further calls by this rule too
                state = state_of(node.module)
                if state is not None:
                    unchanged = SetSpecializations(node.module, state.specializations, node.path, adapter)
                    node.commit([unchanged], 0)
        self.record.rules[rule.name] = [match for each in ours for match in each.matches[rule.name]]


def _prepare(group: MatchGroup, graph_match: GraphMatch) -> tuple[GraphMatch, Build]:
    rule: Rule = group[0].rule  # type: ignore[assignment]
    return rule.prepared(graph_match, group[0].schedule.module)


def _with_opaque_module(candidate: Candidate, graph: fx.Graph, modules: Mapping[str, nn.Module]) -> Candidate:
    """Return the candidate with the name of a preceding Linear of another class, if any, in its reason."""
    node = next((node for node in graph.nodes if node.name == candidate.node), None)
    for source in () if node is None else node.all_input_nodes:
        path = str(source.target) if source.op == "call_module" else source.meta.get("module", "")
        module = modules.get(path)
        if module is not None and hasattr(module, "in_features") and original_class(module) is not nn.Linear:
            return replace(
                candidate, reason=f"{candidate.reason}; {path} is a {torch.typename(module)}, which stays as it is"
            )
    return candidate


def _entries(path: str, rejected: Iterable[Candidate]) -> list[Entry]:
    """Return the report entries of one module, with counts of equal ones."""
    counts: dict[Entry, int] = {}
    for candidate in rejected:
        entry = Entry(candidate.rule, path, candidate.kind, 1, candidate.reason, candidate.source)  # type: ignore[arg-type]
        counts[entry] = counts.get(entry, 0) + 1
    return [Entry(e.rule, e.path, e.status, n, e.reason, e.source) for e, n in counts.items()]


def _log_matches(path: str, training: bool, findings: Findings) -> None:
    """Log each match in a graph: taken, or why not."""
    label, facts = of_mode(path, training), {"module": path, "training": training}
    for rule, graph_match in findings.chosen:
        told, node = f"{label}: {rule.name}", graph_match.outputs[0].name
        log("match", f"{told} at {node}: taken", {"status": "taken", "rule": rule.name, "node": node, **facts})
    for each in findings.rejected:
        told = f"{label}: {each.rule} at {each.node}: {each.kind}: {each.reason}"
        why = {"status": each.kind, "rule": each.rule, "node": each.node, "reason": each.reason, "source": each.source}
        log("match", told, {**why, **facts}, details=each.kind == "near miss")


def _leftovers(count: int) -> str:
    look = counted(count, "match looks", "matches look")
    return f"{look} like a rule's construct and cannot be rewritten; nothing was changed"


def _refuse_internal_errors(planned: Sequence[_Planned]) -> None:
    for each in planned:
        if each.error is not None:
            raise each.error


def _refuse_leftovers(planned: Sequence[_Planned]) -> None:
    _refuse_internal_errors(planned)
    left = [e for each in planned for e in each.entries if e.status in ("skipped", "near miss")]
    if left:
        lines = [f"{e.path or 'the root'}: {e.rule}: {e.reason}" for e in left[:10]]
        more = [f"… and {len(left) - 10} more"] if len(left) > 10 else []
        raise MatchError(
            _leftovers(len(left)),
            asked="optimize(strict=True)",
            where="\n".join(lines + more),
            fix="leave strict out to rewrite the others, or choose rules= without these",
        )


def survey(sch: Node, rules: Rules = "default", cost_guard: bool = True) -> list[Entry]:
    """Return the entries, with reasons, of call sites in ``sch`` and below left alone by the rules.

    This changes nothing.
    """
    looking = _Optimization(sch.root, [sch], select_rules(rules), cost_guard, None)
    with collector_paused():
        return [entry for each in looking.planned() for entry in each.entries]
