"""Hessian: the second derivative of the objective, by products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective import Evaluation, Objective, gradients_of
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["Hessian"]


@final
class Hessian(LinearOperator):
    r"""H = ∇²L(θ), shape ``(n, n)``, of exactly the scalar that the objective states, its l2 term included.

    .. math:: H v = \nabla_\theta \big( \nabla_\theta L(\theta)^\top v \big)

    Two nested reverse passes (Pearlmutter 1994). One forward pass and one gradient graph serve all the columns of a block
    ``(n, k)``: about 1 + 2k gradients. Symmetric, in general not positive semi-definite. A parameter that the loss does not
    use, or uses linearly, has a zero row. At the kink of a piecewise-linear network the product is that of torch's chosen
    branch (relu'(0) = 0).

    Args:
        objective: The loss. The point θ is read now, so that later training does not move the operator; data and buffers are
            read at every product.

    Raises:
        NotSupported: At the first product, if torch has no second derivative for an operation, or one that is not symmetric.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.theta = objective.theta

    @property
    def size(self) -> int:
        return self.objective.space.size

    @property
    def dtype(self) -> torch.dtype:
        return self.objective.dtype

    @property
    def device(self) -> torch.device:
        return self.objective.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self.objective.space.slices

    def _matmat(self, V: Tensor) -> Tensor:
        space, known = self.objective.space, self.objective.architecture

        def products(evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> Tensor:
            gradients = gradients_of(evaluation.total, leaves, create_graph=True)
            if "asymmetry" not in known:
                known["asymmetry"] = self._asymmetry(gradients, leaves)
            return torch.stack([self._product(gradients, leaves, space.unflatten(v)) for v in V.T.contiguous()], dim=1)

        with named_missing_derivative():
            result = self.objective.integrate(products, self.theta)
        if known["asymmetry"]:
            self._check_elsewhere(known)
        return result + self.objective.l2 * V if self.objective.l2 else result

    def _product(self, gradients: Sequence[Tensor], leaves: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        # A gradient without a graph is constant in θ: its rows of H are zero.
        live = [(g, v[name].to(g.dtype)) for g, name in zip(gradients, leaves, strict=True) if g.requires_grad]
        if not live:
            return torch.zeros(self.size, dtype=self.dtype, device=self.device)
        columns = torch.autograd.grad(
            [g for g, _ in live],
            list(leaves.values()),
            [part for _, part in live],
            retain_graph=True,
            materialize_grads=True,
        )
        return self.objective.space.flatten(columns, self.dtype)

    def _asymmetry(self, gradients: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> str:
        """Compare uᵀHv with vᵀHu, and return both where they differ by more than plain rounding.

        torch's second derivative of some fused operations is wrong, and then it is not symmetric either.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        u, v = torch.empty(2, self.size, dtype=self.dtype, device=self.device).normal_(generator=generator)
        Hu, Hv = (self._product(gradients, leaves, self.objective.space.unflatten(w)) for w in (u, v))
        epsilon = max(torch.finfo(leaf.dtype).eps for leaf in leaves.values())
        difference, size = (u @ Hv - v @ Hu).abs(), Hu.norm() * v.norm() + Hv.norm() * u.norm()
        if not difference > 1e3 * epsilon * size / self.size**0.5:  # an overflow is told elsewhere
            return ""
        return f"uᵀHv = {float(u @ Hv):.6g}, vᵀHu = {float(v @ Hu):.6g}"

    def _check_elsewhere(self, known: dict[str, Any]) -> None:
        """Look at the symmetry again at θ/4 and θ/16, where the loss is not saturated.

        Near a loss of 0 the curvature is what is left when numbers of order 1 cancel, and its rounding is large beside it. A
        wrong formula is wrong everywhere.
        """
        here, found = known["asymmetry"], [""]

        def first_batch(evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> Tensor:
            if not found:
                found.append(self._asymmetry(gradients_of(evaluation.total, leaves, create_graph=True), leaves))
            return evaluation.total.detach()

        for share in (1 / 4, 1 / 16):
            found.clear()
            self.objective.integrate(first_batch, share * self.theta)
            if not found[0]:
                known["asymmetry"] = ""
                return
        raise NotSupported(
            f"torch's second derivative of this model is wrong: the Hessian is not symmetric ({here}). Known causes: weight_norm "
            "with a dim other than None, as by default (fold it in with remove_parametrizations or remove_weight_norm), and "
            "custom autograd functions."
        )
