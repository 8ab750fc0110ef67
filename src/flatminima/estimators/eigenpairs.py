"""Eigenvalues at the ends of the spectrum, with their vectors and residuals."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_generator, check_one_of, check_positive
from flatminima._progress import Progress, no_progress
from flatminima.estimators.checkpoint import Checkpoint
from flatminima.estimators.krylov import KrylovSpace
from flatminima.estimators.lanczos import check_start
from flatminima.estimators.orthogonality import length, working_dtype
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, check_finite, check_operator
from flatminima.estimators.spectrum_search import AT_ONCE, Found, Goal, search
from flatminima.objective.digest import digest
from flatminima.operators.base import LinearOperator

__all__ = ["Eigenpairs", "eigenpairs"]

_RTOL = {torch.float64: 1e-8}
_DEFAULT_RTOL = 1e-4
_BASIS_BYTES = 2**28
_BASIS_VECTORS = 256
#: Products that a pair is assumed to take: where so many would reach n, the whole matrix is cheaper.
_DENSE_PER_PAIR = 10


@final
@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues, always in descending algebraic order, and their vectors.

    Attributes:
        values: Shape ``(k,)``, descending.
        vectors: Orthonormal columns, shape ``(n, k)``.
        residuals: ‖A v − λ v‖ of each pair, shape ``(k,)``: by the recursion and a product with all of them, or by a product with
            each if that was asked for. An eigenvalue of A lies within this of λ.
        converged: Whether every residual met the tolerance and the search for missed copies of eigenvalues came to its end.
        num_products: Products with A, those for the residuals included.
        rtol: The tolerance on residuals, relative to the largest |λ| found.
        method: "lanczos", or "dense" where the whole matrix was formed.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: bool
    num_products: int
    rtol: float
    method: str = "lanczos"

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON; the vectors are left out."""
        return {
            "values": self.values.tolist(),
            "residuals": self.residuals.tolist(),
            "converged": self.converged,
            "num_products": self.num_products,
            "rtol": self.rtol,
            "method": self.method,
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
    block_size: int = 1,
    initial: Tensor | None = None,
    residuals: str = "recursion",
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    resume: str | os.PathLike[str] | None = None,
) -> Eigenpairs:
    r"""Return k eigenpairs at an end of the spectrum by the thick-restart Lanczos method, or densely where n is small.

    The whole matrix is formed by n products, and decomposed in float64, where n ≤ 10 times the number of pairs and neither
    ``initial`` nor a smaller ``max_basis``, ``max_products`` or ``max_seconds`` says otherwise.

    Otherwise a Krylov space is built from random directions and kept orthonormal by full re-orthogonalisation. One start
    vector sees only one copy of a multiple eigenvalue. So once all pairs have converged, a random vector orthogonal to the
    space is followed until any further eigenvalue that would change the wanted ones by more than twice the tolerance would
    have shown, but for a probability of 1 %; this takes a few products more, and is repeated until nothing new comes up
    (:mod:`~flatminima.estimators.missed_copies`). It ends at the latest after as many steps as the first search took. No check
    is needed for one pair per end from a random start, or where no value was found as often as there were random starts.

    Memory: ``max_basis`` vectors of length n (and as many as are kept for a moment at a restart); each step costs 4 n m
    operations for the orthogonality, m the vectors at hand.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        k: Number of pairs, 1 … n.
        which: "LA" largest algebraic, "SA" smallest algebraic, "LM" largest magnitude, "BE" the k largest *and* the k smallest
            from one Krylov space (all n values where 2k ≥ n).
        rtol: Residual to reach, relative to the largest |λ| found; 1e-8 in float64 and 1e-4 otherwise by default. The error
            of an isolated eigenvalue is of the order of the residual's square.
        max_products: Most products, at least twice the number of pairs; by default 10 n, but at most
            1000 and 20 for each pair.
        max_seconds: Time after which no further step is taken.
        max_basis: Most basis vectors, beyond which the space is cut back to its best half. By default what fits 256 MiB, at
            most 256, and at least twice the number of pairs and 16.
        block_size: Number of start vectors, and of vectors that are multiplied at once in each step. More take more products
            in all; it pays where A multiplies several vectors for less than as many single ones.
        initial: Vector ``(n,)`` near the wanted eigenvectors, or several ``(n, p)``, such as the vectors of an earlier call. The
            search starts from a random combination of them: p products and a check, where they are eigenvectors already.
        residuals: "recursion" takes the residuals from the recursion and makes one product with a random combination Σ ε_i v_i of
            all vectors; that by which its residual differs from Σ ε_i r_i is added to each. It finds any rounding or asymmetry of
            A's products. "products" makes one product with each vector, all at once: k − 1 more.
        generator: Source of the random vectors.
        progress: Told the number of products.
        resume: A file in which the state is kept while it runs and from which a later call with the same arguments goes on; it
            is removed when the pairs are found.

    Returns:
        Eigenpairs in A's dtype, but at least float32; largest first whatever ``which`` says. ``converged=False`` where a limit
        ended the search.

    Raises:
        ValueError: If an argument is out of range or does not fit A, or ``resume`` is the file of another run.
        TypeError: If A is not an operator, or an argument has the wrong type.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file to resume from is damaged.

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
    check_one_of("residuals", residuals, ("products", "recursion"))
    check_generator(generator)
    num_pairs = min(2 * k, A.size) if which == "BE" else k
    tolerance = _RTOL.get(A.dtype, _DEFAULT_RTOL) if rtol is None else check_positive("rtol", rtol)
    seconds = math.inf if max_seconds is None else check_positive("max_seconds", max_seconds)
    budget = _product_limit(A, num_pairs, max_products)
    basis = _basis_limit(A, num_pairs, max_basis)
    width = min(check_at_least("block_size", block_size, 1), A.size)
    starts = _starts(A, initial)
    goal = Goal(
        which,
        k,
        num_pairs,
        tolerance,
        width,
        width if initial is None else None,
        budget - num_pairs,
        time.monotonic() + seconds,
        progress,
    )
    is_limited = max_seconds is not None or initial is not None or (max_basis is not None and max_basis < A.size)
    is_small = _DENSE_PER_PAIR * num_pairs >= A.size and 8 * A.size**2 <= _BASIS_BYTES
    if is_small and not is_limited and budget >= A.size:
        return _dense(A, goal)
    settings = {"estimator": "eigenpairs", "k": k, "which": which, "rtol": tolerance, "max_products": budget}
    settings |= {
        "max_basis": basis,
        "block_size": width,
        "residuals": residuals,
        "initial": None if starts is None else digest([starts]),
    }
    with A.keeping_graphs(), Checkpoint.open(resume, A, settings, generator) as checkpoint:
        space = KrylovSpace(A, basis, generator)
        if checkpoint.load("search") is None:
            _begin(space, starts, width)
        finish = _finish if residuals == "products" else _finish_by_recursion
        return finish(space, search(space, goal, checkpoint, starts), tolerance)


def _begin(space: KrylovSpace, starts: Tensor | None, width: int) -> None:
    """Start as many chains as a block has vectors: random combinations of the given ones, then random ones."""
    given = [] if starts is None else [starts] * min(width, len(starts))
    for starts in given:
        combination = space.random_signs(len(starts)).to(starts) @ starts
        space.start(combination if float(combination.abs().max()) > 0 else starts[0])
    while len(space.chains) < width and space.start() is not None:
        pass


def _dense(A: LinearOperator, goal: Goal) -> Eigenpairs:
    with A.keeping_graphs():
        M = check_finite(A.to_dense())
    goal.progress(A.size, A.size, "eigenpairs: dense")
    M = M.to("cpu", torch.float64)
    values, vectors = torch.linalg.eigh((M + M.T) / 2)
    wanted = goal.ranking(values)[: goal.num_pairs].sort(descending=True).values
    dtype = working_dtype(A.dtype)
    values, X = values[wanted].to(A.device, dtype), vectors[:, wanted].to(dtype)
    residuals = torch.linalg.vector_norm(M @ X.double() - X.double() * values.to(M), dim=0).to(values)
    return Eigenpairs(values, X.to(A.device), residuals, True, A.size, goal.rtol, "dense")


def _finish(space: KrylovSpace, found: Found, rtol: float) -> Eigenpairs:
    A = space.A
    X = space.vectors(found.S)
    X = X / torch.linalg.vector_norm(X, dim=0)
    num_products = space.num_products
    if found.images is not None:
        AX = found.images.T @ found.S.to(X)
    else:
        AX = torch.cat([check_finite(A @ some) for some in X.to(A.dtype).split(AT_ONCE, dim=1)], dim=1).to(X)
        num_products += X.shape[1]
    values = (X * AX).sum(0, dtype=torch.float64)
    residuals = torch.linalg.vector_norm(AX - X * values.to(X), dim=0, dtype=torch.float64)
    return _result(space, values, X, residuals, num_products, found, rtol)


def _finish_by_recursion(space: KrylovSpace, found: Found, rtol: float) -> Eigenpairs:
    if found.images is not None:
        return _finish(space, found, rtol)
    values, signs = space.rayleigh(found.S), space.random_signs(found.S.shape[1])
    combined = (found.S @ signs)[:, None] / len(signs) ** 0.5
    product = check_finite(space.A @ space.vectors(combined).to(space.A.dtype)).to(space.dtype)
    expected = space.image(combined)
    deviation = length((product - expected)[:, 0]) * len(signs) ** 0.5
    residuals = (space.residuals(found.S) ** 2 + deviation**2).sqrt()
    X = space.vectors(found.S)
    return _result(space, values, X / torch.linalg.vector_norm(X, dim=0), residuals, space.num_products + 1, found, rtol)


def _result(
    space: KrylovSpace, values: Tensor, X: Tensor, residuals: Tensor, num_products: int, found: Found, rtol: float
) -> Eigenpairs:
    """Return the pairs in order; values and residuals are float64."""
    order = values.argsort(descending=True)
    values, X, residuals = values[order].to(X), X[:, order.to(X.device)], residuals[order].to(X)
    # the recursion's residuals met the tolerance; the true ones may differ by rounding
    allowed = (rtol + 1e2 * torch.finfo(space.A.dtype).eps) * space.largest_ritz()
    converged = found.is_met and float(residuals.max()) <= allowed
    return Eigenpairs(values, X, residuals, converged, num_products, rtol)


def _product_limit(A: LinearOperator, num_pairs: int, max_products: int | None) -> int:
    fewest = 2 * num_pairs
    if max_products is None:
        return max(fewest, min(10 * A.size, DEFAULT_MAX_PRODUCTS + 20 * num_pairs))
    return check_at_least("max_products", max_products, fewest, "a basis vector and a residual for each pair")


def _basis_limit(A: LinearOperator, num_pairs: int, max_basis: int | None) -> int:
    if max_basis is not None:
        fewest = min(num_pairs + 2, A.size)
        return min(check_at_least("max_basis", max_basis, fewest, "the pairs, and two vectors to improve them"), A.size)
    fitting = _BASIS_BYTES // (A.size * working_dtype(A.dtype).itemsize)
    return min(A.size, max(2 * num_pairs + 16, min(fitting, _BASIS_VECTORS)))


def _starts(A: LinearOperator, initial: Tensor | None) -> Tensor | None:
    """Return the given vectors as unit rows ``(p, n)``."""
    if initial is None:
        return None
    if not isinstance(initial, Tensor) or initial.ndim not in (1, 2) or initial.shape[0] != A.size or not initial.numel():
        got = tuple(initial.shape) if isinstance(initial, Tensor) else type(initial).__name__
        raise ValueError(f"`initial` must be a tensor of shape ({A.size},) or ({A.size}, p). Got {got}.")
    columns = initial.detach().to(A.device, working_dtype(A.dtype)).reshape(A.size, -1)
    return torch.stack([check_start("initial", column) for column in columns.T])
