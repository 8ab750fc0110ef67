"""Node-wise minimum sharpness: the trace at the flattest network that any rescaling of units makes of this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from flatminima.estimators import Estimate
from flatminima.measures.base import Measure, invariant_to
from flatminima.measures.minimum_sharpness import smallest_trace
from flatminima.objective import Objective
from flatminima.symmetries import normalize_statistics

__all__ = ["NodewiseMinimumSharpness"]


@final
@dataclass(frozen=True)
class NodewiseMinimumSharpness(Measure):
    r"""min over the rescalings of all hidden units of the trace at the rescaled network.

    .. math:: \min_u \sum_p G_{pp}\, e^{-2 a_p^\top u}

    over one log-scale u for every hidden unit or channel, +1 in a_p for what produces the unit and −1 for what reads it. Convex;
    where layer rescaling is one number a layer, this is one a unit, so it divides out all rescalings of a homogeneous network.
    Weights that a BatchNorm reads have no least trace (scaled up they get ever flatter): they are measured at running variance
    1. Units that nothing enters or that nothing reads count with the limit, and are reported as ``dead_units``.
    """

    key = "nodewise-minimum-sharpness"
    title = "Minimum sharpness (units)"
    source = "this library; extends Ibayashi et al. 2021"
    formula = "min_s Tr G(T_s θ), one factor s per hidden unit; Tr G = Tr H where piecewise linear"
    meaning = "The trace of the Gauss-Newton matrix after each hidden unit has been scaled so as to make it smallest."
    cost = "K backward passes for K classes"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("layer", "node", "permutation", "norm-scale", "softmax shift")

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        return smallest_trace(normalize_statistics(objective), "node", biases=True)
