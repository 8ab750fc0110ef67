"""The Frobenius norm of an operator."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import torch
from torch import Tensor

from flatminima._checks import check_one_of
from flatminima._progress import Progress, no_progress
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.finite_difference import DEFAULT_NUM_DIFFERENCES, by_finite_differences, check_difference
from flatminima.estimators.low_rank_part import by_cheapest_sampling, by_low_rank_part
from flatminima.estimators.quantity import Quantity, by_probes, by_unit_vectors
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, Plan, check_operator
from flatminima.operators.base import LinearOperator

__all__ = ["frobenius_norm"]

_METHODS = ("auto", "exact", "hutch++", "hutchinson", "finite-difference")


def frobenius_norm(
    A: LinearOperator,
    *,
    method: str = "auto",
    num_products: int | None = None,
    rtol: float | None = None,
    max_products: int = DEFAULT_MAX_PRODUCTS,
    max_seconds: float | None = None,
    probes: str = "rademacher",
    epsilon: float | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    resume: str | os.PathLike[str] | None = None,
) -> Estimate:
    r"""Return ‖A‖_F, the root of the sum of the squared eigenvalues.

    .. math:: \|A\|_F^2 = \mathbb E \|A v\|^2 \approx \tfrac1m \sum_i \|A v_i\|^2, \qquad \mathbb E[v_i v_i^\top] = I.

    One term of the square has variance 2(‖A²‖_F² − Σ (A²)_ii²) with Rademacher probes and 2 Tr A⁴ with Gaussian ones: a single
    eigenvalue that holds most of the norm costs hundreds of probes. With ``"hutch++"`` the part of A in the span of Q is known
    exactly after k further products, and only R = (I − QQᵀ) A (I − QQᵀ) is sampled:

    .. math:: \|A\|_F^2 = \|Q^\top A Q\|_F^2 + 2\, \|(I - QQ^\top) A Q\|_F^2 + \|R\|_F^2.

    ``"auto"`` forecasts from blocks of eight products whether that pays, and how large Q should be; or it makes n exact products
    where sampling would take as many. The standard error is carried through the root by the delta method,
    se(‖A‖_F) = se(‖A‖_F²) / (2‖A‖_F); the root is biased low by se²/(2‖A‖_F), far below the error itself.

    ``"finite-difference"`` is the paper's eq. 14, for a Hessian: (∇L(θ + εv) − ∇L(θ − εv)) / 2ε in place of Hv. Where the step
    crosses kinks, as in piecewise-linear networks, it errs by orders of magnitude, whatever ε. Three of the differences are
    compared with products, and a warning tells how far they are off.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        method: "auto", "exact" (n products, whatever the limits below), "hutch++", "hutchinson" (probes only) or
            "finite-difference" (differences only).
        num_products: Number m of products, exactly so many where probes are used and at most so many otherwise.
        rtol: Standard error to reach, relative to the norm; 0.02 where neither this nor ``num_products`` is given.
        max_products: Most products under ``rtol``; the estimate then has ``converged=False``.
        max_seconds: Time after which no further block of products is begun.
        probes: "rademacher" or "gaussian".
        epsilon: Step ε of "finite-difference", of every parameter; 1e-5 by default. There ``num_products`` is the number of
            differences, of two gradients each, 100 by default.
        generator: Source of the probes.
        progress: Told the number of products.
        resume: A file in which the state is kept while it runs and from which a later call with the same arguments goes on, to
            the same answer: bit for bit, or up to rounding where a large model's products go another way in the new process.
            Removed when the estimate is complete. One product more, which is not counted.

    Returns:
        Estimate with ``value`` and ``stderr`` of shape ``()``.

    Raises:
        ValueError: If ``num_products`` and ``rtol`` are both given, an argument is out of range, or the file of ``resume`` is
            another run's.
        TypeError: If A is not an operator, or no Hessian where gradients are to be differenced.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    References:
        Wu, Zhu & E (2017), *Towards understanding generalization of deep learning: perspective of loss landscapes*, eq. 14. Meyer
        et al. (2021), *Hutch++*, for the trace; here for A², whose products cost one with A since only ‖A v‖ is needed.

    Example:
        >>> from flatminima.operators import as_operator
        >>> float(frobenius_norm(as_operator(torch.diag(torch.tensor([3.0, -4.0])))))
        5.0
    """
    check_operator(A)
    check_one_of("method", method, _METHODS)
    is_difference = method == "finite-difference"
    if epsilon is not None and not is_difference:
        raise ValueError(
            f"`epsilon` must be None (it is the step of method='finite-difference'). Got {epsilon} with method={method!r}."
        )
    if is_difference and num_products is None and rtol is None:
        num_products = DEFAULT_NUM_DIFFERENCES
    plan = Plan.checked(num_products, rtol, max_products, max_seconds, probes, generator, progress)
    if is_difference:
        H, step = check_difference(A, epsilon)
        with plan.running(A, resume, estimator=_SQUARE.name, method=method, epsilon=step) as running:
            square = by_finite_differences(H, _SQUARE, step, running)
    else:
        with plan.running(A, resume, estimator=_SQUARE.name, method=method) as running:
            square = _square(A, method, running)
    norm = square.value.sqrt()
    stderr = torch.where(norm > 0, square.stderr / (2 * norm), torch.zeros_like(norm))
    return replace(square, value=norm.to(A.dtype), stderr=stderr.to(A.dtype), power=0.5)


def _square(A: LinearOperator, method: str, plan: Plan) -> Estimate:
    """Return ‖A‖_F² from products, in float64."""
    if method == "exact" or (method == "auto" and A.size <= plan.fewest_products):
        return by_unit_vectors(A, _SQUARE, plan)
    if method == "auto":
        return by_cheapest_sampling(A, _SQUARE, plan)
    if method == "hutch++":
        return by_low_rank_part(A, _SQUARE, plan)
    return by_probes(A, _SQUARE, plan)


def _squared_length(V: Tensor, AV: Tensor) -> Tensor:
    # squares of float32 below 1e-19 or above 1e19 leave its range
    lengths: Tensor = torch.linalg.vector_norm(AV, dim=0, dtype=torch.float64)
    return lengths**2


def _half_relative_error(mean: Tensor, stderr: Tensor) -> float:
    """Return the relative error of the root of ``mean``."""
    square, error = float(mean), float(stderr)
    return error / (2 * square) if square else (math.inf if error else 0.0)


def _square_of_low_rank(Q: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖A‖_F² − ‖R‖_F² = ‖QᵀZ‖_F² + 2 ‖(I − QQᵀ) Z‖_F²: the squares of all blocks but the last, in the basis of Q."""
    inside = Q.T @ Z
    square = _squared_length(Z, inside).sum() + 2 * _squared_length(Z, Z - Q @ inside).sum()
    return square, square


_SQUARE = Quantity("Frobenius norm", _squared_length, _half_relative_error, _square_of_low_rank, degree=2)
