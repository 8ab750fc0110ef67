"""The curvature of the loss along the parameters themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from flatminima.estimators import Estimate
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import Hessian
from flatminima.symmetries import KINDS

__all__ = ["RadialCurvature"]


@final
@dataclass(frozen=True)
class RadialCurvature(Measure):
    """θᵀ H θ, the second derivative of L((1+t)θ) at t = 0.

    Every symmetry that acts linearly on θ turns H into D⁻¹HD⁻¹ and θ into Dθ, so the value stays; it looks in one direction
    only. May be negative.
    """

    key = "radial-curvature"
    title = "Radial curvature"
    source = "second derivative of L((1+t)θ); see Dinh et al. 2017, sec. 5, for why D⁻¹HD⁻¹"
    formula = "θᵀ H θ"
    meaning = "The curvature of the loss when all weights grow by the same percentage."
    cost = "1 Hessian product"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to(*KINDS)

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        theta = objective.theta
        return Estimate.exact(theta @ (Hessian(objective) @ theta), method="one product", num_products=1)
