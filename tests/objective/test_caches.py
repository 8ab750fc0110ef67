"""Weights that a model computes once and keeps are refused however they are kept; what it only reads or tunes is not."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.objective import Objective

g = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=g), torch.randint(0, 3, (8,), generator=g)


class AttrDict(dict[str, Any]):
    """A dictionary whose entries are attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Pair(NamedTuple):
    weight: Tensor
    bias: Tensor


class Slotted:
    __slots__ = ("weight",)


@dataclass(frozen=True, slots=True)
class Record:
    weight: Tensor


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3)
        self.prepare()

    def prepare(self) -> None:
        pass

    def scaled(self) -> Tensor:
        return self.layer.weight * 2

    def kept(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept(), self.layer.bias)


class AttributeThere(Base):
    def kept(self) -> Tensor:
        if not hasattr(self, "weight"):
            self.weight = self.scaled()
        return self.weight


class CachedProperty(Base):
    @cached_property
    def weight(self) -> Tensor:
        return self.scaled()

    def kept(self) -> Tensor:
        return self.weight


class Flag(Base):
    def prepare(self) -> None:
        self.ready = False

    def kept(self) -> Tensor:
        if not self.ready:
            self.weight, self.ready = self.scaled(), True
        return self.weight


class DirtyFlag(Base):
    def prepare(self) -> None:
        self.state = SimpleNamespace(dirty=True)

    def refresh(self) -> None:
        self.state.weight = self.scaled()
        self.state.dirty = False

    def kept(self) -> Tensor:
        if self.state.dirty:
            self.refresh()
        return self.state.weight


class LateBuffer(Base):
    def kept(self) -> Tensor:
        if "weight" not in self._buffers:
            self.register_buffer("weight", self.scaled().detach())
        return self.weight


class NoneBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("weight", None)

    def kept(self) -> Tensor:
        if self.weight is None:
            self.weight = self.scaled().detach()
        return self.weight


class FlaggedBuffer(Base):
    def prepare(self) -> None:
        self.register_buffer("weight", torch.zeros(3, 3))
        self.ready = False

    def kept(self) -> Tensor:
        if not self.ready:
            self.weight.copy_(self.scaled().detach())
            self.ready = True
        return self.weight


class NamedPair(Base):
    def prepare(self) -> None:
        self.pair: Pair | None = None

    def kept(self) -> Tensor:
        if self.pair is None:
            self.pair = Pair(self.scaled(), self.layer.bias)
        return self.pair.weight


class InSlot(Base):
    def prepare(self) -> None:
        self.helper = Slotted()

    def kept(self) -> Tensor:
        if not hasattr(self.helper, "weight"):
            self.helper.weight = self.scaled()
        return self.helper.weight


class InRecord(Base):
    def prepare(self) -> None:
        self.record: Record | None = None

    def kept(self) -> Tensor:
        if self.record is None:
            self.record = Record(self.scaled())
        return self.record.weight


class OnTheLayer(Base):
    def kept(self) -> Tensor:
        if not hasattr(self.layer, "scaled"):
            self.layer.scaled = self.scaled()
        return self.layer.scaled


class DeepInObjects(Base):
    def prepare(self) -> None:
        self.a = SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(weight=None)))

    def kept(self) -> Tensor:
        inner = self.a.b.c
        if inner.weight is None:
            inner.weight = self.scaled()
        return inner.weight


class Array(Base):
    def prepare(self) -> None:
        self.weight: np.ndarray | None = None

    def kept(self) -> Tensor:
        if self.weight is None:
            self.weight = self.scaled().detach().numpy()
        return torch.from_numpy(self.weight)


class ListOfNone(Base):
    def prepare(self) -> None:
        self.weights: list[Tensor | None] = [None, None]

    def kept(self) -> Tensor:
        if self.weights[1] is None:
            self.weights[1] = self.scaled()
        return self.weights[1]


def _in_mapping(make: Callable[[], Any]) -> type[Base]:
    class InMapping(Base):
        def prepare(self) -> None:
            self.cache = make()

        def kept(self) -> Tensor:
            if "weight" not in self.cache:
                self.cache["weight"] = self.scaled()
            return self.cache["weight"]

    return InMapping


CACHES: dict[str, type[Base]] = {
    "hasattr": AttributeThere,
    "cached_property": CachedProperty,
    "flag": Flag,
    "flag of an object": DirtyFlag,
    "late buffer": LateBuffer,
    "buffer that was None": NoneBuffer,
    "flagged buffer": FlaggedBuffer,
    "NamedTuple": NamedPair,
    "slot": InSlot,
    "frozen dataclass": InRecord,
    "on torch's own module": OnTheLayer,
    "objects in objects": DeepInObjects,
    "NumPy array": Array,
    "list of None": ListOfNone,
    "AttrDict": _in_mapping(AttrDict),
    "OrderedDict": _in_mapping(OrderedDict),
    "defaultdict": _in_mapping(lambda: defaultdict(list)),
    "UserDict": _in_mapping(UserDict),
}


