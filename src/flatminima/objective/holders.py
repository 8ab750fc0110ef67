"""Where Python objects hold others: dictionaries, lists, sets, deques, attributes and slots, read and written alike.

Subclasses are read and written by the methods of the built-in class, so that what they override (an access that counts, an
entry that is made on demand) does not run.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, final

import numpy as np
from torch import Tensor, nn

__all__ = ["MAX_DEPTH", "Holder", "arrays_in", "deeper", "dict_holder", "has_any", "held_by", "holders", "is_plain"]

#: How many objects deep attributes are followed, from the module's own attribute on; containers do not count.
MAX_DEPTH = 4

Pairs = list[tuple[Any, Any]]

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_CLOSED = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, Tensor, np.ndarray, array)
_OPEN_STANDARD = frozenset({"collections", "functools", "types"})  # UserDict, partial, SimpleNamespace: made to hold things
_CLOSED_PACKAGES = (sys.stdlib_module_names | {"torch", "numpy", "scipy"}) - _OPEN_STANDARD - {"__main__"}


class Holder(ABC):
    """One place that holds values by key: an index, an entry's key, or an attribute's name."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def read(self) -> Pairs:
        """Return keys with what they hold, in order."""

    @abstractmethod
    def write(self, pairs: Pairs) -> None:
        """Hold these pairs and nothing else."""

    def snapshot(self) -> Any:
        """Return what is held, for ``restore``."""
        return self.read()

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Hold the same objects again; written only where something changed, told by identity."""


@final
class _DictHolder(Holder):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._base: Any = OrderedDict if isinstance(value, OrderedDict) else dict

    def read(self) -> Pairs:
        return list(self._base.items(self.value))

    def write(self, pairs: Pairs) -> None:
        self._base.clear(self.value)
        for key, held in pairs:
            self._base.__setitem__(self.value, key, held)

    def snapshot(self) -> Any:
        return dict(self._base.items(self.value)) if type(self.value) is not dict else self.value.copy()

    def restore(self, snapshot: Any) -> None:
        base, value = self._base, self.value
        if not _same(base.values(value), snapshot.values()) or not _same(base.keys(value), snapshot):
            self.write(list(snapshot.items()))


@final
class _ListHolder(Holder):
    def read(self) -> Pairs:
        return list(enumerate(list.__iter__(self.value)))

    def write(self, pairs: Pairs) -> None:
        list.__setitem__(self.value, slice(None), [held for _, held in pairs])

    def snapshot(self) -> Any:
        return list(list.__iter__(self.value))

    def restore(self, snapshot: Any) -> None:
        if len(snapshot) != list.__len__(self.value) or not all(map(is_, list.__iter__(self.value), snapshot)):
            list.__setitem__(self.value, slice(None), snapshot)


@final
class _DequeHolder(Holder):
    def read(self) -> Pairs:
        return list(enumerate(deque.__iter__(self.value)))

    def write(self, pairs: Pairs) -> None:
        deque.clear(self.value)
        deque.extend(self.value, [held for _, held in pairs])

    def restore(self, snapshot: Any) -> None:
        if not _same([held for _, held in self.read()], [held for _, held in snapshot]):
            self.write(snapshot)


@final
class _SetHolder(Holder):
    def read(self) -> Pairs:
        return [(held, held) for held in set.__iter__(self.value)]

    def write(self, pairs: Pairs) -> None:
        set.clear(self.value)
        set.update(self.value, [held for _, held in pairs])

    def snapshot(self) -> Any:
        return set(set.__iter__(self.value))

    def restore(self, snapshot: Any) -> None:
        if not set.__eq__(self.value, snapshot):
            set.clear(self.value)
            set.update(self.value, snapshot)


@final
class _SlotHolder(Holder):
    """The slots of an object's class and of its bases."""

    def _slots(self) -> dict[str, MemberDescriptorType]:
        return {
            name: slot
            for kind in type(self.value).__mro__
            if "__slots__" in vars(kind)
            for name, slot in vars(kind).items()
            if isinstance(slot, MemberDescriptorType)
        }

    def read(self) -> Pairs:
        pairs = []
        for name, slot in self._slots().items():
            try:
                pairs.append((name, slot.__get__(self.value)))
            except AttributeError:  # not bound
                continue
        return pairs

    def write(self, pairs: Pairs) -> None:
        content, bound = dict(pairs), dict(self.read())
        for name, slot in self._slots().items():  # past a frozen class's own __setattr__
            if name in content:
                slot.__set__(self.value, content[name])
            elif name in bound:
                slot.__delete__(self.value)

    def restore(self, snapshot: Any) -> None:
        self.write(snapshot)


_EXACT: dict[type, type[Holder]] = {dict: _DictHolder, list: _ListHolder, deque: _DequeHolder, set: _SetHolder}


def dict_holder(value: dict[Any, Any]) -> Holder:
    """Return the holder of a dictionary, such as an object's attributes."""
    return _DictHolder(value)


def holders(value: Any) -> list[Holder]:
    """Return the places in which one value holds others: its entries, its attributes, its slots."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return []
    if kind in _EXACT:
        return [_EXACT[kind](value)]
    found: list[Holder] = []
    found += [holder(value) for base, holder in _EXACT.items() if isinstance(value, base)]
    if not isinstance(value, _CLOSED) and type(value).__module__.partition(".")[0] not in _CLOSED_PACKAGES:
        attributes = _attributes(value)
        if attributes is not None and attributes is not value:
            found.append(_DictHolder(attributes))
        if any("__slots__" in vars(kind) for kind in type(value).__mro__):
            found.append(_SlotHolder(value))
    return found


def held_by(value: Any) -> Iterator[Any]:
    """Yield what a value holds that may itself hold something, entries of tuples among it; no module's attributes."""
    if isinstance(value, tuple | frozenset):
        yield from (held for held in value if type(held) not in _PLAIN)
    for holder in holders(value):
        yield from (held for _, held in holder.read() if type(held) not in _PLAIN)


def arrays_in(value: Any, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """Yield the tensors and NumPy arrays of floating point numbers in a value, but no parameters."""
    seen: set[int] = set()

    def walk(value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                yield value
        elif isinstance(value, np.ndarray):
            if value.dtype.kind == "f":
                yield value
        elif type(value) not in _PLAIN and id(value) not in seen and deeper(value, depth) >= 0:
            seen.add(id(value))
            for held in held_by(value):
                yield from walk(held, deeper(value, depth))

    yield from walk(value, depth)


def deeper(value: Any, depth: int) -> int:
    """Return how deep to follow what a value holds: an object costs one, a container nothing."""
    return depth if isinstance(value, dict | list | set | deque | tuple | frozenset) else depth - 1


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string or None, which hold nothing."""
    return type(value) in _PLAIN


def has_any(values: Iterable[Any]) -> bool:
    """Return whether there is any, whatever its truth value."""
    return any(True for _ in values)


def _same(first: Collection[Any], second: Collection[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(value, "__dict__")  # a proxy's own, not what it stands for
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None
