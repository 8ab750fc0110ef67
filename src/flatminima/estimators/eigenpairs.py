"""Eigenvalues at the ends of the spectrum, with their vectors and residuals."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_generator, check_one_of, check_positive
from flatminima._progress import Progress, no_progress
from flatminima.estimators.krylov import KrylovSpace
from flatminima.estimators.lanczos import check_start
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, check_finite, check_operator
from flatminima.estimators.spectrum_search import Goal, search
from flatminima.operators.base import LinearOperator

__all__ = ["Eigenpairs", "eigenpairs"]

_RTOL = {torch.float32: 1e-4, torch.float64: 1e-8}
_BASIS_BYTES = 2**28
_BASIS_VECTORS = 256
_AT_ONCE = 16


@final
@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues, always in descending algebraic order, and their vectors.

    Attributes:
        values: Shape ``(k,)``, descending.
        vectors: Orthonormal columns, shape ``(n, k)``.
        residuals: ‖A v − λ v‖ of each pair, shape ``(k,)``, by a product made for it. An eigenvalue of A lies within this of λ.
        converged: Whether every residual met the tolerance and the search for missed copies of eigenvalues came to its end.
        num_products: Products with A, those for the residuals included.
        rtol: The tolerance on residuals, relative to the largest |λ| found.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: bool
    num_products: int
    rtol: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON; the vectors are left out."""
        return {
            "values": self.values.tolist(),
            "residuals": self.residuals.tolist(),
            "converged": self.converged,
            "num_products": self.num_products,
            "rtol": self.rtol,
        }


def eigenpairs(
    A: LinearOperator,
    k: int = 1,
    *,
    which: str = "LA",
    rtol: float | None = None,
    max_products: int | None = None,
    max_seconds: float | None = None,
    max_basis: int | None = None,
    initial: Tensor | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
) -> Eigenpairs:
    r"""Return k eigenpairs at an end of the spectrum by the thick-restart Lanczos method.

    The basis is kept orthonormal by full re-orthogonalisation. One start vector sees only one copy of a multiple eigenvalue.
    So when several pairs are asked for, or the start was given, a random vector orthogonal to all that was found is followed
    until a missed eigenvalue beyond the k-th would have shown: a direction that it holds with weight 1/√n outgrows the rest
    of the spectrum, as Chebyshev polynomials say, after arccosh(10 √n) / arccosh(1 + 2γ) steps, γ the relative gap. This
    is repeated until nothing new comes up. It takes at most as many steps as the first search took, or as γ = 1/1000 asks for
    if that is more, unless copies *are* found. One pair per end from a random start needs no such check.

    Memory: ``max_basis`` vectors of length n (and as many as are kept for a moment at a restart); each step costs 4 n m
    operations for the orthogonality, m the vectors at hand.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        k: Number of pairs, 1 … n.
        which: "LA" largest algebraic, "SA" smallest algebraic, "LM" largest magnitude, "BE" the k largest *and* the k smallest
            from one Krylov space (all n values where 2k ≥ n).
        rtol: Residual to reach, relative to the largest |λ| found; 1e-8 in float64 and 1e-4 in float32 by default. The error
            of an isolated eigenvalue is of the order of the residual's square.
        max_products: Most products, at least twice the number of pairs; by default 10 n, but at most
            1000 and 20 for each pair.
        max_seconds: Time after which no further step is taken.
        max_basis: Most basis vectors, beyond which the space is cut back to its best half. By default what fits 256 MiB, at
            most 256, and at least twice the number of pairs and 16.
        initial: Start vector ``(n,)``, or several ``(n, p)``, such as the vectors of an earlier call.
        generator: Source of the random start vectors.
        progress: Told the number of products.

    Returns:
        Eigenpairs in A's dtype, largest first whatever ``which`` says. ``converged=False`` where a limit ended the search.

    Raises:
        ValueError: If an argument is out of range or does not fit A.
        TypeError: If A is not an operator, or an argument has the wrong type.
        NonFiniteLoss: If a product is infinite or not a number.

    References:
        Wu & Simon (2000), *Thick-restart Lanczos method for large symmetric eigenvalue problems*; Kuczyński & Woźniakowski
        (1992) for what a random start vector can miss.

    Example:
        >>> from flatminima.operators import as_operator
        >>> A = as_operator(torch.diag(torch.tensor([3.0, -5.0, 1.0])))
        >>> eigenpairs(A, which="SA").values, eigenpairs(A, which="BE").values
        (tensor([-5.]), tensor([ 3., -5.]))
    """
    check_operator(A)
    check_at_least("k", k, 1)
    if k > A.size:
        raise ValueError(f"`k` must be at most {A.size} (a matrix of {A.size} rows has no more eigenvalues). Got {k}.")
    check_one_of("which", which, ("LA", "SA", "LM", "BE"))
    check_generator(generator)
    num_pairs = min(2 * k, A.size) if which == "BE" else k
    tolerance = _RTOL.get(A.dtype, 1e-4) if rtol is None else check_positive("rtol", rtol)
    seconds = math.inf if max_seconds is None else check_positive("max_seconds", max_seconds)
    budget = _product_limit(A, num_pairs, max_products)
    space = KrylovSpace(A, _basis_limit(A, num_pairs, max_basis), generator)
    for v in _starts(A, initial):
        space.start(v)
    if not space.chains:
        space.start()
    goal = Goal(which, k, num_pairs, tolerance, budget - num_pairs, time.monotonic() + seconds, progress)
    S, is_complete = search(space, goal, is_random=initial is None)
    return _finish(A, space, S, tolerance, is_complete)


