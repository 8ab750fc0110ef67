"""Units whose row is zero: what reads them does not matter, and at the limit of the rescalings it is zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, final

import torch
from torch import Tensor

from flatminima.symmetries.move import Move
from flatminima.symmetries.rescaling import Rescaling

__all__ = ["ClearingMove", "clearing_move"]


def clearing_move(symmetry: Rescaling, state: Mapping[str, Tensor]) -> ClearingMove | None:
    """Return the move that sets to zero whatever reads a unit whose row and bias are zero, or None if there is no such unit.

    Such a unit is zero for every input, and so is what a positively homogeneous function makes of it: the function stays. The
    move is the limit s → ∞ of the unit's rescaling. Zeroes may leave another unit without a row, which is then cleared too.
    """
    squares = {name: state[name].detach().double().cpu().square() for name in symmetry.roles}
    cleared = torch.zeros(symmetry.dimension + 1, dtype=torch.bool)  # variable −1 is the last
    while True:
        keep = {name: ~_reads(symmetry, name, cleared) for name in squares}
        rows = torch.zeros(symmetry.dimension + 1, dtype=torch.float64)
        for name, square in squares.items():
            for role in symmetry.roles[name]:
                if role.exponent > 0:
                    variables = (role.variables % len(rows)).expand(square.shape).reshape(-1)
                    rows.index_add_(0, variables, (square * keep[name]).reshape(-1))
        zero = rows == 0
        zero[-1] = False
        if torch.equal(zero, cleared):
            break
        cleared = zero
    changes = {name: kept for name, kept in keep.items() if bool((squares[name] * ~kept).any())}
    return ClearingMove(symmetry, changes) if changes else None


def _reads(symmetry: Rescaling, name: str, cleared: Tensor) -> Tensor:
    """Return which entries of a tensor read one of the cleared units."""
    found = torch.zeros((), dtype=torch.bool)
    for role in symmetry.roles[name]:
        if role.exponent < 0:
            found = found | cleared[role.variables]
    return found


@final
class ClearingMove(Move):
    """The move that sets to zero what reads units without a row; it cannot be undone."""

    def __init__(self, symmetry: Rescaling, keep: Mapping[str, Tensor]) -> None:
        self.layout = symmetry.layout
        self.keep = keep

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.keep)

    def inverse(self) -> NoReturn:
        raise ValueError("`inverse` must be asked of a move that keeps all numbers. Got one that sets some to zero.")

    def _change(self, name: str, value: Tensor) -> Tensor:
        return value * self.keep[name].to(value.device)

    def _log_factor(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self.keep:
            return torch.zeros([1] * len(shape), dtype=torch.float64)
        return self.keep[name].double().log()
