"""GaussNewton: the part of the Hessian that comes from the curvature of the loss in the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective import Evaluation, Objective
from flatminima.operators.base import LinearOperator, named_missing_derivative
from flatminima.operators.output_hessian import check_outputs, output_product

__all__ = ["GaussNewton"]


@final
class GaussNewton(LinearOperator):
    r"""The generalised Gauss–Newton matrix G, shape ``(n, n)``.

    .. math:: G = \frac1T \sum_b J_b^\top \Lambda_b J_b, \qquad H = G + \frac1T \sum_b \sum_k
              \frac{\partial \text{total}_b}{\partial o_k} \nabla^2_\theta o_k,

    with J the Jacobian of the outputs and Λ the loss's Hessian in them (Schraudolph 2002): for softmax cross-entropy
    diag(p) − ppᵀ, and G is then the Fisher information. Positive semi-definite for a loss that is convex in the outputs. The
    objective's l2 term is included, as in the Hessian. A product costs one forward pass and three backward ones per column;
    J v is taken as the derivative of Jᵀu in u, which exists wherever a second derivative does.

    Args:
        objective: The loss, of the form ``loss(outputs, targets)``. The point θ is read now.

    Raises:
        NotSupported: If the objective does not know the model's outputs (a closure, or a loss that calls the model itself).
    """

    def __init__(self, objective: Objective) -> None:
        evaluator = objective.model_evaluator("The Gauss-Newton matrix")
        if evaluator.takes_model:
            raise NotSupported(
                "The Gauss-Newton matrix must know the model's outputs. Got a loss that calls the model itself. "
                "Give it as loss(outputs, targets)."
            )
        self.objective, self._evaluator = objective, evaluator
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
            outputs = check_outputs(self.objective.loss, evaluation.outputs)
            if not outputs.requires_grad:
                return torch.zeros_like(V)
            parameters = list(leaves.values())
            curvature = output_product(self._evaluator, evaluation, outputs.detach())
            dual = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(outputs, parameters, dual, create_graph=True, materialize_grads=True)
            live = [index for index, g in enumerate(pulled) if g.requires_grad]
            columns = []
            for v in V.T.contiguous():
                parts = [part.to(p.dtype) for part, p in zip(space.unflatten(v).values(), parameters, strict=True)]
                (pushed,) = torch.autograd.grad(
                    [pulled[i] for i in live], dual, [parts[i] for i in live], retain_graph=True, materialize_grads=True
                )
                column = torch.autograd.grad(outputs, parameters, curvature(pushed), retain_graph=True, materialize_grads=True)
                columns.append(space.flatten(column, dtype))
            return torch.stack(columns, dim=1)

        with named_missing_derivative():
            result = self.objective.integrate(products, self.theta)
        return result + self.objective.l2 * V if self.objective.l2 else result
