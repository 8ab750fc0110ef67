"""The diagonal of an operator."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from flatminima._progress import Progress, no_progress
from flatminima.estimators import closed_form
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.hutchinson import estimate_diagonal_function
from flatminima.estimators.quantity import DiagonalFunction
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, Plan, check_operator
from flatminima.estimators.stopping import relative_error_of_norm
from flatminima.operators.base import LinearOperator

__all__ = ["diagonal"]


def diagonal(
    A: LinearOperator,
    *,
    method: str = "auto",
    num_products: int | None = None,
    rtol: float | None = None,
    max_products: int = DEFAULT_MAX_PRODUCTS,
    max_seconds: float | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    resume: str | os.PathLike[str] | None = None,
) -> Estimate:
    r"""Return the diagonal of A, exactly where that is cheap and by random probes otherwise.

    .. math:: \hat d = \tfrac1m \sum_i v_i \circ A v_i, \qquad v_i \in \{-1, 1\}^n.

    Unbiased, with variance Σ_{j≠i} A_ij² / m in entry i. There is no choice of probes: any other law of independent entries
    adds (E v⁴ − 1) A_ii² to it, and the terms' symmetry about A_ii, which keeps the t-intervals honest at small m, is lost.
    With "hutch++" the part of A in the span of Q is known exactly and R = (I − QQᵀ) A (I − QQᵀ) is sampled: with Z = A Q,
    d = Σ_columns Q ∘ (2 Z − Q QᵀZ) + diag R. ``"auto"`` goes through the same steps as in :func:`~flatminima.estimators.trace`.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        method: "auto", "exact" (a closed form or n products, whatever the limits below), "hutch++" or "hutchinson" (probes only).
        num_products: Number m of products, exactly so many where a method of probes is named and at most so many otherwise.
        rtol: ‖stderr‖ / ‖value‖ to reach, in Euclidean norms over all entries, so that small entries may have large relative
            errors; 0.02 where neither this nor ``num_products`` is given.
        max_products: Most products under ``rtol``; the estimate then has ``converged=False``.
        max_seconds: Time after which no further block of products is begun.
        generator: Source of the probes.
        progress: Told the number of products.
        resume: A file in which the state is kept while it runs and from which a later call with the same arguments goes on, to
            the same answer: bit for bit, or up to rounding where a large model's products go another way in the new process.
            Removed when the estimate is complete. One product more, which is not counted.

    Returns:
        Estimate with ``value`` and ``stderr`` of shape ``(n,)``.

    Raises:
        ValueError: If ``num_products`` and ``rtol`` are both given, an argument is out of range, or the file of ``resume`` is
            another run's.
        TypeError: If A is not an operator.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    References:
        Bekas, Kokiopoulou & Saad (2007), *An estimator for the diagonal of a matrix*.

    Example:
        >>> from flatminima.operators import as_operator
        >>> diagonal(as_operator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))).value
        tensor([2., 3.])
    """
    check_operator(A)
    plan = Plan.checked(num_products, rtol, max_products, max_seconds, "rademacher", generator, progress)
    return estimate_diagonal_function(A, _DIAGONAL, method, plan, resume)


def _rows(columns: Tensor) -> Tensor:
    return columns.T


def _known(K: LinearOperator) -> Estimate | None:
    return closed_form.known_diagonal(K)


def _deviation(squares: Tensor) -> Tensor:
    return squares.sum().sqrt()  # of all entries together, since the error is that of the norm


_DIAGONAL = DiagonalFunction("diagonal", _rows, relative_error_of_norm, _known, _deviation)