def _finish(A: LinearOperator, space: KrylovSpace, S: Tensor, rtol: float, is_complete: bool) -> Eigenpairs:
    X = space.vectors(S)
    X = X / torch.linalg.vector_norm(X, dim=0)
    AX = torch.cat([check_finite(A @ some) for some in X.split(_AT_ONCE, dim=1)], dim=1)
    values = (X * AX).sum(0, dtype=torch.float64)
    order = values.argsort(descending=True)
    values, X, AX = values[order].to(A.dtype), X[:, order], AX[:, order]
    residuals = torch.linalg.vector_norm(AX - X * values, dim=0, dtype=torch.float64).to(A.dtype)
    # the recursion's residuals met the tolerance; the true ones may differ by rounding
    allowed = (rtol + 1e2 * torch.finfo(A.dtype).eps) * float(space.ritz()[0].abs().max())
    converged = is_complete and float(residuals.max()) <= allowed
    return Eigenpairs(values, X, residuals, converged, space.num_products + X.shape[1], rtol)


def _product_limit(A: LinearOperator, num_pairs: int, max_products: int | None) -> int:
    fewest = 2 * num_pairs
    if max_products is None:
        return max(fewest, min(10 * A.size, DEFAULT_MAX_PRODUCTS + 20 * num_pairs))
    return check_at_least("max_products", max_products, fewest, "a basis vector and a residual for each pair")


def _basis_limit(A: LinearOperator, num_pairs: int, max_basis: int | None) -> int:
    if max_basis is not None:
        fewest = min(num_pairs + 2, A.size)
        return min(check_at_least("max_basis", max_basis, fewest, "the pairs, and two vectors to improve them"), A.size)
    fitting = _BASIS_BYTES // (A.size * torch.finfo(A.dtype).bits // 8)
    return min(A.size, max(2 * num_pairs + 16, min(fitting, _BASIS_VECTORS)))


def _starts(A: LinearOperator, initial: Tensor | None) -> list[Tensor]:
    if initial is None:
        return []
    if not isinstance(initial, Tensor) or initial.ndim not in (1, 2) or initial.shape[0] != A.size or not initial.numel():
        got = tuple(initial.shape) if isinstance(initial, Tensor) else type(initial).__name__
        raise ValueError(f"`initial` must be a tensor of shape ({A.size},) or ({A.size}, p). Got {got}.")
    columns = initial.detach().to(A.device, A.dtype).reshape(A.size, -1)
    return [check_start("initial", column) for column in columns.T]
