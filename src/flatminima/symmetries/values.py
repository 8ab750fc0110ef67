"""What the walk over the graph knows of each tensor: which unit every entry belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Activation", "Affine", "BufferRef", "ParameterView", "Term", "Value", "compressed", "fixed_activation"]


@dataclass(frozen=True)
class Term:
    """How the entries of one parameter or buffer follow the units.

    Attributes:
        ids: Unit ids, broadcastable to the tensor's shape.
        exponent: The entry is multiplied by the unit's scale to this power: +1 for what produces the unit, −1 for what
            reads it, 0 for what only moves along when units are reordered.
        axis: Axis along which entries are reordered with their units; None if another term's axis carries them.
    """

    ids: Tensor
    exponent: int
    axis: int | None


@dataclass(frozen=True)
class Affine:
    """The layer whose output an activation is, up to rearrangement and constant factors.

    Attributes:
        weight: Name of its weight.
        weight_axis: The weight's axis of units.
        bias: Name of its bias, if it has one.
        ids: Unit of every output.
        is_normalised: Whether a softmax or log-softmax has been taken of it.
    """

    weight: str
    weight_axis: int
    bias: str | None
    ids: Tensor
    is_normalised: bool = False


@dataclass(frozen=True)
class Activation:
    """A tensor that depends on the network's inputs or on unknown things.

    Attributes:
        ids: Unit id of every entry; same number of axes as the tensor, size 1 along axes on which the id does not depend.
        shape: Shape of the tensor.
        affine: The layer that it comes from, if nothing but rearrangement lies between.
    """

    ids: Tensor
    shape: torch.Size
    affine: Affine | None = None

    def full_ids(self) -> Tensor:
        """Return the ids expanded (without a copy) to the tensor's shape."""
        return self.ids.expand(self.shape)

    def varies_along(self) -> tuple[int, ...]:
        """Return the axes along which the unit changes."""
        return tuple(axis for axis, size in enumerate(self.ids.shape) if size > 1)

    def ids_along(self, axis: int) -> Tensor | None:
        """Return the ids along one axis, shape ``(shape[axis],)``, or None if they change along another axis too."""
        axis %= len(self.shape)
        if any(a != axis for a in self.varies_along()):
            return None
        return self.ids.reshape(-1).expand(self.shape[axis])

    def is_fixed(self) -> bool:
        """Return whether no unit other than the fixed one is in it."""
        return not bool(self.ids.any())


@dataclass(frozen=True)
class ParameterView:
    """A parameter, possibly with its axes in another order: axis d of the view is axis ``dims[d]`` of the parameter."""

    name: str
    shape: torch.Size
    dims: tuple[int, ...]

    def permuted(self, order: tuple[int, ...]) -> ParameterView:
        """Return the view with axis d taken from axis ``order[d]``."""
        return ParameterView(self.name, torch.Size(self.shape[d] for d in order), tuple(self.dims[d] for d in order))

    def term(self, ids: Tensor, view_axis: int, exponent: int, *, moves: bool = True) -> Term:
        """Return the term of ids ``(shape[view_axis],)`` along one axis of the view."""
        shape = [1] * len(self.shape)
        shape[self.dims[view_axis]] = ids.numel()
        return Term(ids.reshape(shape), exponent, self.dims[view_axis] if moves else None)

    def to_parameter_axes(self, ids: Tensor) -> Tensor:
        """Return ids given in the view's axes, in the parameter's axes."""
        return ids.permute(tuple(self.dims.index(d) for d in range(len(self.dims))))


@dataclass(frozen=True)
class BufferRef:
    """A buffer of the model, not yet touched by any operation."""

    name: str
    shape: torch.Size


#: A traced value: one of the above, a tuple of them, or a Python constant.
Value = object


def compressed(ids: Tensor) -> Tensor:
    """Return the ids with size 1 along every axis on which they do not change."""
    for axis in range(ids.ndim):
        if ids.shape[axis] > 1 and (ids.stride(axis) == 0 or bool((ids == ids.narrow(axis, 0, 1)).all())):
            ids = ids.narrow(axis, 0, 1)
    return ids.contiguous()


def fixed_activation(shape: torch.Size) -> Activation:
    """Return a tensor all of whose entries are fixed."""
    return Activation(torch.zeros([1] * len(shape), dtype=torch.int64), shape)
