"""What a forward pass writes into anything that its modules hold is put back, by identity and with its numbers."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima.objective import Objective
from flatminima.objective.module_state import ModuleState
from flatminima.operators import Hessian

g = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=g), torch.randint(0, 3, (8,), generator=g)


class AttrDict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class SelfDict(dict[str, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Counting(OrderedDict[str, Any]):
    """Counts what is read and written through it."""

    def __init__(self, **entries: Any) -> None:
        self.accesses = 0
        super().__init__(**entries)
        self.accesses = 0

    def __getitem__(self, key: str) -> Any:
        self.accesses += 1
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.accesses += 1
        super().__setitem__(key, value)


class Named(list[Any]):
    name = "unnamed"


class Tagged(set[Any]):
    pass


class Recent(deque[Any]):
    pass


class State(NamedTuple):
    hidden: Tensor
    lines: list[Any]


class Slotted:
    __slots__ = ("count", "last", "tensor")

    def __init__(self) -> None:
        self.count, self.tensor = 0, torch.zeros(2)


@dataclass(slots=True)
class Record(Slotted):
    values: list[float] = field(default_factory=lambda: [1.0])

    def __post_init__(self) -> None:
        Slotted.__init__(self)


class Writing(nn.Module):
    """Changes everything it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.attr, self.self_dict, self.counting = AttrDict(a=1, b=[1]), SelfDict(a=1), Counting(a=1, b=2)
        self.by_default, self.counter = defaultdict(list, a=[1]), Counter("ab")
        self.named, self.tagged, self.recent = Named([1, 2]), Tagged({1}), Recent([1, 2], maxlen=2)
        self.user_dict, self.user_list = UserDict(a=1), UserList([1])
        self.state = State(torch.zeros(2), [1])
        self.array, self.bytes, self.numbers = np.array([0.0, np.nan]), bytearray(b"abc"), array("d", [1.0])
        self.slotted, self.record = Slotted(), Record()
        self.deep = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(lines=[1], array=np.zeros(2), tensor=torch.zeros(2))))
        self.hidden_module = [nn.BatchNorm1d(3)]
        self.me = [self]

    def forward(self, x: Tensor) -> Tensor:
        self.attr.a, self.attr.new = x, x
        self.attr["b"].append(x)
        self.self_dict.a, self.self_dict.new = x, x
        self.counting["a"], self.counting["c"] = x, x
        self.counting.move_to_end("a")
        self.by_default["b"].append(x)
        self.counter.update("abc")
        self.named[0], self.named.name = x, "seen"
        self.named.append(x)
        self.tagged.add(x.shape)
        self.recent.append(x)
        self.user_dict["b"] = x
        self.user_list.append(x)
        self.state.hidden.add_(1)
        self.state.lines.append(x)
        self.array += 1
        self.bytes[0], self.numbers[0] = 0, 2.0
        self.bytes.extend(b"d")
        for held in (self.slotted, self.record):
            held.count, held.last = held.count + 1, x
            held.tensor.add_(1)
        self.record.values.append(2.0)
        inner = self.deep.a.b
        inner.lines.append(x)
        inner.array += 1
        inner.tensor += 1
        inner.new = x
        self.hidden_module[0](x)
        return self.layer(x)


def _content(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Return a value as nested tuples that compare as a whole, with the identities of containers and objects."""
    if isinstance(value, Tensor | np.ndarray):
        return id(value), str(value.tolist())
    if isinstance(value, bytearray | array):
        return id(value), value.tobytes() if isinstance(value, array) else bytes(value)
    if id(value) in seen or isinstance(value, type(None) | int | float | str):
        return repr(value) if id(value) not in seen else id(value)
    seen = (*seen, id(value))
    if isinstance(value, nn.Module):
        return id(value), [(n, _content(v, seen)) for n, v in vars(value).items()]
    parts: list[Any] = [id(value), type(value)]
    if isinstance(value, dict):
        parts += [
            (k, _content(v, seen)) for k, v in (OrderedDict.items(value) if isinstance(value, OrderedDict) else value.items())
        ]
    elif isinstance(value, list | tuple | set | deque):
        parts += [_content(v, seen) for v in value]
    if getattr(value, "__dict__", value) is not value:
        parts += [(k, _content(v, seen)) for k, v in vars(value).items()]
    parts += [
        (n, _content(getattr(value, n), seen))
        for k in type(value).__mro__
        for n in getattr(k, "__slots__", ())
        if hasattr(value, n)
    ]
    return parts


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("from_closure", [False, True])
def test_whatever_a_forward_pass_writes_is_put_back(times: int, from_closure: bool) -> None:
    model = Writing()
    for _ in range(times):
        model(X)
    before = _content(model)
    if from_closure:
        objective = Objective.from_closure(lambda: F.cross_entropy(model(X), Y), dict(model.named_parameters()))
    else:
        objective = Objective(model, F.cross_entropy, (X, Y))
    Hessian(objective) @ torch.ones(objective.space.size)
    after = _content(model)
    for (name, old), (_, new) in zip(before[1], after[1], strict=True):
        assert old == new, name
    model(X)
    assert list(model.counting) == ["b", "c", "a"]
    assert model.recent.maxlen == 2


def test_an_ordered_dictionary_that_was_put_back_is_whole() -> None:
    model = nn.Linear(1, 1)
    model.entries = Counting(a=1, b=2)
    state = ModuleState()
    state.add([model])
    OrderedDict.__setitem__(model.entries, "c", 3)
    OrderedDict.pop(model.entries, "a")
    state.put_back()
    assert model.entries.accesses == 0
    assert list(model.entries) == list(reversed(list(reversed(model.entries)))) == ["a", "b"]
    assert model.entries.popitem(last=False) == ("a", 1)


def test_large_arrays_of_objects_and_objects_far_down_are_left_to_the_user() -> None:
    model = nn.Linear(1, 1)
    deep = SimpleNamespace(lines=[1])
    for _ in range(4):
        deep = SimpleNamespace(inner=deep)
    model.helper = SimpleNamespace(small=torch.zeros(2**20), large=torch.zeros(2**20 + 1))
    model.large, model.deep = torch.zeros(2**20 + 1), deep
    state = ModuleState()
    state.add([model])
    for tensor in (model.helper.small, model.helper.large, model.large):
        tensor.add_(1)
    deep.inner.inner.inner.new = 1
    deep.inner.inner.inner.inner.lines.append(2)
    state.put_back()
    assert (model.helper.small.sum(), model.large.sum()) == (0, 0)
    assert model.helper.large.sum() == 2**20 + 1
    assert not hasattr(deep.inner.inner.inner, "new")
    assert deep.inner.inner.inner.inner.lines == [1, 2]
