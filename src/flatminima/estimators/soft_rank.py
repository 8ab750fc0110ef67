"""The soft rank: how many directions are curved more than a damping."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from flatminima._checks import check_positive
from flatminima._progress import Progress, no_progress
from flatminima.estimators.eigenpairs import Eigenpairs
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, check_operator
from flatminima.estimators.slq_budget import checked_budget
from flatminima.estimators.spectral_sum import sum_over_spectrum
from flatminima.operators.base import LinearOperator

__all__ = ["soft_rank"]


def soft_rank(
    A: LinearOperator,
    damping: float,
    *,
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
    r"""Return the soft rank, also called the effective number of parameters.

    .. math:: \operatorname{Tr} A (A + \delta I)^{-1} = \sum_i \frac{\lambda_i}{\lambda_i + \delta}

    It counts an eigenvalue far above δ as one and one far below as none. Method, cost and errors are those of
    :func:`spectral_sum`. With δ the precision of a Gaussian prior this is MacKay's number of well-determined parameters.

    Args:
        A: Symmetric operator, shape ``(n, n)``, with all eigenvalues above −δ.
        damping: δ > 0, in the units of an eigenvalue.
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
        Estimate with ``value`` and ``stderr`` of shape ``()`` and ``details`` as in :func:`spectral_sum`. Negative
        eigenvalues have negative terms; ``details["num_negative"]`` says how many there are.

    Raises:
        ValueError: As in :func:`spectral_sum`, and if an eigenvalue is −δ or less: the sum then has a pole in the spectrum.
        TypeError: If A is not an operator, or an argument has the wrong type.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    References:
        MacKay (1992), *Bayesian interpolation*, where it is γ; Maddox, Benton & Wilson (2020),
        *Rethinking parameter counting in deep models*.

    Example:
        >>> from flatminima.operators import as_operator
        >>> float(soft_rank(as_operator(torch.diag(torch.tensor([1.0, 1.0, 0.0]))), damping=1.0))
        1.0
    """
    check_operator(A)
    delta = check_positive("damping", damping)
    plan, budget = checked_budget(
        A, num_probes, num_steps, rtol, max_products, max_seconds, method, deflate, probes, generator, progress, resume
    )

    def share(nodes: Tensor) -> Tensor:
        lowest = float(nodes.min()) if nodes.numel() else 0.0
        if lowest <= -delta:
            raise ValueError(
                f"`damping` must be above the magnitude of the smallest eigenvalue ({lowest:.6g}), or the sum has a pole in the "
                f"spectrum. Got {delta:.6g}. Give a larger one, or take the Gauss-Newton matrix, which has no negative ones."
            )
        return nodes / (nodes + delta)

    return sum_over_spectrum(A, share, plan, budget, resume, estimator="soft rank", damping=delta)[0]
