"""A matrix U Uᵀ of few columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

from flatminima.operators.base import LinearOperator

__all__ = ["LowRank"]


@final
class LowRank(LinearOperator):
    """U Uᵀ, positive semi-definite, of rank at most r.

    Attributes:
        U: Shape ``(n, r)``.
    """

    def __init__(self, U: Tensor, blocks: Mapping[str, slice]) -> None:
        self.U, self._blocks = U.detach(), MappingProxyType(dict(blocks))

    @property
    def size(self) -> int:
        return self.U.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.U.dtype

    @property
    def device(self) -> torch.device:
        return self.U.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self._blocks

    def diagonal(self) -> Tensor:
        """Return the diagonal ``(n,)``."""
        return self.U.square().sum(1)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.U @ (self.U.T @ V)

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        blocks, start = {}, 0
        for name in names:
            length = self._blocks[name].stop - self._blocks[name].start
            blocks[name] = slice(start, start + length)
            start += length
        return LowRank(torch.cat([self.U[self._blocks[name]] for name in names]), blocks)
