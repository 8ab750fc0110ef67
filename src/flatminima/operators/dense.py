"""A matrix in memory as an operator, so that estimators can be tried on a known spectrum."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from flatminima.operators.base import LinearOperator

__all__ = ["Dense", "as_operator"]


def as_operator(matrix: Tensor, *, blocks: Mapping[str, slice] | None = None) -> LinearOperator:
    """Return a plain symmetric matrix as an operator, so that estimators can be tried on a known spectrum.

    Args:
        matrix: Symmetric, real, shape ``(n, n)``.
        blocks: Named ranges of rows; one block ``"all"`` by default.

    Raises:
        ValueError: If the matrix is not square, not real floating point, or not symmetric, or the blocks do not cover its rows.

    Example:
        >>> A = as_operator(torch.diag(torch.tensor([1.0, 2.0])))
        >>> A @ torch.ones(2)
        tensor([1., 2.])
    """
    return Dense(matrix, blocks)


@final
class Dense(LinearOperator):
    """A matrix that is held in memory."""

    def __init__(self, matrix: Tensor, blocks: Mapping[str, slice] | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ValueError(f"`matrix` must be a tensor of shape (n, n). Got {got}.")
        if not matrix.dtype.is_floating_point:
            raise ValueError(f"`matrix` must be real floating point. Got {matrix.dtype}. Call .double().")
        scale = matrix.abs().max() if matrix.numel() else matrix.new_zeros(())
        if matrix.numel() and (matrix - matrix.T).abs().max() > 1e2 * torch.finfo(matrix.dtype).eps * scale:
            raise ValueError("`matrix` must be symmetric. Got one that is not. Pass (A + A.T) / 2 if that is what you mean.")
        self._matrix = matrix.detach()
        self._blocks = _checked_blocks(blocks or {"all": slice(0, matrix.shape[0])}, matrix.shape[0])

    @property
    def size(self) -> int:
        return self._matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        return self._matrix.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self._blocks

    def _matmat(self, V: Tensor) -> Tensor:
        return self._matrix @ V


def _checked_blocks(blocks: Mapping[str, slice], size: int) -> Mapping[str, slice]:
    """Return the blocks, if they cover the rows one after the other: only then do block traces add up to the trace."""
    end = 0
    for name, rows in blocks.items():
        if not isinstance(rows, slice) or rows.start != end or rows.step not in (None, 1) or not end <= rows.stop <= size:
            raise ValueError(
                f"`blocks` must be slices that cover the {size} rows in order. Got {name!r}: {rows} after row {end}."
            )
        end = rows.stop
    if end != size:
        raise ValueError(f"`blocks` must cover all {size} rows. Got blocks that end at row {end}.")
    return MappingProxyType(dict(blocks))
