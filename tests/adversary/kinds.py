"""What drawn modules may hold, how they may read it, and how it may change: tables of source text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

VALUES = ("1", "2", "3", "1.0", "1.5", "2.0", "0.5", "-1.0", "0", "0.0", "-0.0", "True", "False", "None", "'x'", "'yy'")

Table = dict[str, tuple[str, str, tuple[str, ...]]]

SCALARS: Table = {
    "attribute": ("self.{n} = {v}", "self.{n}", ("self.{n} = {w}",)),
    "absent attribute": ("pass", "getattr(self, '{n}', 0.75)", ("self.{n} = {w}",)),
    "vars": ("self.{n} = {v}", "vars(self)['{n}']", ("self.{n} = {w}",)),
    "list": (
        "self.{n} = [{v}, 2.0]",
        "self.{n}[0]",
        ("self.{n}[0] = {w}", "self.{n} = [{w}]", "self.{n}.insert(0, {w})"),
    ),
    "tuple": ("self.{n} = ({v}, 2.0)", "self.{n}[0]", ("self.{n} = ({w}, 2.0)",)),
    "dict": ("self.{n} = {{'k': {v}}}", "self.{n}['k']", ("self.{n}['k'] = {w}", "self.{n} = {{'k': {w}}}")),
    "dict.get": ("self.{n} = {{}}", "self.{n}.get('k', 0.75)", ("self.{n}['k'] = {w}",)),
    "set": ("self.{n} = {{{v}}}", "({v} in self.{n})", ("self.{n}.clear()", "self.{n} = {{{w}}}")),
    "deque": ("self.{n} = deque([{v}])", "self.{n}[0]", ("self.{n}[0] = {w}",)),
    "defaultdict": ("self.{n} = defaultdict(int, k={v})", "self.{n}['k']", ("self.{n}['k'] = {w}",)),
    "long list": ("self.{n} = [{v}] * 300", "self.{n}[280]", ("self.{n}[280] = {w}",)),
    "dict in list": ("self.{n} = [[{{'k': {v}}}]]", "self.{n}[0][0]['k']", ("self.{n}[0][0]['k'] = {w}",)),
    "object": ("self.{n} = Plain({v})", "self.{n}.k", ("self.{n}.k = {w}", "self.{n} = Plain({w})")),
    "object of object": (
        "self.{n} = Plain(Plain({v}))",
        "self.{n}.k.k",
        ("self.{n}.k.k = {w}", "self.{n}.k = Plain({w})"),
    ),
    "object of objects": ("self.{n} = Plain(Plain(Plain({v})))", "self.{n}.k.k.k", ("self.{n}.k.k.k = {w}",)),
    "object in list": ("self.{n} = [Plain({v})]", "self.{n}[0].k", ("self.{n}[0].k = {w}",)),
    "object in dict": ("self.{n} = {{'k': Plain([{v}])}}", "self.{n}['k'].k[0]", ("self.{n}['k'].k[0] = {w}",)),
    "namespace": ("self.{n} = SimpleNamespace(k={{'a': [{v}]}})", "self.{n}.k['a'][0]", ("self.{n}.k['a'][0] = {w}",)),
    "dataclass": ("self.{n} = Data({v})", "self.{n}.k", ("self.{n}.k = {w}", "self.{n} = Data({w})")),
    "slots": ("self.{n} = Slotted({v})", "self.{n}.k", ("self.{n}.k = {w}",)),
    "named tuple": ("self.{n} = Named({v}, 1)", "self.{n}.k", ("self.{n} = Named({w}, 1)",)),
    "property": ("self.{n} = Plain({v})", "self.{n}.hidden", ("self.{n}.k = {w}",)),
    "own property": ("self.hidden = {v}", "self.shown", ("self.hidden = {w}",)),
    "method of object": ("self.{n} = Plain({v})", "self.{n}.get()", ("self.{n}.k = {w}",)),
    "bound method": ("self.{n}o = Plain({v}); self.{n} = self.{n}o.get", "self.{n}()", ("self.{n}o.k = {w}",)),
    "method in C": ("self.{n} = [{v}].__getitem__", "self.{n}(0)", ("self.{n}.__self__[0] = {w}",)),
    "get of a dict": ("self.{n} = {{'k': {v}}}.get", "self.{n}('k')", ("self.{n}.__self__['k'] = {w}",)),
    "view of a dict": (
        "self.{n}o = {{'k': {v}}}; self.{n} = self.{n}o.values()",
        "list(self.{n})[0]",
        ("self.{n}o['k'] = {w}",),
    ),
    "handed list": ("self.{n} = Filling()", "filled(self.{n}, h, [{v}])[0]", ("self.{n}.put = {w}",)),
    "handed dict": ("self.{n} = Filling()", "filled(self.{n}, h, {{0: {v}}})[0]", ("self.{n}.put = {w}",)),
    "dtype of a child": (
        "self.{n} = Turning()",
        "(2.0 if self.{n}(h).dtype == torch.float32 else 3.0)",
        ("self.{n}.kind = torch.float64",),
    ),
    "rank of a child": ("self.{n} = Turning()", "self.{n}(h).dim()", ("self.{n}.kind = 'row'",)),
    "nothing of a child": (
        "self.{n} = Turning()",
        "(2.0 if self.{n}(h) is None else 3.0)",
        ("self.{n}.kind = None", "self.{n}.kind = torch.float64"),
    ),
    "magic": ("self.{n} = Magic({v})", "self.{n}.anything", ("self.{n}.__dict__['table'] = {w}",)),
    "closure": (
        "self.{n} = closing({v})",
        "self.{n}()",
        ("self.{n}.__closure__[0].cell_contents = {w}", "self.{n} = closing({w})"),
    ),
    "default": (
        "self.{n} = lambda value={v}: value",
        "self.{n}()",
        ("self.{n}.__defaults__ = ({w},)", "self.{n} = lambda: {w}"),
    ),
    "partial": ("self.{n} = partial(identity, {v})", "self.{n}()", ("self.{n} = partial(identity, {w})",)),
    "class attribute": ("type(self).{n} = {v}", "self.{n}", ("module.Drawn.{n} = {w}", "self.{n} = {w}")),
    "global": ("globals()['{n}'] = {v}", "{n}", ("module.{n} = {w}",)),
    "global dict": ("TABLE['{n}'] = {v}", "TABLE['{n}']", ("module.TABLE['{n}'] = {w}",)),
    "child": ("self.{n} = Holder({v})", "self.{n}.k", ("self.{n}.k = {w}", "self.{n} = module.Holder({w})")),
    "grandchild": ("self.{n} = Holder(Holder({v}))", "self.{n}.k.k", ("self.{n}.k.k = {w}",)),
    "child in list": ("self.{n} = [Holder({v})]", "self.{n}[0].k", ("self.{n}[0].k = {w}",)),
    "ModuleList": ("self.{n} = nn.ModuleList([Holder({v})])", "self.{n}[0].k", ("self.{n}[0].k = {w}",)),
    "attribute of Linear": ("self.fc1.{n} = {v}", "self.fc1.{n}", ("self.fc1.{n} = {w}",)),
    "environment": (
        "os.environ['ADVERSARY_{n}'] = str({v})",
        "os.environ['ADVERSARY_{n}']",
        ("setenv('ADVERSARY_{n}', str({w}))",),
    ),
    "child's flag": ("self.{n} = nn.Dropout(0.0)", "self.{n}.training", ("self.{n}.eval()", "self.{n}.train()")),
    "tie": (
        "self.{n} = nn.Linear(8, 8)",
        "(self.{n}.weight is self.fc1.weight)",
        ("self.{n}.weight = self.fc1.weight",),
    ),
    "frozen": (
        "self.{n} = nn.Linear(8, 8)",
        "self.{n}.weight.requires_grad",
        ("self.{n}.weight.requires_grad_(False)",),
    ),
    "length": ("self.{n} = [1, 2]", "len(self.{n})", ("self.{n}.append(3)", "self.{n}.pop()")),
    "hasattr": ("pass", "hasattr(self, '{n}')", ("self.{n} = {w}", "self.register_buffer('{n}', torch.ones(1))")),
}
"""Kind → what sets it up, what reads it, what changes it; of a plain value."""

TENSORS: Table = {
    "parameter": (
        "self.{n} = P(torch.full((8,), 1.5))",
        "self.{n}",
        ("self.{n} = None", "self.{n}.data.mul_(2)", "self.{n} = P(torch.ones(1))"),
    ),
    "no parameter": ("self.register_parameter('{n}', None)", "self.{n}", ("self.{n} = P(torch.full((8,), 1.5))",)),
    "buffer": (
        "self.register_buffer('{n}', torch.full((8,), 1.5))",
        "self.{n}",
        ("self.{n} = None", "self.{n}.mul_(2)", "self.{n} = torch.ones(8)"),
    ),
    "no buffer": ("self.register_buffer('{n}', None)", "self.{n}", ("self.{n} = torch.full((8,), 1.5)",)),
    "tensor": (
        "self.{n} = torch.full((8,), 1.5)",
        "self.{n}",
        ("self.{n}.mul_(2)", "self.{n} = torch.ones(8)", "self.{n} = None"),
    ),
    "tensor in list": (
        "self.{n} = [torch.full((8,), 1.5)]",
        "self.{n}[0]",
        ("self.{n}[0] = torch.ones(8)", "self.{n}[0].mul_(2)"),
    ),
    "tensor in object": (
        "self.{n} = Plain(torch.full((8,), 1.5))",
        "self.{n}.k",
        ("self.{n}.k = torch.ones(8)", "self.{n}.k = None"),
    ),
    "child's parameter": (
        "self.{n} = nn.Linear(8, 8)",
        "self.{n}.bias",
        ("self.{n}.bias = None", "self.{n}.bias = P(torch.ones(8))", "self.{n} = nn.Linear(8, 8)"),
    ),
}
"""The same, of a tensor or None."""

EFFECTS: Table = {
    "counter": ("self.{n} = 0", "self.{n} += 1", ("self.{n} = 5",)),
    "append": ("self.{n} = []", "self.{n}.append(h.dim())", ("self.{n}.clear()", "self.{n} = [1]")),
    "dict set": ("self.{n} = {{}}", "self.{n}['k'] = self.{n}.get('k', 0) + 1", ("self.{n}.clear()",)),
    "object counter": ("self.{n} = Plain(0)", "self.{n}.k += 1", ("self.{n}.k = 7",)),
    "global counter": ("TABLE['{n}'] = 0", "TABLE['{n}'] += 1", ("module.TABLE['{n}'] = 7",)),
    "buffer counter": (
        "self.register_buffer('{n}', torch.zeros(()))",
        "self.{n} += 1; h = h + self.{n}",
        ("self.{n}.zero_()",),
    ),
    "kept": ("self.{n} = None", "self.{n} = h.detach()", ("self.{n} = None",)),
    "kept list": ("self.{n} = [None]", "self.{n}[0] = h", ("self.{n} = [None]",)),
}
"""What a forward does: how it is set up, what is done, what changes it."""

_PLAIN = ("attribute", "absent attribute", "list", "tuple", "dict", "dict.get", "set", "deque", "defaultdict", "length")
_PLAIN += ("long list", "dict in list", "object", "object of object", "object in list", "object in dict", "namespace")
_PLAIN += (
    "dataclass",
    "slots",
    "named tuple",
    "property",
    "method of object",
    "bound method",
    "method in C",
    "closure",
)
_PLAIN += ("get of a dict", "magic", "partial", "hasattr")


def _given(table: Table, kinds: Iterable[str]) -> Table:
    """The same of an object that the forward is given, ``given``, which is the attribute of this name of the module."""

    def texts(kind: str) -> tuple[str, str, tuple[str, ...]]:
        first, read, changes = table[kind]
        of = partial(re.sub, r"\bself\b", "self.given")
        return of(first), re.sub(r"\bself\b", "given", read), tuple(map(of, changes))

    return {f"given {kind}": texts(kind) for kind in kinds}


GIVEN_SCALARS = _given(SCALARS, _PLAIN)
GIVEN_TENSORS = _given(TENSORS, ("tensor", "tensor in list", "tensor in object"))
GIVEN_EFFECTS = _given(EFFECTS, ("counter", "append", "dict set", "object counter", "kept", "kept list"))

USES = (
    "h = h * num({e})",
    "h = h + num({e})",
    "h = h + (0.5 if {e} else 0.25)",
    "h = h * 1.5 if {e} is None else h",
    "h = h + 0.5 if num({e}) > 1.25 else h",
    "h = h * kind({e})",
    "h = h + 0.1 * len(str({e}))",
    "h = h * math.copysign(1.0, num({e}))",
)
TENSOR_USES = (
    "h = h if {e} is None else h * {e}",
    "h = h + (0.5 if {e} is None else {e})",
    "h = h * (1.5 if {e} is not None else 1)",
)

HEAD = """import math, os
from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter as P

TABLE = {}
Named = namedtuple("Named", "k other")

class Plain:
    def __init__(self, k): self.k = k
    def get(self): return self.k
    @property
    def hidden(self): return self.k

@dataclass
class Data:
    k: Any

class Slotted:
    __slots__ = ("k",)
    def __init__(self, k): self.k = k

class Magic:
    def __init__(self, k): self.__dict__["table"] = k
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return self.__dict__["table"]

class Given: pass

class Holder(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

class Filling(nn.Module):
    def __init__(self):
        super().__init__()
        self.put = None
    def forward(self, x, given):
        if self.put is not None: given[0] = self.put
        return x

class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = torch.float32
    def forward(self, x):
        if self.kind is None: return None
        return x[None] if self.kind == "row" else x.to(self.kind)

def filled(child, x, given):
    child(x, given)
    return given

def closing(value): return lambda: value
def identity(value): return value
def num(value): return 0.25 if value is None else float(len(value)) if isinstance(value, str) else value
def kind(value): return 1.5 if isinstance(value, bool) else 1.0 if isinstance(value, int) else 2.0
"""
