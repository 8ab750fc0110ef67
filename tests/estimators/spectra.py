"""Matrices with a known spectrum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flatminima.operators import LinearOperator, as_operator


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rotated(values: Tensor | Sequence[float], seed: int = 0) -> Tensor:
    """Return Q diag(values) Qᵀ with a random orthogonal Q, exactly symmetric."""
    d = torch.as_tensor(values, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(d.numel(), d.numel(), generator=rng(seed), dtype=torch.float64))[0]
    M = (Q * d) @ Q.T
    return (M + M.T) / 2


def diag(*values: float, dtype: torch.dtype = torch.float64, blocks: Mapping[str, slice] | None = None) -> LinearOperator:
    return as_operator(torch.diag(torch.tensor(values, dtype=dtype)), blocks=blocks)


def indefinite(n: int = 60) -> Tensor:
    return torch.linspace(-1, 2, n, dtype=torch.float64)


def decaying(n: int = 60) -> Tensor:
    return torch.arange(1, n + 1, dtype=torch.float64) ** -0.75
