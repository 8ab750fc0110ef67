"""Where modules may keep what they have computed, and how to make them compute it anew.

A kept tensor is made anew after it is replaced by None, or deleted (for ``hasattr``, ``cached_property`` and "not in"), or after
the flag beside it is flipped. Which of these a module understands is found by trial: what a pass writes again is its own.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from flatminima.objective.holders import MAX_DEPTH, Holder, arrays_in, deeper, dict_holder, has_any, holders
from flatminima.objective.module_state import MACHINERY

__all__ = ["Erasure", "erasures", "kept_by"]


@final
@dataclass(frozen=True)
class _Place:
    """Some keys of a holder, with what they hold now."""

    holder: Holder
    content: dict[Any, Any]


@final
@dataclass(frozen=True)
class Erasure:
    """A way of making modules forget what they keep under one name.

    Attributes:
        name: The attribute, such as "weight" or "helper.cache[]" for the entries of a container in an object.
        kind: Name of the class of the first module that has it.
        how: What is done: the entries become None, are deleted, or are flags and flipped.
        places: Where it is done: the same attribute of every module that has it.
    """

    name: str
    kind: str
    how: Literal["none", "delete", "flip"]
    places: tuple[_Place, ...]

    def erase(self) -> None:
        """Forget; for the holder to be restored by whoever remembers its state."""
        for place in self.places:
            pairs = []
            for key, held in place.holder.read():
                if key not in place.content:
                    pairs.append((key, held))
                elif self.how != "delete":
                    pairs.append((key, None if self.how == "none" else not held))
            place.holder.write(pairs)

    def written_again(self) -> bool:
        """Whether since then something was written to a place, so that it is the pass that computes what is kept there."""
        return any(has_any(self._rewritten(place)) for place in self.places)

    def as_before(self, precision: float) -> bool:
        """Whether what was written is, but for rounding, what was kept."""
        return all(_alike(place.content[key], held, precision) for place in self.places for key, held in self._rewritten(place))

    def _rewritten(self, place: _Place) -> Iterator[tuple[Any, Any]]:
        for key, held in place.holder.read():
            if key in place.content:
                if self.how == "flip":
                    if held is place.content[key]:
                        yield key, held
                elif has_any(arrays_in(held)):
                    yield key, held


def kept_by(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Return the attributes in which modules hold arrays other than parameters and buffers, with the class of the module."""
    found: dict[str, str] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in MACHINERY and has_any(arrays_in(value)):
                found.setdefault(name, type(module).__name__)
    return found


def erasures(modules: Iterable[nn.Module]) -> Iterator[Erasure]:
    """Yield the ways of forgetting that modules may have, one name after the other."""
    arrays: dict[str, list[_Place]] = {}
    flags: dict[str, list[_Place]] = {}
    kinds: dict[str, str] = {}
    for module in modules:
        for name, place, is_flag in _places(module):
            (flags if is_flag else arrays).setdefault(name, []).append(place)
            kinds.setdefault(name, type(module).__name__)
    for name, places in arrays.items():
        yield Erasure(name, kinds[name], "none", tuple(places))
        yield Erasure(name, kinds[name], "delete", tuple(places))
    for name, places in flags.items():
        yield Erasure(name, kinds[name], "flip", tuple(places))


def _places(module: nn.Module) -> Iterator[tuple[str, _Place, bool]]:
    """Yield names and places that hold arrays, and flags that the code of a forward pass sets."""
    owners = list(_owners(module))
    stored = _stored_names({type(value) for _, value, _, _ in owners})
    for name, value, holder, depth in owners:
        entries = [(key, held) for key, held in holder.read() if not (value is module and key in MACHINERY)]
        kept = [(key, held) for key, held in entries if has_any(arrays_in(held, depth))]
        if kept and _is_container(value, holder):
            yield f"{name}[]", _Place(holder, dict(kept)), False
            continue
        for key, held in kept:
            yield _joined(name, key), _Place(holder, {key: held}), False
        for key, held in entries:
            if isinstance(held, bool) and key in stored:
                yield _joined(name, key), _Place(holder, {key: held}), True
    if not _own_code([type(module)]):  # the buffers of torch's own modules are no caches
        return
    buffers = dict_holder(vars(module)["_buffers"])
    for key, held in buffers.read():
        if held is not None:
            yield key, _Place(buffers, {key: held}), False


def _owners(module: nn.Module) -> Iterator[tuple[str, Any, Holder, int]]:
    """Yield the module and what it holds that holds something: name, value, place, and how deep to follow from there."""
    seen: set[int] = set()
    attributes = dict_holder(vars(module))
    yield "", module, attributes, MAX_DEPTH
    todo = [(key, held, MAX_DEPTH) for key, held in attributes.read() if key not in MACHINERY]
    while todo:
        name, value, depth = todo.pop()
        depth = deeper(value, depth)
        if isinstance(value, Tensor) or id(value) in seen or depth < 0:
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            todo += [(f"{name}[]", held, depth) for held in value]
        for holder in holders(value):
            yield name, value, holder, depth
            is_container = _is_container(value, holder)
            todo += [(f"{name}[]" if is_container else _joined(name, key), held, depth) for key, held in holder.read()]


def _is_container(value: Any, holder: Holder) -> bool:
    return holder.value is value and isinstance(value, dict | list | set | deque)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _stored_names(kinds: Iterable[type]) -> set[str]:
    """Return the attributes that the code which ``forward`` reaches in these classes assigns to."""
    own = _own_code(kinds)
    stored: set[str] = set()
    seen, todo = set[str](), ["forward", "__call__"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for kind in own:
            for code in _codes(vars(kind).get(name)):
                todo += code.co_names
                stored |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    return stored


def _own_code(kinds: Iterable[type]) -> list[type]:
    """Return the classes and their bases that are not torch's."""
    return [base for kind in kinds for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]


def _codes(member: Any) -> Iterator[CodeType]:
    """Yield the code of a function, a property or a decorated function, with the functions defined inside."""
    found = [getattr(member, attribute, None) for attribute in ("fget", "func", "__func__", "__wrapped__", "__code__")]
    for part in found:
        if isinstance(part, CodeType):
            yield part
            yield from (code for code in part.co_consts if isinstance(code, CodeType))
        elif part is not None:
            yield from _codes(part)


def _alike(first: Any, second: Any, precision: float) -> bool:
    """Whether two values hold, in order, the same arrays but for rounding; flags are alike when they are there."""
    pairs = list(zip(arrays_in(first), arrays_in(second), strict=False))
    for before, after in pairs:
        if tuple(before.shape) != tuple(after.shape):
            return False
        a, b = (
            torch.as_tensor(np.asarray(t) if isinstance(t, np.ndarray) else t).detach().cpu().double() for t in (before, after)
        )
        if float((a - b).norm()) > precision * max(float(a.norm()), 1e-30):
            return False
    return True
