"""Pattern language and search for patterns in fx graphs.

pattern = compile_pattern(lambda x, b: F.gelu(x + b, approximate="tanh"), name="bias_gelu")
found = search(graph, pattern, modules=dict(module.named_modules()))
found.graph_matches[0].inputs      # {"x": <fx node>, "b": <fx node>}
print(found.near_misses[0])        # where it nearly matched, what was expected, what was found
"""

from schedule.patterns.compiling import Pattern, compile_pattern
from schedule.patterns.equality import difference, graphs_equal
from schedule.patterns.graph_match import GraphMatch, NearMiss, SearchResult, resolve
from schedule.patterns.language import any_of, call_module, optional, scalar, tensor
from schedule.patterns.matcher import search
from schedule.patterns.normalize import normalize
from schedule.patterns.normalized_nodes import Attr, NormalGraph, OpNode
from schedule.patterns.ops import declare_pure, register_form, register_module, register_op
from schedule.patterns.side_effects import Effects, effects

__all__ = [
    "Attr",
    "Effects",
    "GraphMatch",
    "NearMiss",
    "NormalGraph",
    "OpNode",
    "Pattern",
    "SearchResult",
    "any_of",
    "call_module",
    "compile_pattern",
    "declare_pure",
    "difference",
    "effects",
    "graphs_equal",
    "normalize",
    "optional",
    "register_form",
    "register_module",
    "register_op",
    "resolve",
    "scalar",
    "search",
    "tensor",
]
