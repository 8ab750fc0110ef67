"""The diagonal of an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from flatminima._progress import Progress, no_progress
from flatminima.estimators import closed_form
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.hutchinson import DiagonalFunction, estimate_diagonal_function
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, Plan, check_operator, relative_error_of_norm
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
) -> Estimate:
    r"""Return the diagonal of A, exactly where that is cheap and by random probes otherwise.

    .. math:: \hat d = \tfrac1m \sum_i v_i \circ A v_i, \qquad v_i \in \{-1, 1\}^n.

    Unbiased, with variance Σ_{j≠i} A_ij² / m in entry i. There is no choice of probes: any other law of independent entries
    adds (E v⁴ − 1) A_ii² to it, and the terms' symmetry about A_ii, which keeps the t-intervals honest at small m, is lost.
    ``"auto"`` goes through the same steps as in :func:`~flatminima.estimators.trace`.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        method: "auto", "exact" (a closed form or n products, whatever the limits below) or "hutchinson" (probes only).
        num_products: Number m of products, exactly so many where plain probes are used and at most so many otherwise.
        rtol: ‖stderr‖ / ‖value‖ to reach, in Euclidean norms over all entries, so that small entries may have large relative
            errors; 0.02 where neither this nor ``num_products`` is given.
        max_products: Most products under ``rtol``; the estimate then has ``converged=False``.
        max_seconds: Time after which no further block of products is begun.
        generator: Source of the probes.
        progress: Told the number of products.

    Returns:
        Estimate with ``value`` and ``stderr`` of shape ``(n,)``.

    Raises:
        ValueError: If ``num_products`` and ``rtol`` are both given, or an argument is out of range.
        TypeError: If A is not an operator.
        NonFiniteLoss: If a product is infinite or not a number.

    References:
        Bekas, Kokiopoulou & Saad (2007), *An estimator for the diagonal of a matrix*.

    Example:
        >>> from flatminima.operators import as_operator
        >>> diagonal(as_operator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))).value
        tensor([2., 3.])
    """
    check_operator(A)
    plan = Plan.checked(num_products, rtol, max_products, max_seconds, "rademacher", generator, progress)
    return estimate_diagonal_function(A, _DIAGONAL, method, plan)


def _rows(columns: Tensor) -> Tensor:
    return columns.T


def _known(K: LinearOperator) -> Estimate | None:
    return closed_form.known_diagonal(K)


_DIAGONAL = DiagonalFunction("diagonal", _rows, relative_error_of_norm, _known)
