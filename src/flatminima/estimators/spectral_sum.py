"""Sums of a function over all eigenvalues."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatminima._errors import first_line
from flatminima._progress import Progress, no_progress
from flatminima.estimators.eigenpairs import Eigenpairs
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.quadrature import Quadrature
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, Plan, check_operator
from flatminima.estimators.slq import Aim, sample_spectrum
from flatminima.estimators.slq_budget import Budget, checked_budget
from flatminima.estimators.spectral_density import SpectralDensity, density_of
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["number_of", "spectral_sum", "sum_over_spectrum"]

#: The quadrature of a probe may be off by this share of the error that sampling will leave.
_SHARE = 0.05
#: What it may be off, relative to the value, where one probe alone shows no error of sampling.
_ALONE = 1e-4
_POINTS = (0.0, 1e-6, 1e-3, 0.1, 1.0, 2.0, 10.0, 1e3, -1.0)


def spectral_sum(
    A: LinearOperator,
    f: Callable[[Tensor], Tensor],
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
    r"""Return the sum of f over the eigenvalues of A by stochastic Lanczos quadrature, or exactly where that is cheap.

    .. math:: \operatorname{Tr} f(A) = \sum_i f(\lambda_i) \approx
              \frac{n}{p} \sum_{l=1}^{p} \sum_k w_k^{(l)} f\big(\theta_k^{(l)}\big)

    with the Gauss rule of each of p probes (see :func:`spectral_density` for probes, deflation and memory). The error has two
    parts. *Sampling*: ``stderr``, from the spread over the probes. *Quadrature*: with d the last change of a probe's sum from one
    step to the next and r the ratio of the last two changes, what is still to come is estimated as d max(1, r/(1 − r)), r at
    most 0.9. A probe ends when that is below 5 % of the error that the sampling is to leave. The mean over the probes is in
    ``details["quadrature_error"]``; where it exceeds the sampling's error, ``converged`` is False.

    All eigenvalues are found, from n products, where sampling would take as many and n is at most 2048. Eigenvalues within the
    noise floor of 0 (20 eps times the largest magnitude) count as 0.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        f: From eigenvalues ``(m,)``, float64, to values ``(m,)``; finite on the spectrum, and between its eigenvalues.
        num_probes: Number of probes, exactly so many; None where ``rtol`` decides.
        num_steps: Number of steps of each probe; None where they go on until the quadrature's error is small.
        rtol: Standard error to reach, relative to the sum; 0.02 where neither this nor ``num_probes`` is given.
        max_products: Most products under ``rtol``, at least 8; the estimate then has ``converged=False``.
        max_seconds: As in :func:`spectral_density`.
        method: "auto", "exact" (n products, whatever the limits) or "slq" (probes only).
        deflate: As in :func:`spectral_density`.
        probes: "rademacher" or "gaussian".
        generator: As in :func:`spectral_density`.
        progress: Told the number of products.
        resume: As in :func:`spectral_density`.

    Returns:
        Estimate with ``value`` and ``stderr`` of shape ``()`` in A's dtype, and in ``details`` the ``quadrature_error``, the
        ``noise_floor``, ``num_steps``, ``num_known`` (eigenvalues taken out of the probes) and ``num_negative``.

    Raises:
        ValueError: As in :func:`spectral_density`, and if f is not finite at an eigenvalue.
        TypeError: If A is not an operator, or an argument has the wrong type.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    References:
        Ubaru, Chen & Saad (2017), *Fast estimation of tr(f(A)) via stochastic Lanczos quadrature*; Golub & Meurant (2010).

    Example:
        >>> from flatminima.operators import as_operator
        >>> float(spectral_sum(as_operator(torch.diag(torch.tensor([1.0, 4.0, 9.0]))), torch.sqrt))
        6.0
    """
    check_operator(A)
    plan, budget = checked_budget(
        A, num_probes, num_steps, rtol, max_products, max_seconds, method, deflate, probes, generator, progress, resume
    )
    if not callable(f):
        raise TypeError(f"`f` must be a function of a tensor of eigenvalues. Got {type(f).__name__}.")
    # f itself cannot be compared between runs: its values at some points can
    name = "" if resume is None else _values_of(f)
    return sum_over_spectrum(A, f, plan, budget, resume, estimator="spectral sum", function=name)[0]


def sum_over_spectrum(
    A: LinearOperator,
    f: Callable[[Tensor], Tensor],
    plan: Plan,
    budget: Budget,
    resume: str | os.PathLike[str] | None,
    **settings: object,
) -> tuple[Estimate, SpectralDensity]:
    """Return the sum and the density that it was taken over; ``settings`` tell runs apart in the file of ``resume``."""

    def columns(nodes: Tensor) -> Tensor:
        return _finite(f, nodes)[:, None]

    def are_settled(quadrature: Quadrature) -> list[bool]:
        return _are_settled(quadrature, columns, plan, budget)

    aim = Aim(columns, are_settled, of_magnitude=False)
    with named_missing_derivative(), plan.running(A, resume, **settings, **budget.settings) as running:
        quadrature = sample_spectrum(A, aim, budget, running)
    density = density_of(A, quadrature)
    mean = density.mean(lambda nodes: _finite(f, nodes))
    value, stderr = A.size * mean.value, A.size * mean.stderr
    error = A.size * float(_quadrature_errors(quadrature, columns).mean())
    allowed = plan.rtol * abs(float(value)) if budget.num_probes is None else float(stderr.nan_to_num(torch.inf))
    details: dict[str, Any] = {
        "quadrature_error": error,
        "noise_floor": density.noise_floor,
        "num_steps": density.num_steps,
        "num_known": quadrature.known.count,
        "num_negative": number_of(density, lambda nodes: nodes < 0),
    }
    # beside rounding, which the changes of a settled rule consist of
    is_exact_enough = error <= max(allowed, 1e3 * torch.finfo(A.dtype).eps * abs(float(value)))
    return replace(
        mean,
        value=value.to(A.dtype),
        stderr=stderr.to(A.dtype),
        converged=density.converged and is_exact_enough,
        details=details,
    ), density


def number_of(density: SpectralDensity, is_counted: Callable[[Tensor], Tensor]) -> float:
    """Return how many eigenvalues satisfy a condition: an integer where all of them are known."""
    number = density.size * float(density.mean(lambda nodes: is_counted(nodes).double()).value)
    return number if density.num_probes else round(number)


def _values_of(f: Callable[[Tensor], Tensor]) -> str:
    try:
        return repr(f(torch.tensor(_POINTS, dtype=torch.float64)).tolist())
    except Exception as error:  # outside of the spectrum it may do what it likes
        return first_line(error)


def _finite(f: Callable[[Tensor], Tensor], nodes: Tensor) -> Tensor:
    values = f(nodes)
    if not isinstance(values, Tensor) or values.shape != nodes.shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"`f` must give one value for each eigenvalue, shape {tuple(nodes.shape)}. Got {got}.")
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        where = nodes[bad][0]
        raise ValueError(
            f"`f` must be finite on the spectrum. Got f({float(where):.6g}) = {float(values[bad][0])}. "
            "Give a function that is defined there, or shift the operator."
        )
    return values.detach().to(torch.float64)


def _quadrature_errors(quadrature: Quadrature, columns: Callable[[Tensor], Tensor]) -> Tensor:
    """Return by probe how much more steps would change the mean of f over the spectrum, by estimate, ``(p,)``."""
    newest, before, earlier = quadrature.samples_before(columns, (0, 1, 2))[:, :, 0]
    change, earlier_change = (newest - before).abs(), (before - earlier).abs()
    ratio = (change / earlier_change).nan_to_num(0.0, posinf=0.9).clamp_max(0.9)
    errors: Tensor = change * (ratio / (1 - ratio)).clamp_min(1)
    return errors


def _are_settled(quadrature: Quadrature, columns: Callable[[Tensor], Tensor], plan: Plan, budget: Budget) -> list[bool]:
    samples = quadrature.samples(columns)[:, 0]
    size = float(samples.mean().abs())
    spread = float(samples.std()) if len(samples) > 1 else size * _ALONE / _SHARE
    left = min(plan.rtol * size, spread) if budget.num_probes is None else spread / budget.num_probes**0.5
    rounding = 10 * torch.finfo(torch.float64).eps * float(samples.abs().max())
    done: list[bool] = (_quadrature_errors(quadrature, columns) <= max(_SHARE * left, rounding)).tolist()
    return done
