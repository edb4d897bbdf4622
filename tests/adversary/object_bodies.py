"""What a forward does with an object that it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.adversary.objects import Child

Body = Callable[[Any, Tensor, Any], Any]
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    """Add what a forward does with its argument, under the function's name."""
    BODIES[function.__name__] = function
    return function


class Asking(nn.Module):
    """A forward with a part to fuse, and one that reads or changes its argument."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.child, self.body = nn.Linear(8, 8), Child(), BODIES[name]

    def forward(self, x: Tensor, given: Any) -> Any:
        return self.body(self, F.gelu(self.first(x)), given)


@body
def item_set_and_read(m: Any, h: Tensor, c: Any) -> Any:
    c.flags[1] = True
    return h * (2.0 if c.flags[1] else 3.0)


@body
def item_added_and_asked_for(m: Any, h: Tensor, c: Any) -> Any:
    flags = c.flags
    c.flags[7] = True
    return h * (2.0 if 7 in flags and c.flags.get(7) else 3.0)


@body
def nested_item_set_and_read(m: Any, h: Tensor, c: Any) -> Any:
    c.nested[1]["a"] = 4
    return h * c.nested[1]["a"]


@body
def appended(m: Any, h: Tensor, c: Any) -> Any:
    c.items.append(4)
    return h


@body
def appended_tensor(m: Any, h: Tensor, c: Any) -> Any:
    c.tensors.append(h)
    return h


@body
def item_replaced(m: Any, h: Tensor, c: Any) -> Any:
    c.tensors[0] = h
    return h * 2


@body
def added_in_place(m: Any, h: Tensor, c: Any) -> Any:
    c.items += [7]
    return h


@body
def swapped(m: Any, h: Tensor, c: Any) -> Any:
    c.items[0], c.items[1] = c.items[1], c.items[0]
    return h * c.items[0]


@body
def sorted_in_place(m: Any, h: Tensor, c: Any) -> Any:
    c.items.sort()
    return h


@body
def popped(m: Any, h: Tensor, c: Any) -> Any:
    return h * c.items.pop() * c.flags.pop("a")


@body
def appended_to_a_method_s_list(m: Any, h: Tensor, c: Any) -> Any:
    c.own().append(4)
    return h


@body
def appended_to_a_new_list(m: Any, h: Tensor, c: Any) -> Any:
    found = c.new()
    found.append(4)
    return h * len(found)


@body
def appended_deeper(m: Any, h: Tensor, c: Any) -> Any:
    c.nested[0].append(3)
    c.part.items.append(3)
    return h


@body
def appended_in_a_tuple(m: Any, h: Tensor, c: Any) -> Any:
    c.pair[0].append(3)
    return h * len(c.pair[0])


@body
def number_set(m: Any, h: Tensor, c: Any) -> Any:
    c.n += 4
    return h * c.n


@body
def attribute_deleted(m: Any, h: Tensor, c: Any) -> Any:
    del c.n
    return h


@body
def attribute_added(m: Any, h: Tensor, c: Any) -> Any:
    c.new_one = h
    return h * 2


@body
def set_by_name(m: Any, h: Tensor, c: Any) -> Any:
    vars(c)["n"] = 7
    return h * c.n


@body
def read_around_a_method(m: Any, h: Tensor, c: Any) -> Any:
    items, flags = c.items, c.flags
    c.change()
    return h * (len(items) + (2.0 if flags[1] else 3.0) + c.n)


@body
def list_read_around_a_child(m: Any, h: Tensor, c: Any) -> Any:
    items = c.items
    return m.child(h, c) * sum(items)


@body
def tensors_read_around_a_child(m: Any, h: Tensor, c: Any) -> Any:
    tensors = c.tensors
    return m.child(h, c) * tensors[0]


@body
def dict_read_around_a_child(m: Any, h: Tensor, c: Any) -> Any:
    flags = c.flags
    return m.child(h, c) * (2.0 if flags[1] else 3.0) * flags["a"]


@body
def length_read_behind_a_child(m: Any, h: Tensor, c: Any) -> Any:
    return m.child(h, c) * len(c.items)


@body
def list_handed_on(m: Any, h: Tensor, c: Any) -> Any:
    return m.child(h, c.items) * len(c.items)


@body
def entry_counted_behind(m: Any, h: Tensor, c: Any) -> Any:
    h = m.child(h, c)
    c.flags["a"] = c.flags.get("a", 0) + 1
    return h


@body
def attribute_behind(m: Any, h: Tensor, c: Any) -> Any:
    return m.child(h, c) * (c.n if hasattr(c, "n") else 5.0)


@body
def items_behind(m: Any, h: Tensor, c: Any) -> Any:
    h = m.child(h, c)
    for item in c.items or ():
        h = h * item
    return h


@body
def dict_behind(m: Any, h: Tensor, c: Any) -> Any:
    h = m.child(h, c)
    return h * (2.0 if isinstance(c.flags, dict) and type(c.flags) is dict else 3.0)


@body
def truth_of_a_number(m: Any, h: Tensor, c: Any) -> Any:
    return h * (0.5 if c.n else 0.25)


@body
def truth_of_an_item(m: Any, h: Tensor, c: Any) -> Any:
    return h * (0.5 if c.items[0] else 0.25) * (0.5 if c.flags["a"] else 0.25)


@body
def comparison_of_a_number(m: Any, h: Tensor, c: Any) -> Any:
    return h * (0.5 if c.n + 1 != 3 else 0.25) * (0.5 if c.n != 4 else 0.25)


@body
def class_of_a_number(m: Any, h: Tensor, c: Any) -> Any:
    return h * (0.5 if isinstance(c.n, int) else 0.25) * (0.5 if type(c.items[0]) is int else 0.25)


@body
def dtype_by_a_number(m: Any, h: Tensor, c: Any) -> Any:
    made, product = torch.full((2,), c.n), torch.ones(2, dtype=torch.int64) * c.items[0]
    return h * (0.5 if made.dtype is torch.int64 else 0.25) * (0.5 if product.dtype is torch.int64 else 0.25)


@body
def truth_of_a_returned_number(m: Any, h: Tensor, c: Any) -> Any:
    return h * (0.5 if c.number() else 0.25) * (0.5 if c.number() != 4 else 0.25)


@body
def truth_behind(m: Any, h: Tensor, c: Any) -> Any:
    return m.child(h, c) * (0.5 if c.n else 0.25)


@body
def part_set_behind(m: Any, h: Tensor, c: Any) -> Any:
    c.part.n = m.child(h, c).shape[1]
    return h


@body
def entry_set_behind(m: Any, h: Tensor, c: Any) -> Any:
    c.flags["z"] = m.child(h, c).shape[1]
    return h


@body
def tensors_behind(m: Any, h: Tensor, c: Any) -> Any:
    h = m.child(h, c)
    return h * c.tensors[0] if len(c.tensors) else h


@body
def list_returned(m: Any, h: Tensor, c: Any) -> Any:
    return h, c.items


@body
def dict_returned(m: Any, h: Tensor, c: Any) -> Any:
    return h, c.flags


@body
def lengths(m: Any, h: Tensor, c: Any) -> Any:
    return h * (len(c.nested) + len(c.nested[0]) + len(c.nested[1]) + len(c.pair[0]) + len(c.parts))


@body
def texts(m: Any, h: Tensor, c: Any) -> Any:
    return h * (len(str(c.items)) + len(f"{c.flags}") + len(str(c.nested)))


@body
def dict_as_a_whole(m: Any, h: Tensor, c: Any) -> Any:
    whole = {**c.flags} == c.flags and c.flags == {1: False, "a": 2}
    return h * (len(c.flags | {5: 1}) + len(c.flags.copy()) + len([*reversed(c.flags)]) + whole)


@body
def kinds(m: Any, h: Tensor, c: Any) -> Any:
    return h * (2.0 if type(c.items) is list and type(c.flags) is dict and isinstance(c.items, list) else 3.0)


@body
def copies(m: Any, h: Tensor, c: Any) -> Any:
    found = c.items.copy() + c.items[:] + [*c.items] + copy.copy(c.items)
    found.append(1)
    return h * len(found)


@body
def stacked(m: Any, h: Tensor, c: Any) -> Any:
    return h * torch.stack(c.tensors).sum()


@body
def several(m: Any, h: Tensor, c: Any) -> Any:
    return h * (len(c.several()) + len(c.by_name()))


@body
def set_read(m: Any, h: Tensor, c: Any) -> Any:
    return h * (len(c.set | {7}) + sum(c.set))


@body
def queue_read(m: Any, h: Tensor, c: Any) -> Any:
    return h * (sum(c.queue) + len([*c.queue]))


@body
def queue_changed(m: Any, h: Tensor, c: Any) -> Any:
    c.queue.append(5)
    return h * len(c.queue)


@body
def bytes_changed(m: Any, h: Tensor, c: Any) -> Any:
    c.bytes.append(5)
    return h * len(c.bytes)


@body
def other_mappings(m: Any, h: Tensor, c: Any) -> Any:
    return h * (len(c.ordered) + c.counts["a"] + c.default["z"] + sum(c.counts.values()))


@body
def user_list(m: Any, h: Tensor, c: Any) -> Any:
    return h * sum(c.user)


@body
def missing(m: Any, h: Tensor, c: Any) -> Any:
    return h * getattr(c, "absent", 2.0) if hasattr(c, "absent") else h


@body
def iterated(m: Any, h: Tensor, c: Any) -> Any:
    for each in c:
        h = h * each
    return h


@body
def added(m: Any, h: Tensor, c: Any) -> Any:
    return h * (c + 1)


@body
def as_number(m: Any, h: Tensor, c: Any) -> Any:
    return h * float(c)


@body
def truth(m: Any, h: Tensor, c: Any) -> Any:
    return h * ((c and 2) or 3)


@body
def as_text(m: Any, h: Tensor, c: Any) -> Any:
    return h * len(str(c))
