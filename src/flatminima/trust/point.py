"""Is this a minimum at all? What further training would gain, and both ends of the Hessian's spectrum.

The gradient's norm cannot tell: a rescaling of the network changes it like any other number that belongs to the coordinates. What
is asked here does not change under one:

- how far a Gauss–Newton step would lower the loss, ½ gᵀG⁺g, by conjugate gradients with the diagonal of G as
  preconditioner, whose iterates are the same in all coordinates that differ by a factor on each parameter;
- what training has gained so far: how far the loss lies below that of outputs which do not depend on the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flatminima._errors import FlatminimaError
from flatminima.estimators import diagonal, eigenpairs
from flatminima.objective import Evaluation, Objective
from flatminima.operators import GaussNewton, Hessian
from flatminima.trust.result import MinimumCheck, Spectrum
from flatminima.trust.verdict import LARGEST_SHARE_LEFT, gained_by_training, minimum_verdict, share_left

__all__ = ["check_minimum", "gauss_newton_fall", "reference_loss", "zero_rows"]

_EIGENVALUES = 5
_RTOL, _MAX_PRODUCTS = 1e-3, 200
_MAX_STEPS, _ENOUGH, _SMALL = 50, 10.0, 1e-6
_SHARES_OF_MEAN = (0.0, 0.25, 0.5, 1.0)


def check_minimum(objective: Objective, generator: torch.Generator) -> tuple[MinimumCheck, Spectrum, list[str]]:
    """Return what the point is, both ends of the Hessian's spectrum, and remarks."""
    value, gradient = objective.value_and_gradient()
    H, loss = Hessian(objective), float(value)
    k = min(_EIGENVALUES, max(1, H.size // 2))
    pairs = eigenpairs(H, k=k, which="BE", rtol=_RTOL, max_products=_MAX_PRODUCTS, generator=generator)
    values, residuals = pairs.values.tolist(), pairs.residuals.tolist()
    size = max(abs(v) for v in values)
    noise = max(residuals[-1], 10 * torch.finfo(objective.dtype).eps * H.size**0.5 * size)
    reference = reference_loss(objective)
    gained = gained_by_training(loss, reference)
    bound = loss - objective.loss.least
    fall, num_products = bound, 0
    if share_left(fall, gained) > LARGEST_SHARE_LEFT:
        predicted, num_products = _predicted_fall(objective, gradient, values[0], gained)
        fall = min(fall, predicted)
    check = MinimumCheck(
        loss=loss,
        gradient_norm=float(gradient.norm()),
        smallest_eigenvalue=values[-1],
        smallest_residual=residuals[-1],
        largest_eigenvalue=values[0],
        noise=noise,
        verdict=minimum_verdict(fall, bound, gained, values[-1], noise),
        reference_loss=reference,
        expected_fall=fall,
        num_products=pairs.num_products + num_products,
    )
    notes = []
    if max(residuals[0], residuals[-1]) > _RTOL * size:
        notes.append(f"The outermost eigenvalues had not converged after {_MAX_PRODUCTS} products; see their residuals.")
    return check, Spectrum(tuple(values[:k]), tuple(values[k:]), tuple(residuals)), notes


def reference_loss(objective: Objective) -> float | None:
    """Return the least loss that outputs have which do not depend on the inputs, or None where it is not defined.

    Tried are the outputs' mean over the examples and that drawn towards 0, where a confident network's mean is no good guess. The
    l2 term is that of the objective's point.
    """
    evaluator = objective.model_evaluator("The loss of constant outputs")
    is_nll = objective.loss.name == "nll"

    def total(evaluation: Evaluation, _leaves: Mapping[str, Tensor]) -> Tensor:
        outputs = evaluation.outputs
        assert outputs is not None
        return torch.cat([outputs.sum(0).reshape(-1), outputs.new_tensor([len(outputs)])]).double()

    def loss(evaluation: Evaluation, _leaves: Mapping[str, Tensor]) -> Tensor:
        outputs = evaluation.outputs
        assert outputs is not None
        constant = mean.to(outputs).reshape(outputs.shape[1:]).expand_as(outputs)
        tried = [share * constant for share in _SHARES_OF_MEAN]
        return torch.stack([evaluator.total_of(c.log_softmax(1) if is_nll else c, evaluation) for c in tried]).double()

    try:
        sums = objective.integrate(total, gradients=False)
        mean = sums[:-1] / sums[-1]
        losses = objective.integrate(loss, gradients=False)
        value = float(losses.nan_to_num(math.inf).min()) + objective.l2 / 2 * float(objective.theta.square().sum())
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # outputs of several shapes, or no one tensor
        return None
    return value if math.isfinite(value) else None


def gauss_newton_fall(objective: Objective, gradient: Tensor, *, enough: float = math.inf) -> tuple[float, int]:
    """Return how far a Gauss–Newton step lowers the loss to second order, at least, and the products that this took.

    Args:
        objective: The loss.
        gradient: Its gradient ``(n,)``.
        enough: A fall at which to stop.

    Returns:
        ½ gᵀG⁺g, from below; infinite where the loss falls along a direction in which G does not bend upwards.

    Raises:
        NotSupported: If there is no Gauss–Newton matrix.
    """
    G = GaussNewton(objective)
    curvature = diagonal(G, method="exact").value
    if bool(((curvature <= 0) & (gradient != 0)).any()):
        return math.inf, 0
    inverse = torch.where(curvature > 0, 1 / curvature, torch.zeros_like(curvature))
    r, fall = gradient.clone(), 0.0
    p = inverse * r
    start = rz = float(r @ p)
    for step in range(1, _MAX_STEPS + 1):
        Gp = G @ p
        bend = float(p @ Gp)
        if bend <= 0:
            return (math.inf if rz > 0 else fall), step
        fall += rz * rz / bend / 2
        r -= rz / bend * Gp
        z = inverse * r
        before, rz = rz, float(r @ z)
        if fall >= enough or rz <= _SMALL * start:
            return fall, step
        p = z + rz / before * p
    return fall, _MAX_STEPS


def zero_rows(objective: Objective, generator: torch.Generator) -> list[str]:
    """Return the names of the parameters whose rows of the Hessian are zero. Takes one product."""
    probe = torch.randn(objective.space.size, generator=generator, device=objective.device)
    product = Hessian(objective) @ probe.to(objective.dtype)
    return [name for name, where in objective.space.slices.items() if not bool(product[where].any())]


def _predicted_fall(objective: Objective, gradient: Tensor, largest: float, gained: float) -> tuple[float, int]:
    """Return the fall of a Gauss–Newton step; of a step of 1/λ_max along the gradient where there is no such matrix."""
    if not bool(gradient.any()):
        return 0.0, 0
    try:
        return gauss_newton_fall(objective, gradient, enough=_ENOUGH * LARGEST_SHARE_LEFT * gained if gained else 0.0)
    except FlatminimaError:
        return float(gradient.square().sum()) / (2 * largest) if largest > 0 else math.inf, 0
