"""The Frobenius norm of a Hessian by differences of gradients, as in the paper of 2017, and a check of what they are worth."""

from __future__ import annotations

import warnings
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_positive
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.quantity import Quantity
from flatminima.estimators.sampling import Plan, check_finite, draw_probes, sample_mean
from flatminima.operators import Hessian, LinearOperator

__all__ = ["DEFAULT_EPSILON", "DEFAULT_NUM_DIFFERENCES", "by_finite_differences", "check_difference"]

#: The paper's ε and M.
DEFAULT_EPSILON = 1e-5
DEFAULT_NUM_DIFFERENCES = 100
_NUM_COMPARED = 3
_TOLERANCE = 0.01


def check_difference(A: LinearOperator, epsilon: float | None) -> tuple[Hessian, float]:
    """Return the Hessian and the step, if differences of gradients can be taken."""
    if not isinstance(A, Hessian):
        raise TypeError(
            f"`A` must be a Hessian for method='finite-difference' (it is the gradient of the objective that is differenced). "
            f"Got {type(A).__name__}. Use method='hutchinson' for other operators."
        )
    return A, check_positive("epsilon", DEFAULT_EPSILON if epsilon is None else epsilon)


def by_finite_differences(H: Hessian, square: Quantity, epsilon: float, plan: Plan) -> Estimate:
    r"""Return ‖H‖_F² in float64 from differences in place of products, two gradients each.

    .. math:: \|H\|_F^2 \approx \frac1M \sum_{i=1}^M \Big\lVert
        \frac{\nabla L(\theta + \epsilon v_i) - \nabla L(\theta - \epsilon v_i)}{2 \epsilon} \Big\rVert^2

    The three longest differences are compared with the products H v that they stand for, which count as products.

    Warns:
        RuntimeWarning: If those differ by more than 1 %: the step crosses kinks, or is below rounding.
    """
    longest = _Longest()

    def draw(count: int) -> tuple[Tensor, None]:
        V = draw_probes(H, count, plan)
        D = check_finite(torch.stack([_difference(H, v, epsilon) for v in V.T.contiguous()], 1))
        longest.take(V, D)
        return square.q(V, D), None

    samples = sample_mean(
        draw,
        size=H.size,
        plan=plan,
        first_look=square.first_look,
        relative_error=square.relative_error,
        message=f"{square.name} by differences",
    )
    if longest.count:
        _compare(H, longest, epsilon)
    return Estimate(
        samples.mean,
        samples.stderr,
        method="finite-difference",
        num_samples=samples.num_samples,
        skewness=samples.skewness,
        num_products=longest.count,
        num_gradients=2 * samples.num_samples,
        converged=samples.converged,
        details={"epsilon": epsilon},
    )


def _difference(H: Hessian, v: Tensor, epsilon: float) -> Tensor:
    ahead, behind = (H.objective.gradient(H.theta + step * v) for step in (epsilon, -epsilon))
    return (ahead - behind) / (2 * epsilon)


@final
class _Longest:
    """The longest differences so far with their probes: those that a kink has most likely stretched."""

    def __init__(self) -> None:
        self.V = self.D = torch.empty(0, 0)

    @property
    def count(self) -> int:
        return self.D.shape[1]

    def take(self, V: Tensor, D: Tensor) -> None:
        if self.count:
            V, D = torch.cat([self.V, V], 1), torch.cat([self.D, D], 1)
        order = torch.linalg.vector_norm(D, dim=0, dtype=torch.float64).argsort(descending=True)[:_NUM_COMPARED]
        self.V, self.D = V[:, order].clone(), D[:, order].clone()


def _compare(H: Hessian, longest: _Longest, epsilon: float) -> None:
    """Warn where the differences are not the products."""
    products = H @ longest.V
    off, size, true = (
        float(torch.linalg.vector_norm(X, dtype=torch.float64)) for X in (longest.D - products, longest.D, products)
    )
    if off > _TOLERANCE * true:
        ratio = size / true if true else float("inf")
        relative = off / true if true else float("inf")
        warnings.warn(
            f"Differences of gradients with epsilon={epsilon:g} are not products with the Hessian here: the {longest.count} "
            f"longest are {ratio:.3g} times as long, and {relative:.2g} of the length off. Either the "
            "step crosses kinks (ReLU, max pooling), where the estimate is too large whatever the step; or it is too small for "
            f"{str(H.dtype).removeprefix('torch.')}, or too large. Use the products: method='auto'.",
            RuntimeWarning,
            stacklevel=4,
        )
