"""The largest eigenvalue of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from flatminima.estimators import Estimate, eigenpairs
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import Hessian

__all__ = ["LargestEigenvalue"]


@final
@dataclass(frozen=True)
class LargestEigenvalue(Measure):
    """λ_max(H), the curvature in the steepest direction (Hochreiter & Schmidhuber 1997; Dinh et al. 2017, sec. 3).

    Not the eigenvalue of largest magnitude: near a saddle that is the negative end.

    Attributes:
        rtol: Residual ‖Hv − λv‖ relative to the largest Ritz value at which to stop. λ itself is then closer by a square.
        max_products: Most Hessian products to spend.
    """

    rtol: float = 1e-5
    max_products: int = 200

    key = "largest-eigenvalue"
    title = "Largest Hessian eigenvalue"
    source = "Dinh et al. 2017, sec. 3"
    formula = "λ_max(H)"
    meaning = "How fast the loss rises in the steepest direction."
    cost = "20-60 Hessian products"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("permutation", "softmax shift")

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        pairs = eigenpairs(Hessian(objective), k=1, rtol=self.rtol, max_products=self.max_products, generator=generator)
        return Estimate.exact(
            pairs.values[0],
            method="Lanczos",
            num_products=pairs.num_products,
            converged=pairs.converged,
            details={"residual": float(pairs.residuals[0])},
        )
