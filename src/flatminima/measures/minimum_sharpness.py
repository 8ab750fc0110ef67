"""Minimum sharpness: the trace at the flattest network that layer rescaling makes of this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.estimators import Estimate, diagonal
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import GaussNewton
from flatminima.symmetries import Rescaling, find_symmetries, minimize_over_rescalings

__all__ = ["MinimumSharpness", "smallest_trace"]


@final
@dataclass(frozen=True)
class MinimumSharpness(Measure):
    r"""min over layer rescalings α of Tr H at the rescaled network (Ibayashi et al. 2021, Def. 1).

    .. math:: \min_{a} \sum_{l<D} w_l e^{-2a_l} + \sum_{l<D} b_l e^{-2\sum_{k\le l} a_k} + w_D e^{2\sum a} + b_D

    with the traces w, b of the weights' and biases' blocks; convex, solved to a relative gradient of 1e-12. Without biases it is
    D (∏ Tr H_d)^{1/D}, the paper's closed form, the average over the data taken before the product. The traces are the exact
    ones of the Gauss–Newton matrix, which in a piecewise-linear network are those of the Hessian; elsewhere the value is the
    least trace of the Gauss–Newton matrix. A network without rescalings (tanh) is its own minimum. An l2 term of the objective
    is left out.

    Attributes:
        biases: Whether the biases count. False leaves out the parameters that are called "bias".
    """

    biases: bool = True

    key = "minimum-sharpness"
    title = "Minimum sharpness (layers)"
    source = "Ibayashi et al. 2021, Def. 1 and Prop. 1"
    formula = "min_α Tr G(T_α θ), one factor α per layer; Tr G = Tr H where piecewise linear"
    meaning = "The trace of the Gauss-Newton matrix after each layer has been scaled so as to make it smallest."
    cost = "K backward passes for K classes"

    @property
    def invariances(self) -> Mapping[str, bool]:
        return invariant_to("layer", "permutation", "softmax shift")

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        return smallest_trace(objective, "layer", biases=self.biases)


def smallest_trace(objective: Objective, kind: str, *, biases: bool) -> Estimate:
    """Return the least trace of the Gauss–Newton matrix over the rescalings of a kind, "layer" or "node"."""
    curvature = diagonal(GaussNewton(objective))
    parts = objective.space.unflatten((curvature.value - objective.l2).clamp_min(0))
    weights: dict[str, Tensor] = {name: part for name, part in parts.items() if biases or name.rpartition(".")[2] != "bias"}
    total = float(sum((part.sum() for part in weights.values()), torch.zeros(())))
    cost = {"num_products": curvature.num_products, "num_gradients": curvature.num_gradients}
    rescalings = [s for s in find_symmetries(objective).of_kind(kind) if isinstance(s, Rescaling)]
    if not rescalings:
        return Estimate.exact(
            torch.tensor(total, dtype=objective.dtype), method="no rescaling: the trace itself", details={"trace": total}, **cost
        )
    outside = [name for name in rescalings[0].parameters if name not in objective.space.shapes]
    if outside:
        raise NotSupported(
            f"A least trace needs all parameters that the rescaling touches. Got a selection without {', '.join(outside[:3])}: "
            "these could take up any scale, and the minimum would be 0."
        )
    minimum = minimize_over_rescalings(rescalings[0], weights, sign=-1)
    return Estimate.exact(
        torch.tensor(minimum.value, dtype=objective.dtype),
        method="convex minimum of the exact trace",
        converged=minimum.converged,
        details={"trace": total, "gradient": minimum.gradient, "dead_units": len(minimum.dead_units)},
        **cost,
    )
