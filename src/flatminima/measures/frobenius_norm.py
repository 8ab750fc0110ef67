"""The Frobenius norm of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from flatminima.estimators import Estimate, frobenius_norm
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import Hessian

__all__ = ["FrobeniusNorm"]


@final
@dataclass(frozen=True)
class FrobeniusNorm(Measure):
    """‖H‖_F from Hessian products: ‖H‖_F² = E‖Hv‖² for isotropic v (Wu, Zhu & E 2017, eq. 14).

    The paper's central differences of the gradient cross the kinks of piecewise-linear networks; products do not.

    Attributes:
        rtol: Relative standard error at which to stop.
        max_products: Most Hessian products to spend.
    """

    rtol: float = 0.05
    max_products: int = 400

    key = "frobenius-norm"
    title = "Hessian Frobenius norm"
    source = "Wu, Zhu & E 2017, eq. 14"
    formula = "‖H‖_F = √(Σ λ_i²)"
    meaning = "The size of all curvatures together, the large ones counting most."
    cost = "about 100 Hessian products for 5 %"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("permutation", "softmax shift")

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        return frobenius_norm(Hessian(objective), rtol=self.rtol, max_products=self.max_products, generator=generator)
