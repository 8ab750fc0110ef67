"""The spectral density of an operator by stochastic Lanczos quadrature."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_positive
from flatminima._progress import Progress, no_progress
from flatminima.estimators.bracket import EigenvalueBracket, eigenvalue_bracket
from flatminima.estimators.eigenpairs import Eigenpairs
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.gauss_quadrature import JacobiMatrix, transport_distance, without_noise
from flatminima.estimators.quadrature import Quadrature
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, check_operator
from flatminima.estimators.slq import Aim, sample_spectrum
from flatminima.estimators.slq_budget import checked_budget
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["SpectralDensity", "density_of", "spectral_density"]

_KNOWN = -1
_NUM_MOMENTS = 4
#: A probe has settled when two steps in a row move its mass by less than this share of its standard deviation, on average.
_SETTLED = 0.1


@final
@dataclass(frozen=True, eq=False)
class SpectralDensity:
    r"""The eigenvalues of a matrix as a probability measure :math:`\mu = \tfrac1n \sum_i \delta_{\lambda_i}`, approximately.

    Attributes:
        nodes: Shape ``(m,)``, ascending, float64, in the units of an eigenvalue. Nodes within ``noise_floor`` of 0 are 0.
        weights: Shape ``(m,)``, float64, sum 1.
        probe: The probe that each node is from, shape ``(m,)``; −1 for an eigenvalue that was not sampled (weight 1/n).
        size: Number n of rows of the matrix.
        num_probes: Number of probes; 0 where all eigenvalues were found.
        num_steps: Most Lanczos steps of a probe.
        num_products: Products with the matrix.
        method: How it was obtained: "exact", "slq", or "slq" with the number of eigenvalues taken out.
        converged: Whether the requested tolerance was met.
        noise_floor: Magnitude up to which an eigenvalue is zero within the rounding of the products: 20 eps times the largest
            magnitude seen.
    """

    nodes: Tensor
    weights: Tensor
    probe: Tensor
    size: int
    num_probes: int
    num_steps: int
    num_products: int
    method: str
    converged: bool
    noise_floor: float

    def mean(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        r"""Return the mean of a function over the spectrum, :math:`\int f\,d\mu = \tfrac1n \operatorname{Tr} f(A)`.

        Args:
            function: From nodes ``(m,)`` to values ``(m,)`` or ``(m, c)``.

        Returns:
            Estimate with ``value`` and ``stderr`` of shape ``()`` or ``(c,)``. The standard error is that over the probes (0
            where nothing was sampled, not a number with one probe); it does not hold the error of the quadrature.
        """
        terms = function(self.nodes)
        terms = self.weights.reshape(-1, *[1] * (terms.ndim - 1)) * terms.to(self.weights)
        is_known = self.probe == _KNOWN
        known = terms[is_known].sum(0)
        products = self.num_products
        if not self.num_probes:
            return Estimate.exact(known, num_products=products)
        samples = torch.zeros(self.num_probes, *terms.shape[1:], dtype=terms.dtype, device=terms.device)
        samples.index_add_(0, self.probe[~is_known], terms[~is_known] * self.num_probes)
        centred = samples - samples.mean(0)
        variance = (centred**2).sum(0) / (self.num_probes - 1) if self.num_probes > 1 else torch.full_like(known, torch.nan)
        skewness = ((centred**3).mean(0) / (centred**2).mean(0) ** 1.5).nan_to_num(0.0, 0.0, 0.0)
        return Estimate(
            known + samples.mean(0),
            (variance / self.num_probes).sqrt(),
            method=self.method,
            num_samples=self.num_probes,
            skewness=skewness,
            num_products=products,
            converged=self.converged,
        )

    def moment(self, order: int) -> Estimate:
        r"""Return the moment :math:`\int \lambda^j\,d\mu = \tfrac1n \operatorname{Tr} A^j`, of shape ``()``."""
        check_at_least("order", order, 0)
        return self.mean(lambda nodes: nodes**order)

    def mass(self, low: float = -torch.inf, high: float = torch.inf) -> Estimate:
        """Return the share of eigenvalues in the closed interval [low, high], of shape ``()``."""
        if not low <= high:
            raise ValueError(f"`low` must be at most `high`. Got {low} and {high}.")
        return self.mean(lambda nodes: ((nodes >= low) & (nodes <= high)).double())

    def negative_mass(self) -> Estimate:
        """Return the share of eigenvalues below zero by more than the noise floor, of shape ``()``.

        0 for a positive semi-definite matrix. Where eigenvalues of both signs crowd about 0, a node stands for many of them, and
        its sign for all: more steps tell them apart.
        """
        return self.mean(lambda nodes: (nodes < 0).double())

    def cumulative(self, grid: Tensor) -> Estimate:
        """Return the share of eigenvalues up to each point of ``grid`` ``(g,)``, shape ``(g,)``."""
        points = self._checked(grid)
        return self.mean(lambda nodes: (nodes[:, None] <= points).double())

    def density(self, grid: Tensor, width: float) -> Estimate:
        r"""Return the density at each point of ``grid`` ``(g,)``, smoothed by a Gaussian, shape ``(g,)``.

        .. math:: \phi_\sigma(t) = \int \frac{1}{\sigma\sqrt{2\pi}}\, e^{-(t - \lambda)^2 / 2\sigma^2}\, d\mu(\lambda).

        Args:
            grid: Points, in the units of an eigenvalue.
            width: Standard deviation σ of the Gaussian. What is narrower than the distance of two nodes shows the nodes.

        Raises:
            ValueError: If ``grid`` is not one-dimensional or ``width`` not positive.
        """
        points, sigma = self._checked(grid), check_positive("width", width)
        norm = sigma * (2 * torch.pi) ** 0.5
        return self.mean(lambda nodes: torch.exp(-(((points - nodes[:, None]) / sigma) ** 2) / 2) / norm)

    def bracket(self) -> EigenvalueBracket:
        """Return bounds on the largest and smallest eigenvalue from the first two moments (see :func:`eigenvalue_bracket`)."""
        first, second = self.moment(1), self.moment(2)
        n, norm = self.size, (self.size * second.value).sqrt()
        error = torch.where(norm > 0, n * second.stderr / (2 * norm), torch.zeros_like(norm))
        trace = Estimate(n * first.value, n * first.stderr, num_samples=first.num_samples)
        return eigenvalue_bracket(trace, Estimate(norm, error, num_samples=first.num_samples, power=0.5), n)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON."""
        numbers = ("size", "num_probes", "num_steps", "num_products", "method", "converged", "noise_floor")
        arrays = ("nodes", "weights", "probe")
        return {name: getattr(self, name) for name in numbers} | {name: getattr(self, name).tolist() for name in arrays}

    def _checked(self, grid: Tensor) -> Tensor:
        if not isinstance(grid, Tensor) or grid.ndim != 1:
            got = tuple(grid.shape) if isinstance(grid, Tensor) else type(grid).__name__
            raise ValueError(f"`grid` must be a tensor of shape (g,). Got {got}.")
        return grid.detach().to(self.nodes)


