"""The squared norm of the weights: the baseline that every sharpness must beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from flatminima.estimators import Estimate
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective

__all__ = ["SquaredNorm"]


@final
@dataclass(frozen=True)
class SquaredNorm(Measure):
    """Σ ‖W‖_F² over the weight matrices and kernels (parameters of two or more dimensions; no biases, no scales)."""

    key = "squared-norm"
    title = "Squared weight norm"
    source = "baseline"
    formula = "Σ ‖W‖_F²"
    meaning = "How large the weights are; it knows nothing of the data."
    cost = "none"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("permutation")

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        parts = objective.space.unflatten(objective.theta)
        weights = [part for part in parts.values() if part.ndim >= 2]
        value = sum((w.square().sum() for w in weights), torch.zeros((), dtype=objective.dtype, device=objective.device))
        return Estimate.exact(value, method="exact")
