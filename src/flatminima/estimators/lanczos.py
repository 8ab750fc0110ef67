"""Lanczos tridiagonalisation with full re-orthogonalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_shape
from flatminima._progress import Progress, no_progress
from flatminima.estimators.orthogonality import (
    BREAKDOWN,
    breakdown_tolerance,
    checked_lengths,
    length,
    lengths,
    minus,
    orthogonalise,
    remainder,
    working_dtype,
)
from flatminima.estimators.sampling import check_operator
from flatminima.operators.base import LinearOperator

__all__ = ["BREAKDOWN", "Tridiagonal", "check_start", "lanczos", "length", "orthogonalise"]


@final
@dataclass(frozen=True, eq=False)
class Tridiagonal:
    r"""The compression T = Vᵀ A V of a symmetric matrix to a Krylov space: :math:`A V = V T + \beta_m v_{m+1} e_m^\top`.

    Attributes:
        alphas: Diagonal of T, shape ``(m,)``, float64.
        betas: Off-diagonal of T, shape ``(m − 1,)``, positive, float64.
        basis: Orthonormal V, shape ``(n, m)``, in A's dtype, but at least float32.
        remainder: β_m, shape ``()``, float64: how far the space is from invariant; 0 after a breakdown.
        breakdown: Whether the space is invariant, so that every eigenvalue of T is one of A.
    """

    alphas: Tensor
    betas: Tensor
    basis: Tensor
    remainder: Tensor
    breakdown: bool

    @property
    def num_products(self) -> int:
        """Products with A: one a step."""
        return self.alphas.shape[0]

    def to_dense(self) -> Tensor:
        """Return T, shape ``(m, m)``."""
        return torch.diag(self.alphas) + torch.diag(self.betas, 1) + torch.diag(self.betas, -1)


def lanczos(A: LinearOperator, v0: Tensor, num_steps: int, *, progress: Progress = no_progress) -> Tridiagonal:
    r"""Build an orthonormal basis of span{v0, A v0, …, A^{m−1} v0} in which A is tridiagonal.

    Every new vector is orthogonalised against all before it, and twice where it has to be, so no eigenvalue appears twice by
    rounding. The recursion ends early, with ``breakdown=True``, when the remainder falls below 100 eps times the largest ‖A v‖
    seen: the space is then invariant, and a spectrum {2, 2, 2, 5, 5, 5} gives the two values 2 and 5 (copies of an eigenvalue
    are invisible from one start vector).

    Cost: at most ``num_steps`` products, n m numbers of memory, and 2 n m² operations for the orthogonality.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        v0: Start vector ``(n,)`` of any length but 0, on A's device.
        num_steps: Most steps m; the result has fewer after a breakdown, and never more than n.
        progress: Told the number of steps.

    Returns:
        The tridiagonal matrix in float64, and its basis.

    Raises:
        ValueError: If ``v0`` is zero, not finite, or of the wrong shape, or ``num_steps < 1``.
        TypeError: If A is not an operator, v0 not a tensor, or ``num_steps`` not an integer.
        NonFiniteLoss: If a product is infinite or not a number.

    References:
        Lanczos (1950); Golub & Van Loan, *Matrix Computations*, on complete re-orthogonalisation.

    Example:
        >>> from flatminima.operators import as_operator
        >>> A = as_operator(torch.diag(torch.tensor([2.0, 2.0, 5.0, 5.0])))
        >>> T = lanczos(A, torch.ones(4), num_steps=4)
        >>> T.breakdown, torch.linalg.eigvalsh(T.to_dense()).round(decimals=4).tolist()
        (True, [2.0, 5.0])
    """
    check_operator(A)
    check_shape("v0", v0, (A.size,), "one entry per row of A")
    num_steps = min(check_at_least("num_steps", num_steps, 1), A.size)
    v = check_start("v0", v0.to(working_dtype(A.dtype)))
    rows = torch.empty(num_steps, A.size, dtype=v.dtype, device=A.device)
    alphas: list[float] = []
    betas: list[float] = []
    scale, tolerance = 0.0, breakdown_tolerance(A.dtype)
    with A.keeping_graphs():
        while True:
            step = len(alphas)
            rows[step] = v
            w = (A @ v.to(A.dtype)).to(v)[None]
            scale = max(scale, *checked_lengths(w))
            w, alpha = _advance(w, rows[: step + 1], betas[-1:])
            alphas.append(alpha)
            beta = length(w)
            progress(step + 1, num_steps, "Lanczos")
            is_invariant = step + 1 == A.size or beta <= tolerance * scale
            if is_invariant or step + 1 == num_steps:
                break
            betas.append(beta)
            v = w / beta
    rest = 0.0 if is_invariant else beta
    T = torch.tensor([*alphas, *betas, rest], dtype=torch.float64, device=A.device).split([len(alphas), len(betas), 1])
    return Tridiagonal(T[0], T[1], rows[: len(alphas)].T, T[2][0], is_invariant)


def _advance(w: Tensor, rows: Tensor, beta: list[float]) -> tuple[Tensor, float]:
    """Return what of w = A v ``(1, n)`` lies outside the rows, of which v is the last, and α = vᵀ A v.

    The three-term recursion takes away what is known; the pass over all rows then finds rounding only, and one suffices.
    """
    alpha = (w * rows[-1]).sum()
    known = torch.stack([*alpha.new_tensor(beta), alpha])[None]
    w = minus(w, known, rows[-known.shape[1] :])
    w, rest = remainder(w, rows, lengths(w))
    return w[0], float(alpha) + float(rest[0, -1])


def check_start(name: str, v: Tensor) -> Tensor:
    """Return ``v`` scaled to length 1, detached."""
    v = v.detach()
    largest = v.abs().max()
    if not 0 < float(largest) < float("inf"):
        raise ValueError(f"`{name}` must be a finite vector other than 0 (it spans the first direction). Got one that is not.")
    v = v / largest  # the squares of very large or small entries would leave the range
    unit: Tensor = v / torch.linalg.vector_norm(v)
    return unit