def spectral_density(
    A: LinearOperator,
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
) -> SpectralDensity:
    r"""Return the distribution of A's eigenvalues by stochastic Lanczos quadrature (SLQ).

    For a random unit vector v the measure :math:`v^\top f(A) v = \int f\,d\mu_v` has the mean
    :math:`\tfrac1n\operatorname{Tr} f(A)`. After m Lanczos steps from v, the eigenvalues of the tridiagonal matrix are the nodes
    and the squared first entries of its eigenvectors the weights of a rule that integrates polynomials up to degree 2m − 1 over
    μ_v without error. The m products also tell the matrix's next off-diagonal entry; with it the rule has one node more, and is
    right up to degree 2m. The density is the mean of the probes' rules; its mass is 1.

    *Steps.* Each probe goes on until two steps in a row move its mass by less than 10 % of its standard deviation, on average
    (1-Wasserstein distance), 4 steps at least and 100 at most; from 2 steps on its first four moments are exact. It ends
    earlier where the Krylov space is invariant. *Probes.* Under ``rtol`` their number follows from the standard errors of the
    first four moments. *Deflation.* An eigenvalue far from the rest makes up most of the variance. Two probes show whether it
    pays to find the largest ones first; those then have their exact weight 1/n, and the probes live in the complement of their
    vectors. Eigenvectors with residuals R change the spectrum that is described by ‖R‖² over the gap, the trace not at all.
    Where all of this forecasts more than n products, and n is at most 2048, all eigenvalues are found from n products.

    Probes run eight at a time, so that one pass over the data serves a block of products. Cost: probes times steps products, and
    4 n m² operations a probe for the orthogonality. Memory: the basis of each probe of a block, 256 MiB together; where all m
    vectors do not fit, the newest are kept.

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        num_probes: Number of probes, exactly so many; None where ``rtol`` decides.
        num_steps: Number of steps of each probe; None where they go on until they have settled.
        rtol: Standard error to reach in each of the moments j = 1 … 4, relative to the mean of |λ|^j; 0.02 where neither this
            nor ``num_probes`` is given.
        max_products: Most products under ``rtol``, at least 8; the density then has ``converged=False``.
        max_seconds: Time after which probes end at four steps and no further one is begun; two are made.
        method: "auto", "exact" (all eigenvalues, from n products, whatever the limits) or "slq" (probes only).
        deflate: Eigenpairs that are known already; or how many of largest magnitude to find first (0: none); or None: as many
            as pay under ``rtol``, and none with ``num_probes``.
        probes: "rademacher" or "gaussian". Where more than n/64 eigenvalues are taken out the probes are Gaussian.
        generator: Source of the probes and of the start of the search for eigenvalues.
        progress: Told the number of products.
        resume: A file in which the state is kept while it runs and from which a later call with the same arguments goes on, to
            the same answer: bit for bit, or up to rounding where a large model's products go another way in the new process.
            Removed when the density is complete. One product more, which is not counted.

    Returns:
        SpectralDensity.

    Raises:
        ValueError: If ``num_probes`` and ``rtol`` are both given, an argument is out of range, or the file of ``resume`` is
            another run's.
        TypeError: If A is not an operator, or an argument has the wrong type.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    References:
        Golub & Meurant (2010), *Matrices, Moments and Quadrature*; Lin, Saad & Yang (2016), *Approximating spectral densities of
        large matrices*; Ubaru, Chen & Saad (2017), *Fast estimation of tr(f(A)) via stochastic Lanczos quadrature*.

    Example:
        >>> from flatminima.operators import as_operator
        >>> A = as_operator(torch.diag(torch.arange(1.0, 7.0)))
        >>> density = spectral_density(A, num_probes=2, num_steps=6, method="slq")
        >>> round(float(density.moment(1)), 4), round(float(density.mass(low=4.5)), 4)
        (3.5, 0.3333)
    """
    check_operator(A)
    plan, budget = checked_budget(
        A, num_probes, num_steps, rtol, max_products, max_seconds, method, deflate, probes, generator, progress, resume
    )
    aim = Aim(_moments, _are_settled, of_magnitude=True, closed=True)
    with named_missing_derivative(), plan.running(A, resume, estimator="spectral density", **budget.settings) as running:
        return density_of(A, sample_spectrum(A, aim, budget, running))


