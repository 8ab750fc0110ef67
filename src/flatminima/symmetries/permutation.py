"""Permutation: hidden units or channels in another order, everything that belongs to them along with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from flatminima._checks import check_shape
from flatminima.params import ParameterSpace
from flatminima.symmetries.move import Layout, Move
from flatminima.symmetries.symmetry import Symmetry
from flatminima.symmetries.units import IntArray
from flatminima.symmetries.values import Term

__all__ = ["Permutation", "PermutationMove"]


@final
class Permutation(Symmetry):
    """Any reordering of the rows of each cell of exchangeable units.

    Attributes:
        cells: Unit ids, one array ``(rows, roles)`` a cell: the units of a row move together.
        labels: Name of the layer that each cell belongs to.
        terms: For each tensor, the units along each axis that is reordered.
    """

    kind = "permutation"
    dimension = 0

    def __init__(
        self,
        layout: Layout,
        cells: Sequence[IntArray],
        labels: Sequence[str],
        terms: Mapping[str, tuple[Term, ...]],
        num_units: int,
        *,
        buffers: tuple[str, ...] = (),
    ) -> None:
        self.layout = layout
        self.cells = tuple(cells)
        self.labels = tuple(labels)
        self.terms = terms
        self.num_units = num_units
        self.buffers = buffers
        self.parameters = tuple(name for name in terms if name not in buffers)
        self.name = f"reordering of {sum(len(c) for c in self.cells)} hidden units in {len(self.cells)} sets"

    def move(self, orders: Sequence[Tensor]) -> PermutationMove:
        """Return the move that puts row ``orders[c][i]`` of cell c in place i.

        Raises:
            ValueError: If there is not one permutation ``(rows,)`` for each cell.
        """
        if len(orders) != len(self.cells):
            raise ValueError(f"`orders` must hold one permutation for each of {len(self.cells)} cells. Got {len(orders)}.")
        source = np.arange(self.num_units)
        for cell, order in zip(self.cells, orders, strict=True):
            rows = check_shape("orders", order, (len(cell),)).cpu().numpy()
            if not np.array_equal(np.sort(rows), np.arange(len(cell))):
                raise ValueError(f"`orders` must hold permutations of 0 … {len(cell) - 1}. Got {rows.tolist()}.")
            source[cell] = cell[rows]
        return PermutationMove(self, torch.from_numpy(source))

    def _random(self, generator: torch.Generator | None, scale: float, state: Mapping[str, Tensor]) -> PermutationMove:
        device = torch.device("cpu") if generator is None else generator.device
        return self.move([torch.randperm(len(cell), generator=generator, device=device) for cell in self.cells])

    def describe(self) -> str:
        digits = sum(math.lgamma(len(cell) + 1) for cell in self.cells) / math.log(10)
        return f"permutation: {self.name} (finite: about 10^{digits:.1f} orders)"


@final
class PermutationMove(Move):
    """The move after which unit k is what unit ``source[k]`` was, ``source`` of shape ``(units,)``."""

    def __init__(self, symmetry: Permutation, source: Tensor) -> None:
        self.symmetry = symmetry
        self.layout = symmetry.layout
        self.source = source

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.symmetry.terms)

    def inverse(self) -> PermutationMove:
        return PermutationMove(self.symmetry, torch.argsort(self.source))

    def index(self, space: ParameterSpace) -> Tensor:
        """Return the positions ``(n,)`` such that the new θ is ``θ[index]``."""
        positions = space.unflatten(torch.arange(space.size, dtype=torch.float64))
        return space.flatten(self.apply_state(positions)).long()

    def _change(self, name: str, value: Tensor) -> Tensor:
        for term in self.symmetry.terms[name]:
            if term.axis is not None:
                places = _places(term.ids, self.source, term.axis).to(value.device)
                value = value.gather(term.axis, places.expand(value.shape))
        return value


def _places(ids: Tensor, source: Tensor, axis: int) -> Tensor:
    """Return from which place along ``axis`` each place is filled, broadcastable like ``ids``.

    The k-th place of a unit is filled from the k-th place of the unit that it becomes: after a flatten one channel has
    many places.
    """
    lines = ids.movedim(axis, -1)
    length = lines.shape[-1]
    offsets = torch.arange(lines[..., 0].numel()).reshape(*lines.shape[:-1], 1)
    keys = (lines + offsets * len(source)).reshape(-1)
    wanted = (source[lines] + offsets * len(source)).reshape(-1)
    have, want = torch.argsort(keys, stable=True), torch.argsort(wanted, stable=True)
    filled = torch.empty_like(have)
    filled[want] = have
    return (filled.reshape(lines.shape) - offsets * length).movedim(-1, axis)
