"""What forward passes write on modules: attributes, and the lists, dictionaries, sets and tensors that attributes hold."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn

__all__ = ["ModuleState", "drop_tensors", "kept_tensors"]

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_MACHINERY = frozenset(vars(nn.Module()))  # torch's own attributes, hooks among them
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_NOT_LOOKED_INTO = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, Tensor)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


@final
class ModuleState:
    """The state of modules at the time each of them was added, to be put back.

    Attributes bound anew, added or deleted are put back whatever they hold. The contents of plain containers and tensors are
    put back also inside other containers. Of other objects that a module holds, attributes and containers are put back, but
    neither the contents of their tensors nor what further objects hold. Parameters are not copied.

    Args:
        buffers: Whether to put the contents of buffers back too; not needed where copies stand in for them.
    """

    def __init__(self, *, buffers: bool = False) -> None:
        self._buffers = buffers
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._objects: dict[int, Any] = {}

    def add(self, module: nn.Module) -> None:
        """Remember a module, without its sub-modules."""
        attributes = vars(module)
        self._attributes.append((attributes, dict(attributes)))
        for name in _REGISTRIES:
            value: Any = attributes.get(name)
            if type(value) in _CONTAINERS:
                self._containers[id(value)] = value, value.copy()
        for name in attributes.keys() - _MACHINERY:
            value = attributes[name]
            if type(value) not in _PLAIN:
                self._keep(value)
        if self._buffers:
            for buffer in module.buffers(recurse=False):
                self._keep(buffer)

    def put_back(self) -> None:
        """Make everything what it was."""
        for container, content in self._containers.values():
            _refill(container, content)
        for attributes, values in self._attributes:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)
        with torch.no_grad():
            for tensor, version, value in self._tensors.values():
                if tensor._version != version or not torch.equal(tensor, value):  # batch norm's kernels count no version
                    tensor.copy_(value)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_leaf and not value.is_inference() and not isinstance(value, nn.Parameter):
                self._tensors[id(value)] = value, value._version, value.detach().clone()
        elif type(value) in _CONTAINERS:
            if id(value) not in self._containers:
                self._containers[id(value)] = value, value.copy()
                self._keep_all(value.values() if isinstance(value, dict) else value)
        elif type(value) is tuple:
            self._keep_all(value)
        elif _has_attributes(value) and id(value) not in self._objects:
            self._objects[id(value)] = value
            attributes = _attributes(value)
            self._attributes.append((attributes, dict(attributes)))
            for held in attributes.values():
                if type(held) in _CONTAINERS:
                    self._containers.setdefault(id(held), (held, held.copy()))

    def _keep_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) not in _PLAIN:
                self._keep(value)


def kept_tensors(modules: Iterable[nn.Module]) -> dict[str, list[nn.Module]]:
    """Return the attributes in which modules hold tensors other than parameters and buffers, by name."""
    found: dict[str, list[nn.Module]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in _MACHINERY and any(True for _ in _tensors_in(value, objects=True)):
                found.setdefault(name, []).append(module)
    return found


def drop_tensors(module: nn.Module, name: str, *, inside: bool) -> None:
    """Take the tensors out of an attribute, so that the next forward pass makes them anew where it can.

    Args:
        module: The module.
        name: The attribute.
        inside: Whether containers inside a container stay, without their tensors; else they go as a whole.
    """
    value = vars(module)[name]
    if _has_attributes(value):
        attributes = _attributes(value)
        for key, held in list(attributes.items()):
            if any(True for _ in _tensors_in(held)):
                _drop(attributes, key, inside=inside)
    else:
        _drop(vars(module), name, inside=inside)


def _drop(attributes: dict[str, Any], name: str, *, inside: bool) -> None:
    if type(attributes[name]) in _CONTAINERS:
        _empty(attributes[name], inside=inside)
    else:
        attributes[name] = None


def _empty(container: Any, *, inside: bool) -> None:
    entries = list(container.items()) if isinstance(container, dict) else list(enumerate(container))
    kept = []
    for key, entry in entries:
        if inside and type(entry) in _CONTAINERS:
            _empty(entry, inside=True)
            kept.append((key, entry))
        elif not any(True for _ in _tensors_in(entry)):
            kept.append((key, entry))
    if len(kept) < len(entries):
        _refill(container, dict(kept) if isinstance(container, dict) else [entry for _, entry in kept])


def _tensors_in(value: Any, *, objects: bool = False) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif objects and _has_attributes(value):
        for held in _attributes(value).values():
            yield from _tensors_in(held)
    elif type(value) in _CONTAINERS or type(value) is tuple:
        for entry in value.values() if isinstance(value, dict) else value:
            if type(entry) not in _PLAIN:
                yield from _tensors_in(entry)


def _has_attributes(value: Any) -> bool:
    """Whether a value is an object of a class that is neither torch's nor a module, with attributes of its own."""
    kind = type(value)
    if not kind.__dictoffset__ or kind in _CONTAINERS or isinstance(value, _NOT_LOOKED_INTO):
        return False
    return kind.__module__.partition(".")[0] != "torch" and type(_attributes(value)) is dict


def _attributes(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")  # a proxy's own, not what it stands for
    return attributes


def _refill(container: Any, content: Any) -> None:
    """Give a container its old content; by identity, for comparing tensors is no yes or no."""
    if isinstance(container, dict):
        if _same(container, content) and _same(container.values(), content.values()):
            return
        container.clear()
        container.update(content)
    elif isinstance(container, set):
        container.clear()
        container.update(content)
    elif not _same(container, content):
        container.clear()
        container.extend(content)


def _same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))
