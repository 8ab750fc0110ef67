"""The Frobenius norm of an operator."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flatminima._checks import check_one_of
from flatminima._progress import Progress, no_progress
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.quantity import Quantity, by_probes, by_unit_vectors
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, Plan, check_operator
from flatminima.operators.base import LinearOperator

__all__ = ["frobenius_norm"]


def frobenius_norm(
    A: LinearOperator,
    *,
    method: str = "auto",
    num_products: int | None = None,
    rtol: float | None = None,
    max_products: int = DEFAULT_MAX_PRODUCTS,
    max_seconds: float | None = None,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
) -> Estimate:
    r"""Return ‖A‖_F, the root of the sum of the squared eigenvalues.

    .. math:: \|A\|_F^2 = \mathbb E \|A v\|^2 \approx \tfrac1m \sum_i \|A v_i\|^2, \qquad \mathbb E[v_i v_i^\top] = I.

    One term of the square has variance 2(‖A²‖_F² − Σ (A²)_ii²) with Rademacher probes and 2 Tr A⁴ with Gaussian ones. The
    standard error is carried through the root by the delta method, se(‖A‖_F) = se(‖A‖_F²) / (2‖A‖_F); the root is biased low
    by se²/(2‖A‖_F), far below the error itself. ``"auto"`` makes n exact products where sampling would take as many, also when
    that turns out only under way. A single eigenvalue that holds most of the norm makes the terms as skewed as χ²₁, which
    the interval allows for.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        method: "auto", "exact" (n products, whatever the limits below) or "hutchinson" (probes only).
        num_products: Number m of products, exactly so many where probes are used and at most so many otherwise.
        rtol: Standard error to reach, relative to the norm; 0.02 where neither this nor ``num_products`` is given.
        max_products: Most products under ``rtol``; the estimate then has ``converged=False``.
        max_seconds: Time after which no further block of products is begun.
        probes: "rademacher" or "gaussian".
        generator: Source of the probes.
        progress: Told the number of products.

    Returns:
        Estimate with ``value`` and ``stderr`` of shape ``()``.

    Raises:
        ValueError: If ``num_products`` and ``rtol`` are both given, or an argument is out of range.
        TypeError: If A is not an operator.
        NonFiniteLoss: If a product is infinite or not a number.

    References:
        Wu, Zhu & E (2017), *Towards understanding generalization of deep learning*, use this identity with differences of
        gradients in place of products, which errs by orders of magnitude on piecewise-linear networks.

    Example:
        >>> from flatminima.operators import as_operator
        >>> float(frobenius_norm(as_operator(torch.diag(torch.tensor([3.0, -4.0])))))
        5.0
    """
    check_operator(A)
    check_one_of("method", method, ("auto", "exact", "hutchinson"))
    plan = Plan.checked(num_products, rtol, max_products, max_seconds, probes, generator, progress)
    if method == "exact" or (method == "auto" and A.size <= plan.fewest_products):
        square = by_unit_vectors(A, _SQUARE, plan)
    else:
        square = by_probes(A, _SQUARE, plan, may_switch=method == "auto")
    norm = square.value.sqrt()
    stderr = torch.where(norm > 0, square.stderr / (2 * norm), torch.zeros_like(norm))
    return replace(square, value=norm.to(A.dtype), stderr=stderr.to(A.dtype), power=0.5)


def _squared_length(V: Tensor, AV: Tensor) -> Tensor:
    # squares of float32 below 1e-19 or above 1e19 leave its range
    lengths: Tensor = torch.linalg.vector_norm(AV, dim=0, dtype=torch.float64)
    return lengths**2


def _half_relative_error(mean: Tensor, stderr: Tensor) -> float:
    """Return the relative error of the root of ``mean``."""
    square, error = float(mean), float(stderr)
    return error / (2 * square) if square else (math.inf if error else 0.0)


_SQUARE = Quantity("Frobenius norm", _squared_length, _half_relative_error)
