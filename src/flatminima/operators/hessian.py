"""Hessian: the second derivative of the objective, by products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from flatminima.objective import Evaluation, Objective, gradients_of
from flatminima.operators.base import LinearOperator

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
        space, dtype = self.objective.space, self.dtype

        def products(evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> Tensor:
            gradients = gradients_of(evaluation.total, leaves, create_graph=True)
            return torch.stack([_product(gradients, leaves, space.unflatten(v)) for v in V.T.to(dtype).contiguous()], dim=1)

        def _product(gradients: list[Tensor], leaves: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
            # A gradient without a graph is constant in θ: its rows of H are zero.
            live = [(g, v[name].to(g.dtype)) for g, name in zip(gradients, leaves, strict=True) if g.requires_grad]
            if not live:
                return torch.zeros(space.size, dtype=dtype, device=self.device)
            columns = torch.autograd.grad(
                [g for g, _ in live],
                list(leaves.values()),
                [part for _, part in live],
                retain_graph=True,
                materialize_grads=True,
            )
            return space.flatten(columns, dtype)

        result = self.objective.integrate(products, self.theta)
        return result + self.objective.l2 * V if self.objective.l2 else result
