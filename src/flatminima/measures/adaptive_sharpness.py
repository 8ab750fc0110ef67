"""Adaptive sharpness: perturbations in proportion to each weight, on average and at worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_positive
from flatminima.estimators import Estimate, diagonal, eigenpairs
from flatminima.measures.ascent import maximize_in_ball
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import Hessian
from flatminima.symmetries import centre_classes

__all__ = ["AdaptiveAverageSharpness", "AdaptiveWorstSharpness"]

_KINDS = ("layer", "node", "permutation", "norm-scale")


def _invariances(centred: bool) -> Mapping[str, bool]:
    return invariant_to(*_KINDS, "softmax shift") if centred else invariant_to(*_KINDS)


@final
@dataclass(frozen=True)
class AdaptiveAverageSharpness(Measure):
    r"""E[L(θ + ρ \|θ\|∘z)] − L(θ) for z ~ N(0, I) (Andriushchenko et al. 2023, average case with T = \|θ\|).

    The scale is the absolute value of *every* parameter, biases included: with T = 1 on the biases, as in much public code, the
    value is not invariant to rescaling. The mean of antithetic pairs ±z has no first-order part, so what is left is the
    curvature: ``second_order`` = ρ²/2 Σ θ_p² H_pp.

    Attributes:
        rho: ρ, relative to each parameter's size.
        num_pairs: Antithetic pairs; the standard error is of their mean.
        centre: Whether to divide out the softmax shift first: the mean over the classes of the last layer is subtracted, which
            changes no prediction. Without it the value moves under the shift.
    """

    rho: float = 0.1
    num_pairs: int = 64
    centre: bool = True

    key = "adaptive-average"
    title = "Adaptive average sharpness"
    source = "Andriushchenko et al. 2023, eq. 1 (average case)"
    formula = "E_z L(θ + ρ|θ|∘z) − L(θ)"
    meaning = "The mean rise of the loss when every weight gets noise in proportion to its own size."
    cost = "128 forward passes, and the Hessian's diagonal"

    def __post_init__(self) -> None:
        check_positive("rho", self.rho)
        check_at_least("num_pairs", self.num_pairs, 2, "a standard error takes two samples")

    @property
    def invariances(self) -> Mapping[str, bool]:
        return _invariances(self.centre)

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        objective = centre_classes(objective) if self.centre else objective
        theta = objective.theta
        loss, scale = objective.value(theta), self.rho * theta.abs()
        device = theta.device if generator is None else generator.device
        rises = []
        for _ in range(self.num_pairs):
            z = torch.randn(theta.shape, dtype=theta.dtype, device=device, generator=generator).to(theta.device)
            both = objective.value(theta + scale * z) + objective.value(theta - scale * z)
            rises.append(both / 2 - loss)
        samples = torch.stack(rises)
        curvature = diagonal(Hessian(objective), generator=generator)
        return Estimate(
            samples.mean(),
            samples.std() / self.num_pairs**0.5,
            method="antithetic noise",
            num_samples=self.num_pairs,
            skewness=(((samples - samples.mean()) / samples.std(correction=0)) ** 3).mean().nan_to_num(0.0),
            num_products=curvature.num_products,
            num_gradients=curvature.num_gradients,
            num_losses=1 + 2 * self.num_pairs,
            details={
                "first_order": 0.0,
                "second_order": float((scale.square() * curvature.value).sum()) / 2,
            },
        )


@final
@dataclass(frozen=True)
class AdaptiveWorstSharpness(Measure):
    r"""max over ‖δ/\|θ\|‖₂ ≤ ρ of L(θ+δ) − L(θ) (Kwon et al. 2021, eq. 3; Andriushchenko et al. 2023, worst case).

    Taken in the coordinates z = δ/\|θ\| over *every* parameter, by ascent from the gradient and from both signs of the leading
    eigenvector of DHD, D = diag(\|θ\|): a lower bound. Its parts are ``first_order`` ρ‖θ∘∇L‖ and ``second_order``
    ρ²/2 λ_max(DHD).

    Attributes:
        rho: ρ, relative to the parameters' sizes.
        num_steps: Ascent steps from each start.
        centre: Whether to divide out the softmax shift first; see AdaptiveAverageSharpness.
    """

    rho: float = 0.1
    num_steps: int = 20
    centre: bool = True

    key = "adaptive-worst"
    title = "Adaptive worst-case sharpness"
    source = "Kwon et al. 2021, eq. 3; Andriushchenko et al. 2023, eq. 1"
    formula = "max_{‖δ/|θ|‖≤ρ} L(θ+δ) − L(θ)"
    meaning = "The largest rise of the loss when weights change in proportion to their own size."
    cost = "3 starts × up to 20 gradients, and about 30 Hessian products"

    def __post_init__(self) -> None:
        check_positive("rho", self.rho)
        check_at_least("num_steps", self.num_steps, 1)

    @property
    def invariances(self) -> Mapping[str, bool]:
        return _invariances(self.centre)

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        objective = centre_classes(objective) if self.centre else objective
        theta = objective.theta
        loss, gradient = objective.value_and_gradient(theta)
        size = theta.abs()
        pairs = eigenpairs(Hessian(objective).congruence(size), k=1, rtol=1e-5, max_products=200, generator=generator)

        def rise(z: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = objective.value_and_gradient(theta + size * z)
            return value - loss, size * slope

        leading = pairs.vectors[:, 0]
        ascent = maximize_in_ball(rise, (size * gradient, leading, -leading), self.rho, num_steps=self.num_steps)
        return Estimate.exact(
            ascent.value,
            method="ascent (lower bound)",
            num_products=pairs.num_products,
            num_gradients=1 + ascent.num_gradients,
            converged=ascent.converged,
            details={
                "first_order": self.rho * float((size * gradient).norm()),
                "second_order": self.rho**2 / 2 * max(float(pairs.values[0]), 0.0),
                "gap": ascent.gap,
            },
        )
