"""The trace of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from flatminima.estimators import Estimate, trace
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import Hessian

__all__ = ["HessianTrace"]


@final
@dataclass(frozen=True)
class HessianTrace(Measure):
    """Tr H, the sum of all curvatures; up to a factor the average rise of the loss under isotropic noise.

    Exact in networks that are piecewise linear in each layer, an estimate with a standard error in others (see
    ``flatminima.trace``).

    Attributes:
        rtol: Relative standard error at which to stop.
    """

    rtol: float = 0.02

    key = "hessian-trace"
    title = "Hessian trace"
    source = "Dinh et al. 2017, sec. 3"
    formula = "Tr H"
    meaning = "The sum of the curvatures in all directions."
    cost = "K backward passes for K classes (exact), and 2 Hessian products a layer"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("permutation", "softmax shift")

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        return trace(Hessian(objective), rtol=self.rtol, generator=generator)
