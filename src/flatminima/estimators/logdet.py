"""The log-determinant, with its prior or its cut-off stated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flatminima._checks import check_positive
from flatminima._progress import Progress, no_progress
from flatminima.estimators.eigenpairs import Eigenpairs
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, check_operator
from flatminima.estimators.slq_budget import checked_budget
from flatminima.estimators.spectral_density import SpectralDensity
from flatminima.estimators.spectral_sum import number_of, sum_over_spectrum
from flatminima.operators.base import LinearOperator

__all__ = ["logdet"]


def logdet(
    A: LinearOperator,
    *,
    prior_precision: float | None = None,
    cutoff: float | None = None,
    num_probes: int | None = None,
    num_steps: int | None = None,
    rtol: float | None = None,
    max_products: int = DEFAULT_MAX_PRODUCTS,
    max_seconds: float | None = None,
    method: str = "auto",
    deflate: Eigenpairs | int | None = None,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    resume: str | os.PathLike[str] | None = None,
) -> Estimate:
    r"""Return the log-determinant of A, of A + δI, or of A's part above a cut-off; nothing is ever added in silence.

    .. math:: \sum_i \log \lambda_i, \qquad \sum_{\lambda_i + \delta > 0} \log(\lambda_i + \delta), \qquad
              \sum_{\lambda_i > c} \log \lambda_i

    with neither argument, with ``prior_precision`` δ, and with ``cutoff`` c. Without either a singular matrix gives −∞, and a
    negative eigenvalue (whose logarithm does not exist) an error. With δ, eigenvalues of −δ or less are left out of the sum and
    counted. Eigenvalues within the noise floor of 0 (20 eps times the largest magnitude) count as 0, not as positive or
    negative: with δ each adds log δ, with c none.

    Method, cost and errors are those of :func:`spectral_sum`. The logarithm varies fast near 0: without δ, or with a δ far
    below the smallest eigenvalues, the quadrature takes many steps, and a cut-off inside the spectrum (a jump, which no
    polynomial follows) as many as are allowed. Where it has not settled,
    ``details["quadrature_error"]`` and ``converged`` say so.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        prior_precision: δ > 0, the precision of a Gaussian prior (a damping), in the units of an eigenvalue.
        cutoff: c ≥ 0, in the units of an eigenvalue; 0 takes all eigenvalues above the noise floor.
        num_probes: As in :func:`spectral_sum`.
        num_steps: As in :func:`spectral_sum`.
        rtol: As in :func:`spectral_sum`.
        max_products: As in :func:`spectral_sum`.
        max_seconds: As in :func:`spectral_sum`.
        method: As in :func:`spectral_sum`.
        deflate: As in :func:`spectral_sum`.
        probes: As in :func:`spectral_sum`.
        generator: As in :func:`spectral_sum`.
        progress: Told the number of products.
        resume: As in :func:`spectral_sum`.

    Returns:
        Estimate with ``value`` and ``stderr`` of shape ``()`` in A's dtype. In ``details``, besides those of
        :func:`spectral_sum`, numbers of eigenvalues of A (integers where all are known, estimates otherwise): ``rank``, beyond
        the noise floor; ``num_negative``, below it; ``num_left_out``, that are not in the sum; with ``rank_stderr``. The
        steps that the logarithm needs may not tell small eigenvalues from 0: an estimated rank is then too high.

    Raises:
        ValueError: As in :func:`spectral_sum`, if both ``prior_precision`` and ``cutoff`` are given, or if neither is and A has a
            negative eigenvalue and none that is 0.
        TypeError: If A is not an operator, or an argument has the wrong type.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    References:
        Ubaru, Chen & Saad (2017), *Fast estimation of tr(f(A)) via stochastic Lanczos quadrature*, sec. 5.

    Example:
        >>> from flatminima.operators import as_operator
        >>> A = as_operator(torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64)))
        >>> float(logdet(A)), round(float(logdet(A, prior_precision=0.01)), 5), round(float(logdet(A, cutoff=0.1)), 5)
        (-inf, -3.90704, 0.69315)
    """
    check_operator(A)
    if prior_precision is not None and cutoff is not None:
        raise ValueError(
            "`prior_precision` and `cutoff` must not both be given (they are two answers to small eigenvalues). "
            f"Got {prior_precision} and {cutoff}. Give one."
        )
    shift = 0.0 if prior_precision is None else check_positive("prior_precision", prior_precision)
    least = 0.0 if cutoff is None else check_positive("cutoff", cutoff, allow_zero=True)
    plan, budget = checked_budget(
        A, num_probes, num_steps, rtol, max_products, max_seconds, method, deflate, probes, generator, progress, resume
    )

    def is_counted(nodes: Tensor) -> Tensor:
        return nodes + shift > least

    def logarithm(nodes: Tensor) -> Tensor:
        return torch.where(is_counted(nodes), nodes + shift, 1.0).log()

    estimate, density = sum_over_spectrum(
        A, logarithm, plan, budget, resume, estimator="logdet", prior_precision=prior_precision, cutoff=cutoff
    )
    estimate = _with_counts(estimate, density, is_counted)
    return estimate if prior_precision is not None or cutoff is not None else _whole(estimate, density)


def _with_counts(estimate: Estimate, density: SpectralDensity, is_counted: Callable[[Tensor], Tensor]) -> Estimate:
    rank_error = density.size * float(density.mean(lambda nodes: (nodes != 0).double()).stderr)
    counts = {
        "rank": number_of(density, lambda nodes: nodes != 0),
        "rank_stderr": rank_error,
        "num_left_out": number_of(density, lambda nodes: ~is_counted(nodes)),
    }
    return replace(estimate, details={**estimate.details, **counts})


def _whole(estimate: Estimate, density: SpectralDensity) -> Estimate:
    """Return the log-determinant of A as it is: −∞ where A is singular."""
    if float(density.mass(0.0, 0.0)) > 0:
        return replace(
            estimate,
            value=torch.full_like(estimate.value, -math.inf),
            stderr=torch.zeros_like(estimate.stderr),
            num_samples=None,
            skewness=None,
        )
    if float(density.negative_mass()) > 0:
        number = estimate.details["num_negative"]
        count = f"{number} negative" if isinstance(number, int) else f"about {number:.3g} negative"
        raise ValueError(
            f"`A` must have no negative eigenvalue (its logarithm does not exist). Got {count}, the smallest "
            f"{float(density.nodes[0]):.6g}. Give cutoff= for the log-determinant of the positive part, or prior_precision= for "
            "that of A + δI without the eigenvalues of −δ or less."
        )
    return estimate
