"""GaussNewton: the part of the Hessian that comes from the curvature of the loss in the outputs."""

from __future__ import annotations

from typing import final

from torch import Tensor

from flatminima.objective import Evaluation
from flatminima.operators.middle_factor import MiddleFactor, MiddleFactors
from flatminima.operators.output_hessian import loss_hessian
from flatminima.operators.sandwich import Sandwich

__all__ = ["GaussNewton"]


@final
class GaussNewton(Sandwich):
    r"""The generalised Gauss–Newton matrix G, shape ``(n, n)``.

    .. math:: G = \frac1T \sum_b J_b^\top \Lambda_b J_b, \qquad H = G + \frac1T \sum_b \sum_k
              \frac{\partial \text{total}_b}{\partial o_k} \nabla^2_\theta o_k,

    with J the Jacobian of the outputs and Λ the loss's Hessian in them (Schraudolph 2002): for softmax cross-entropy
    diag(p) − ppᵀ, and G is then the Fisher information. Positive semi-definite for a loss that is convex in the outputs. For
    y = w x and L = (wx − y)², G = H = 2x². The objective's l2 term is included, as in the Hessian.

    A product costs one forward pass and three backward ones per column; J v is taken as the derivative of Jᵀu in u, and in
    forward mode where torch has no second derivative of the model.

    Args:
        objective: The loss, of the form ``loss(outputs, targets)``. The point θ is read now.

    Raises:
        NotSupported: If the objective does not know the model's outputs (a closure, or a loss that calls the model itself); at
            the first product, if torch has no second derivative of the loss.
    """

    label = "Gauss-Newton"

    def middle_factors(self) -> MiddleFactors:
        def middle_factor(evaluation: Evaluation, outputs: Tensor) -> MiddleFactor:
            return loss_hessian(self.evaluator, evaluation, outputs)

        return middle_factor
