"""ε-sharpness: the largest rise of the loss in a small ball."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_positive
from flatminima.estimators import Estimate, eigenpairs
from flatminima.measures.ascent import maximize_in_ball
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import Hessian

__all__ = ["EpsilonSharpness"]


@final
@dataclass(frozen=True)
class EpsilonSharpness(Measure):
    r"""max over ‖δ‖₂ ≤ ε of (L(θ+δ) − L(θ)) / (1 + L(θ)) (Dinh et al. 2017, Def. 2, after Keskar et al. 2017).

    The value is the best of an ascent from the gradient and from both signs of the leading eigenvector: a lower bound. Its
    parts say what the rise is made of: ``first_order`` ε‖∇L‖/(1+L), the slope that is left, and ``second_order``
    λ_max ε²/(2(1+L)), the curvature. At a small ε away from an exact minimum most of it is slope.

    Attributes:
        radius: ε, in the units of the parameters.
        num_steps: Ascent steps from each start.
    """

    radius: float = 0.01
    num_steps: int = 20

    key = "epsilon-sharpness"
    title = "ε-sharpness"
    source = "Dinh et al. 2017, Def. 2"
    formula = "max_{‖δ‖≤ε} (L(θ+δ) − L(θ)) / (1 + L(θ))"
    meaning = "The largest rise of the loss within a ball of radius ε around the parameters."
    cost = "3 starts × up to 20 gradients, and about 30 Hessian products"

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        check_at_least("num_steps", self.num_steps, 1)

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("permutation", "softmax shift")

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        theta = objective.theta
        loss, gradient = objective.value_and_gradient(theta)
        pairs = eigenpairs(Hessian(objective), k=1, rtol=1e-5, max_products=200, generator=generator)

        def rise(delta: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = objective.value_and_gradient(theta + delta)
            return value - loss, slope

        leading = pairs.vectors[:, 0]
        ascent = maximize_in_ball(rise, (gradient, leading, -leading), self.radius, num_steps=self.num_steps)
        scale = 1 / (1 + float(loss))
        return Estimate.exact(
            scale * ascent.value,
            method="ascent (lower bound)",
            num_products=pairs.num_products,
            num_gradients=1 + ascent.num_gradients,
            converged=ascent.converged,
            details={
                "first_order": scale * self.radius * float(gradient.norm()),
                "second_order": scale * self.radius**2 / 2 * max(float(pairs.values[0]), 0.0),
                "gap": ascent.gap,
            },
        )
