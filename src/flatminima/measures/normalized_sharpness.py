"""Normalised sharpness: a PAC-Bayes trade-off of curvature and size, minimised over row and column scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from flatminima.estimators import Estimate, diagonal
from flatminima.measures.base import Measure, invariant_to
from flatminima.objective import Objective
from flatminima.operators import GaussNewton
from flatminima.params import clean_name
from flatminima.symmetries import centre_classes

__all__ = ["NormalizedSharpness", "least_sharpness"]


@final
@dataclass(frozen=True)
class NormalizedSharpness(Measure):
    r"""Σ over layers of min over s, t > 0 of Σ_ij [ H_ij s_i t_j + W_ij² / (s_i t_j) ] (Tsuzuku, Sato & Sugiyama 2020).

    H_ij is the second derivative in the weight W_ij, exactly; kernels are summed over their spatial positions first, and grouped
    convolutions count one matrix per group. The diagonal is that of the Gauss–Newton matrix: a single negative entry would make
    the minimum −∞. Alternating closed forms s_i = √((V t⁻¹)_i / (H t)_i), and t likewise, with V = W∘W. This is the form of the
    arXiv version; the conference version takes the square root of each layer's minimum, and the two do not agree. Biases and
    scales of normalisation layers do not enter.

    Attributes:
        centre: Whether to divide out the softmax shift first; without it the value moves under the shift.
    """

    centre: bool = True

    key = "normalized-sharpness"
    title = "Normalised sharpness"
    source = "Tsuzuku, Sato & Sugiyama 2020, arXiv version"
    formula = "Σ_layers min_{s,t>0} Σ_ij H_ij s_i t_j + W_ij²/(s_i t_j)"
    meaning = "Curvature times squared weight, combined so that no scaling of rows and columns can change it."
    cost = "K backward passes for K classes"

    @property
    def invariances(self) -> Mapping[str, bool]:
        kinds = ("layer", "node", "permutation", "norm-scale")
        return invariant_to(*kinds, "softmax shift") if self.centre else invariant_to(*kinds)

    def _measure(self, objective: Objective, generator: torch.Generator | None) -> Estimate:
        objective = centre_classes(objective) if self.centre else objective
        curvature = diagonal(GaussNewton(objective))
        H = objective.space.unflatten((curvature.value - objective.l2).clamp_min(0).double())
        W = objective.space.unflatten(objective.theta.double())
        groups = {
            clean_name(f"{name}.weight".lstrip(".")): module.groups
            for name, module in objective.model.named_modules()
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        }
        total, converged = 0.0, True
        for name, weight in W.items():
            for h, v in _matrices(H[name], weight.square(), groups.get(name, 1)):
                value, done = least_sharpness(h, v)
                total, converged = total + value, converged and done
        return Estimate.exact(
            torch.tensor(total, dtype=objective.dtype),
            method="alternating minimum, exact diagonal",
            num_products=curvature.num_products,
            num_gradients=curvature.num_gradients,
            converged=converged,
        )


def _matrices(H: Tensor, V: Tensor, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (outputs, inputs) matrices of second derivatives and squared weights, one for each group of a layer."""
    if H.ndim < 2:
        return
    H, V = (x.flatten(2).sum(2) if x.ndim > 2 else x for x in (H, V))
    yield from zip(H.chunk(groups), V.chunk(groups), strict=True)


def least_sharpness(H: Tensor, V: Tensor, *, rtol: float = 1e-12, max_sweeps: int = 2000) -> tuple[float, bool]:
    """Return min over s, t > 0 of Σ_ij H_ij s_i t_j + V_ij/(s_i t_j), and whether the sweeps converged.

    Args:
        H: Nonnegative, shape ``(rows, columns)``.
        V: Nonnegative, same shape.
        rtol: Relative fall of the value in a sweep at which to stop.
        max_sweeps: Most sweeps.
    """
    # A row or column without curvature or without weight adds nothing in the limit of its scale.
    while True:
        rows = (H.sum(1) > 0) & (V.sum(1) > 0)
        columns = (H.sum(0) > 0) & (V.sum(0) > 0)
        if rows.all() and columns.all():
            break
        H, V = H[rows][:, columns], V[rows][:, columns]
    if H.numel() == 0:
        return 0.0, True
    # Rows first, in units in which columns are comparable, so that scales of 1e±100 do not overflow.
    t = (V.sum(0) / H.sum(0)).sqrt()
    value = float("inf")
    for _ in range(max_sweeps):
        s = ((V / t).sum(1) / (H * t).sum(1)).sqrt()
        numerator, denominator = (V / s[:, None]).sum(0), (H * s[:, None]).sum(0)
        t = (numerator / denominator).sqrt()
        previous, value = value, float(2 * (numerator * denominator).sqrt().sum())
        if previous - value <= rtol * value:
            return value, True
    return value, False