@pytest.mark.parametrize("filled", ["before, without gradient", "before, with gradient", "not before"])
@pytest.mark.parametrize("how", CACHES)
def test_a_kept_weight_is_refused_and_stays_as_it_was(how: str, filled: str) -> None:
    model = CACHES[how]().eval()
    if filled != "not before":
        with torch.set_grad_enabled(filled == "before, with gradient"):
            model(X)
    outputs = model(X) if filled != "not before" else None
    names, buffers = list(vars(model)), dict(model._buffers)
    with pytest.raises(Exception, match=r"depends on an earlier pass|loss changed between two passes") as caught:
        Objective(model, F.cross_entropy, (X, Y))
    if how != "flagged buffer" or filled != "not before":
        assert isinstance(caught.value, NotSupported)
    assert list(vars(model)) == names
    assert all(model._buffers[name] is buffer for name, buffer in buffers.items())
    if outputs is not None:
        assert torch.equal(model(X), outputs)
        with torch.no_grad():
            model.layer.weight.mul_(2)
        assert torch.equal(model(X), outputs), "the cache of the user's is as full as it was"
    else:
        with torch.no_grad():
            model.layer.weight.mul_(2)
            torch.testing.assert_close(model(X), F.linear(X, model.layer.weight * 2, model.layer.bias))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("how", CACHES)
def test_a_kept_weight_is_refused_inside_a_closure_as_well(how: str, filled: bool) -> None:
    model = CACHES[how]().eval()
    if filled:
        with torch.no_grad():
            model(X)
    names = list(vars(model))
    with pytest.raises(NotSupported, match="depends on an earlier pass"):
        Objective.from_closure(lambda: F.cross_entropy(model(X), Y), list(model.parameters()))
    assert list(vars(model)) == names


class Gated(Base):
    """A constant that may be None, and a flag, behind a gate that is zero so far: neither changes the loss at this point."""

    def prepare(self) -> None:
        self.gate, self.use_bias = nn.Parameter(torch.zeros(())), True
        self.constant: Tensor | None = torch.full((3,), 2.0)
        self.constants = {"a": torch.ones(3)}
        self.helper = SimpleNamespace(shift=torch.ones(3))
        self.array = np.ones(3, dtype=np.float32)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        extra = torch.zeros(3)
        for part in (self.constant, self.constants.get("a"), getattr(self.helper, "shift", None), getattr(self, "mask", None)):
            extra = extra if part is None else extra + part
        if self.use_bias and getattr(self, "array", None) is not None:
            extra = extra + torch.from_numpy(self.array)
        return y + self.gate * extra * torch.tensor([1.0, 2.0, 3.0])


def test_constants_behind_a_gate_that_is_zero_are_no_cache() -> None:
    objective = Objective(Gated(), F.cross_entropy, (X, Y))
    gate = objective.space.slices["gate"]
    assert objective.gradient()[gate].abs() > 0


class Initialised(Base):
    """Sets its parameters from the first batch, once, as activation normalisation does."""

    def prepare(self) -> None:
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.layer.bias.copy_(-F.linear(x, self.layer.weight).mean(0))
            self.ready = True
        return self.layer(x)


def test_parameters_that_were_set_from_data_once_are_no_cache() -> None:
    model = Initialised()
    model(X)
    assert torch.isfinite(Objective(model, F.cross_entropy, (X, Y)).value())
    with pytest.raises(NotSupported, match=r"writes to 'layer.bias'"):
        Objective(Initialised(), F.cross_entropy, (X, Y))


def test_flags_that_a_pass_does_not_set_are_left_alone() -> None:
    class Logging(Base):
        def prepare(self) -> None:
            self.logging, self.scale, self.seen = False, torch.ones(3), []

        def forward(self, x: Tensor) -> Tensor:
            if self.logging:
                LOGGED.append(1)
            return self.layer(x) * self.scale

    LOGGED: list[int] = []
    Objective(Logging(), F.cross_entropy, (X, Y))
    assert LOGGED == []


class KeyedByParameter(Base):
    """Keeps a weight as long as the parameter is the same object."""

    def prepare(self) -> None:
        self.key: Any = None

    def kept(self) -> Tensor:
        if self.key is not self.layer.weight or (torch.is_grad_enabled() and not self.weight.requires_grad):
            self.key, self.weight = self.layer.weight, self.scaled()
        return self.weight


@pytest.mark.parametrize("check_deterministic", [True, False])
def test_a_weight_that_is_kept_for_one_parameter_object_is_refused_for_its_graph(check_deterministic: bool) -> None:
    batches = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    with pytest.raises(NotSupported, match="keeps a tensor with the graph of an earlier pass"):
        Objective(KeyedByParameter(), F.cross_entropy, batches, check_deterministic=check_deterministic)
