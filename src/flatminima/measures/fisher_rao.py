"""The Fisher–Rao norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from flatminima.estimators import Estimate
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import GaussNewton
from flatminima.symmetries import KINDS

__all__ = ["FisherRao"]


@final
@dataclass(frozen=True)
class FisherRao(Measure):
    r"""θᵀ F θ with the Fisher information F of the model's own labels (Liang et al. 2019, eq. 3.2).

    For softmax cross-entropy F is the Gauss–Newton matrix, θᵀFθ = E[Var_p(Jθ)]; for another loss the Gauss–Newton matrix is
    taken in its place. One Jacobian product, no sampling. The closed form of the paper's Thm. 3.1 holds without biases only;
    this does not need it. An l2 term of the objective is left out: it is no information about the outputs.
    """

    key = "fisher-rao"
    title = "Fisher-Rao norm"
    source = "Liang et al. 2019, Def. 2"
    formula = "θᵀ F θ"
    meaning = "How much the model's predictions change, in nats, when all its weights grow by the same small percentage."
    cost = "1 Gauss-Newton product"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to(*KINDS)

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        theta = objective.theta
        value = theta @ (GaussNewton(objective) @ theta) - objective.l2 * theta.square().sum()
        return Estimate.exact(value, method="one product", num_products=1)