def density_of(A: LinearOperator, quadrature: Quadrature) -> SpectralDensity:
    """Return the quadrature as a density: nodes in order, those within the noise of 0 at 0."""
    known, p = quadrature.known.values, len(quadrature.jacobis)
    rules = quadrature.rules
    nodes = torch.cat([known, *(rule.nodes for rule in rules)])
    known_weights = torch.full_like(known, 1 / A.size)
    weights = torch.cat([known_weights, *(rule.weights * (quadrature.share / p) for rule in rules)])
    sources = [torch.full((len(known),), _KNOWN), *(torch.full((len(rule.nodes),), i) for i, rule in enumerate(rules))]
    nodes, order = without_noise(nodes, quadrature.noise_floor).sort(stable=True)
    method = "exact" if not p else "slq" if not len(known) else f"slq, {len(known)} eigenvalues taken out"
    return SpectralDensity(
        nodes.to(A.device),
        weights[order].to(A.device),
        torch.cat(sources)[order].to(A.device),
        size=A.size,
        num_probes=p,
        num_steps=max((jacobi.num_steps for jacobi in quadrature.jacobis), default=0),
        num_products=quadrature.num_products,
        method=method,
        converged=quadrature.converged,
        noise_floor=quadrature.noise_floor,
    )


def _moments(nodes: Tensor) -> Tensor:
    return nodes[:, None] ** torch.arange(1, _NUM_MOMENTS + 1, dtype=nodes.dtype, device=nodes.device)


def _are_settled(quadrature: Quadrature) -> list[bool]:
    return [_is_settled(jacobi, quadrature) for jacobi in quadrature.jacobis]


def _is_settled(jacobi: JacobiMatrix, quadrature: Quadrature) -> bool:
    if jacobi.is_exact:
        return True
    m = jacobi.num_steps
    rules = [jacobi.rule(steps, lowest=quadrature.lowest) for steps in (m - 2, m - 1, m)]
    largest = max(_SETTLED * rules[-1].spread, quadrature.noise_floor)
    return all(transport_distance(coarse, fine) <= largest for coarse, fine in pairwise(rules))
