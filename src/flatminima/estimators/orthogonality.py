"""Lengths, and what of a vector lies outside the span of orthonormal rows, to rounding and with few passes over the rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatminima.estimators.sampling import check_finite

__all__ = [
    "BREAKDOWN",
    "breakdown_tolerance",
    "checked_lengths",
    "coefficients_in",
    "length",
    "lengths",
    "minus",
    "orthogonalise",
    "remainder",
    "working_dtype",
]

#: A remainder of A v outside the basis counts as rounding below this many eps times the largest ‖A v‖ seen.
BREAKDOWN = 100.0
#: A vector that a pass leaves longer than this part of itself is orthogonal to rounding (Daniel et al. 1976; Parlett 1998, §6.9).
_ENOUGH = 0.7
_SAFE = 1e12


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the data type of basis vectors: ``dtype``, but at least float32."""
    return torch.promote_types(dtype, torch.float32)


def breakdown_tolerance(dtype: torch.dtype) -> float:
    """Return the length, relative to the largest ‖A v‖, below which a remainder of products in ``dtype`` is rounding."""
    return max(BREAKDOWN * torch.finfo(working_dtype(dtype)).eps, 2 * torch.finfo(dtype).eps)


def length(w: Tensor) -> float:
    """Return ‖w‖ for w ``(n,)``, as accurate as a sum in float64.

    The squares of float32 numbers below 1e-19 or above 1e19 leave its range; such lengths are summed in float64, which takes
    four times as long. (``vector_norm`` in float32 adds up one after the other: with 10⁶ entries it is off by 5e-5.)
    """
    if w.dtype != torch.float64:
        size = math.sqrt(float(w.square().sum()))
        if 1 / _SAFE < size < _SAFE:
            return size
    return float(torch.linalg.vector_norm(w, dtype=torch.float64))


def lengths(W: Tensor) -> list[float]:
    """Return the lengths of the rows of W ``(p, n)``."""
    return [length(w) for w in W]


def checked_lengths(W: Tensor) -> list[float]:
    """Return the lengths of rows W ``(p, n)`` that are products with A.

    Raises:
        NonFiniteLoss: If one is infinite or not a number.
    """
    sizes = lengths(W)
    if not all(size < float("inf") for size in sizes):
        check_finite(W)
    return sizes


def orthogonalise(w: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return w ``(n,)`` minus its part in the span of orthonormal rows ``(m, n)``, and that part's coefficients ``(m,)``.

    Classical Gram–Schmidt, and again where it has shortened w much: cancellation then leaves rounding of w's old length.
    """
    rest, coefficients = remainder(w[None], rows, lengths(w[None]))
    return rest[0], coefficients[0]


def remainder(W: Tensor, rows: Tensor, sizes: list[float]) -> tuple[Tensor, Tensor]:
    """Return rows W ``(p, n)`` minus their parts in the span of orthonormal ``rows`` ``(m, n)``, and the coefficients ``(p, m)``.

    Each pass costs 4 n m p operations and reads ``rows`` twice.

    Args:
        W: Vectors, as rows.
        rows: Orthonormal.
        sizes: Lengths of W.
    """
    total = W.new_zeros(W.shape[0], rows.shape[0])
    if not rows.shape[0]:
        return W, total
    for _ in range(2):
        part = coefficients_in(rows, W)
        W, total = minus(W, part, rows), total + part
        before, sizes = sizes, lengths(W)
        if all(after >= _ENOUGH * size for after, size in zip(sizes, before, strict=True)):
            break
    return W, total


def coefficients_in(rows: Tensor, W: Tensor) -> Tensor:
    """Return W rowsᵀ ``(p, m)``; one vector is multiplied as a vector, which is faster than as a matrix of one row."""
    return torch.mv(rows, W[0])[None] if W.shape[0] == 1 else (rows @ W.T).T


def minus(W: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return W − coefficients · rows, a new tensor ``(p, n)``."""
    if W.shape[0] == 1:
        return torch.addmv(W[0], rows.T, coefficients[0], alpha=-1)[None]
    return torch.addmm(W, coefficients, rows, alpha=-1)
