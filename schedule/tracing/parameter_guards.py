"""Guards on which parameters the submodules inside a graph have.

Where the inside of a layer without a bias becomes part of a graph, nothing in the graph reads the bias; where there is
one, the graph reads it by name. A bias that is set or removed afterwards makes another computation.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from schedule.tracing.specialisation import Specialisation
from schedule.tracing.structure import module_source


def with_parameter_guards(made: Specialisation, module: nn.Module) -> Specialisation:
    """Guard that the parameters of submodules inside the graph are None where they are now, and only there.

    Args:
        made: a graph of ``module``.
        module: the module as it was traced.
    """
    found = [
        f"{module_source(path)}._parameters.get({name!r}) is {'not ' * (parameter is not None)}None"
        for path in made.entered
        for name, parameter in module.get_submodule(path)._parameters.items()
    ]
    return replace(made, guards=tuple(dict.fromkeys((*made.guards, *found))))
