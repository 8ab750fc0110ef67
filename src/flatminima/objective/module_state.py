"""What forward passes write on modules, remembered and put back."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from flatminima.objective.holders import MAX_DEPTH, Holder, deeper, dict_holder, held_by, holders, is_plain

__all__ = ["MACHINERY", "ModuleState"]

#: Names of torch's own attributes of a module, hooks among them.
MACHINERY = frozenset(vars(nn.Module()))
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_LARGEST_IN_OBJECT = 2**22  # bytes


@final
class ModuleState:
    """The state of modules at the time they were added, to be put back.

    Attributes bound anew, added or deleted are put back whatever they hold. From the attributes on, containers, tuples and
    objects are followed (objects in objects four deep; not those of torch, NumPy and the standard library), and their entries,
    attributes and slots are put back by identity. So are the numbers in leaf tensors, NumPy arrays and byte arrays that are
    found on the way; those that objects hold, up to 4 MiB each. Modules that are held without being registered count as
    modules. The numbers in parameters are put back only on request.

    Args:
        buffers: Whether to put the contents of buffers back too; not needed where copies stand in for them.
        parameters: Whether to put the contents of parameters back too.
        except_for: Identities of tensors whose contents are somebody else's business.
    """

    def __init__(self, *, buffers: bool = False, parameters: bool = False, except_for: Collection[int] = ()) -> None:
        self._buffers, self._parameters, self._except_for = buffers, parameters, except_for
        self._modules: set[int] = set()
        self._seen: dict[int, Any] = {}  # with the value, so that no other gets its identity
        self._holders: list[tuple[Holder, Any]] = []
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._arrays: dict[int, tuple[Any, Any]] = {}

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Remember modules, without those of their sub-modules that are not among them."""
        new = [module for module in modules if id(module) not in self._modules]
        self._modules |= {id(module) for module in new}
        for module in new:
            self._add(module, registered=True)

    def put_back(self) -> None:
        """Make everything what it was."""
        for holder, snapshot in self._holders:
            holder.restore(snapshot)
        with torch.no_grad():
            for tensor, version, value in self._tensors.values():
                if tensor._version != version or not torch.equal(tensor, value):  # batch norm's kernels count no version
                    tensor.copy_(value)
        for numbers, content in self._arrays.values():
            if isinstance(numbers, np.ndarray):
                if not np.array_equal(numbers, content):
                    numbers[...] = content
            elif numbers != content:
                numbers[:] = content

    def _add(self, module: nn.Module, *, registered: bool) -> None:
        attributes = vars(module)
        self._remember(dict_holder(attributes))
        for name in _REGISTRIES:
            if isinstance(attributes.get(name), dict | set):
                self._remember(*holders(attributes[name]))
        for name, value in attributes.items():
            if name not in MACHINERY and not is_plain(value):
                self._keep(value, MAX_DEPTH)
        if self._buffers or not registered:
            for buffer in module.buffers(recurse=False):
                self._keep(buffer, MAX_DEPTH)
        if self._parameters:
            for parameter in module.parameters(recurse=False):
                self._keep_tensor(parameter)

    def _remember(self, *found: Holder) -> None:
        self._holders += [(holder, holder.snapshot()) for holder in found]

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and (depth == MAX_DEPTH or value.nbytes <= _LARGEST_IN_OBJECT):
                self._keep_tensor(value)
        elif isinstance(value, np.ndarray | bytearray | array):
            self._keep_array(value, depth)
        elif isinstance(value, nn.Module):
            if id(value) not in self._modules:
                for module in value.modules():
                    if id(module) not in self._modules:
                        self._modules.add(id(module))
                        self._add(module, registered=False)
        elif deeper(value, depth) >= 0 and id(value) not in self._seen:
            found = holders(value)
            if found or isinstance(value, tuple | frozenset):
                self._seen[id(value)] = value
                self._remember(*found)
                for held in held_by(value):
                    self._keep(held, deeper(value, depth))

    def _keep_tensor(self, tensor: Tensor) -> None:
        if tensor.is_leaf and not tensor.is_inference() and id(tensor) not in self._except_for:
            self._tensors.setdefault(id(tensor), (tensor, tensor._version, tensor.detach().clone()))

    def _keep_array(self, numbers: Any, depth: int) -> None:
        if isinstance(numbers, np.ndarray):
            if numbers.flags.writeable and (depth == MAX_DEPTH or numbers.nbytes <= _LARGEST_IN_OBJECT):
                self._arrays.setdefault(id(numbers), (numbers, numbers.copy()))
        elif depth == MAX_DEPTH or len(numbers) <= _LARGEST_IN_OBJECT:
            self._arrays.setdefault(id(numbers), (numbers, numbers[:]))
