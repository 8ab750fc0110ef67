"""The volume proxy V(k): the log-volume of the k most curved directions."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_positive
from flatminima._progress import Progress, no_progress
from flatminima.estimators.eigenpairs import Eigenpairs, eigenpairs
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.gauss_quadrature import NOISE
from flatminima.estimators.sampling import check_operator
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["volume_proxy"]


def volume_proxy(
    A: LinearOperator,
    k: int,
    *,
    cutoff: float | None = None,
    rtol: float | None = None,
    max_products: int | None = None,
    max_seconds: float | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    resume: str | os.PathLike[str] | None = None,
) -> Estimate:
    r"""Return the sum of the logarithms of the k largest positive eigenvalues.

    .. math:: V(k) = \sum_{i=1}^{k} \log \lambda_i, \qquad \lambda_1 \ge \dots \ge \lambda_k > 0

    A larger V(k) is a smaller basin. The value depends on k, which the paper leaves open: compare minima at the same k. An
    eigenvalue that is zero up to rounding would move the sum by −20 or so, hence the cut-off: where fewer than k eigenvalues are
    above it, the effective rank is below k and V(k) is refused.

    An eigenvalue lies within its residual r of each λ, and within r² over the gap to its neighbours where that is less;
    ``details["error_bound"]`` is the sum of what these bounds allow each logarithm. Cost: the products of :func:`eigenpairs`.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        k: Number of eigenvalues, 1 … n.
        cutoff: Least eigenvalue that counts as positive, relative to the largest; by default the noise floor, 20 eps of A's
            dtype. One that is not above its residual does not count either.
        rtol: As in :func:`eigenpairs`.
        max_products: As in :func:`eigenpairs`.
        max_seconds: As in :func:`eigenpairs`.
        generator: As in :func:`eigenpairs`.
        progress: Told the number of products.
        resume: As in :func:`eigenpairs`.

    Returns:
        Estimate with ``value`` of shape ``()`` in A's dtype, the logarithm of k eigenvalues' product, and ``stderr`` 0; in
        ``details`` the ``eigenvalues``, their ``residuals``, the ``error_bound``, the absolute ``cutoff`` and the ``rank``: the
        effective rank where it is known to be no more than what was computed (k = n), else "at least k".

    Raises:
        ValueError: If k is out of range or above the effective rank, or an argument is out of range.
        TypeError: If A is not an operator, or an argument has the wrong type.
        NonFiniteLoss: If a product is infinite or not a number.

    References:
        Wu, Zhu & E (2017), *Towards understanding generalization of deep learning: perspective of loss landscapes*, eq. 13.

    Example:
        >>> from flatminima.operators import as_operator
        >>> A = as_operator(torch.diag(torch.tensor([4.0, 2.0, 0.0])))
        >>> round(float(volume_proxy(A, k=2)), 4)  # log 8
        2.0794
    """
    check_operator(A)
    check_at_least("k", k, 1)
    if k > A.size:
        raise ValueError(f"`k` must be at most {A.size} (a matrix of {A.size} rows has no more eigenvalues). Got {k}.")
    relative = NOISE * torch.finfo(A.dtype).eps if cutoff is None else check_positive("cutoff", cutoff)
    with named_missing_derivative(), A.keeping_graphs():
        pairs = eigenpairs(
            A,
            k,
            rtol=rtol,
            max_products=max_products,
            max_seconds=max_seconds,
            generator=generator,
            progress=progress,
            resume=resume,
        )
    values, residuals = pairs.values.double(), pairs.residuals.double()
    least = relative * float(values[0].clamp_min(0))
    rank = int(((values > least) & (values > residuals)).sum())
    if rank < k:
        raise ValueError(_refusal(k, rank, values, residuals, least, pairs))
    return Estimate.exact(
        values.log().sum().to(A.dtype),
        method="Lanczos",
        num_products=pairs.num_products,
        converged=pairs.converged,
        details={
            "eigenvalues": pairs.values,
            "residuals": pairs.residuals,
            "error_bound": _error_bound(values, residuals),
            "cutoff": least,
            "rank": rank if k == A.size else f"at least {rank}",
        },
    )


def _refusal(k: int, rank: int, values: Tensor, residuals: Tensor, least: float, pairs: Eigenpairs) -> str:
    value, residual = float(values[rank]), float(residuals[rank])
    if value > least:
        why = f"known to its residual {residual:.3g} only; a smaller rtol= or more max_products= may settle it"
    else:
        why = f"not above the cut-off {least:.3g}, so its logarithm is of rounding or of a negative number"
    state = "" if pairs.converged else " The search for eigenvalues has not converged."
    return (
        f"`k` must be at most the effective rank {rank}: eigenvalue {rank + 1} is {value:.3g}, {why}. Got {k}.{state} "
        f"Take k={rank} or less, or state another cutoff=."
        if rank
        else f"`k` must be at most the effective rank, which is 0: the largest eigenvalue is {value:.3g}, {why}. Got {k}.{state}"
    )


def _error_bound(values: Tensor, residuals: Tensor) -> float:
    """Return a bound on the error of the sum of logarithms, from the residuals and the gaps between the values found."""
    n = values.numel()
    gaps = torch.full((n,), torch.inf, dtype=torch.float64)
    if n > 1:
        between = values[:-1] - values[1:]
        gaps[:-1] = between
        gaps[1:] = torch.minimum(gaps[1:], between)
    gaps[-1] = 0.0  # what follows is not known
    errors = torch.where(gaps > 2 * residuals, residuals**2 / (gaps - residuals), residuals)
    errors = torch.minimum(errors, residuals)
    return float(-torch.log1p(-(errors / values).clamp_max(1 - 1e-12)).sum())
