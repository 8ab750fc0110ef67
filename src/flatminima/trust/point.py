"""Is this a minimum at all? What further training would gain, and both ends of the Hessian's spectrum.

The gradient's norm and the sign of an eigenvalue cannot tell: a rescaling of the network changes the one, and a gradient that is
not quite zero makes the other negative at a minimum, along every orbit of a continuous symmetry. So everything is asked as a fall
of the loss, and compared with what training has gained so far: how far the loss lies below that of outputs which do not depend
on the inputs.

- *Slope*: how far a Gauss–Newton step would lower the loss, ½ gᵀG⁺g, by conjugate gradients with the diagonal of G as
  preconditioner, whose iterates are the same in all coordinates that differ by a factor on each parameter. If that is much, the
  step is tried: the loss must really fall by a tenth of what would be too much. Where the loss slopes and G does not bend (a loss
  that is piecewise linear in the outputs), no step is known, and the answer is that it cannot be told. Without a G (a closure)
  the step is one of 1/λ_max along the gradient, which does depend on the coordinates.
- *Saddle*: how far the loss really falls below its tangent along the eigenvectors of negative eigenvalues. A convex function
  never does. Which directions are looked at depends on the coordinates: a saddle that is found is one in all of them, but a
  rescaling that puts other directions among the most negative may hide one, as may one whose way down begins at third order.

Falls below the rounding of the loss count as none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from flatminima._errors import FlatminimaError
from flatminima.estimators import Eigenpairs, diagonal, eigenpairs
from flatminima.objective import Evaluation, Objective
from flatminima.operators import GaussNewton, Hessian
from flatminima.trust.result import MinimumCheck, Spectrum
from flatminima.trust.verdict import LARGEST_SHARE_LEFT, gained_by_training, minimum_verdict, share_left

__all__ = ["check_minimum", "constant_losses", "fall_along", "fall_below_tangent", "gauss_newton_step", "zero_rows"]

_EIGENVALUES = 5
_RTOL, _MAX_PRODUCTS = 1e-3, 200
_MAX_STEPS, _ENOUGH, _SMALL = 50, 10.0, 1e-6
_SHARES_OF_MEAN = (0.0, 0.25, 0.5, 1.0)
_ROUNDING = 100.0  # a difference of losses counts from so many eps of the loss on
_AWAY, _GROWS = 1e3, 4.0
_SINGULAR = 100.0  # curvature along a direction is rounding up to so many eps of that along its parameters
_MAX_DOUBLINGS, _MAX_HALVINGS, _KEPT = 60, 10, 0.1


@final
@dataclass(frozen=True, eq=False)
class GaussNewtonStep:
    """A step towards where the quadratic model of the loss is least.

    Attributes:
        steps: Shape ``(n,)`` each: shorter and longer parts of the way, the last one to its end.
        fall: ½ gᵀG⁺g, from below: how far the last one lowers the model.
        is_all: Whether the loss slopes only where G bends upwards; if not, it may fall further, and nobody knows how far.
        num_products: Products with G.
    """

    steps: tuple[Tensor, ...]
    fall: float
    is_all: bool
    num_products: int


def check_minimum(objective: Objective, generator: torch.Generator) -> tuple[MinimumCheck, Spectrum, list[str]]:
    """Return what the point is, both ends of the Hessian's spectrum, and remarks."""
    value, gradient = objective.value_and_gradient()
    H, loss = Hessian(objective), float(value)
    k = min(_EIGENVALUES, max(1, H.size // 2))
    pairs = eigenpairs(H, k=k, which="BE", rtol=_RTOL, max_products=_MAX_PRODUCTS, generator=generator)
    values, residuals = pairs.values.tolist(), pairs.residuals.tolist()
    size = max(abs(v) for v in values)
    noise = max(residuals[-1], 10 * torch.finfo(objective.dtype).eps * H.size**0.5 * size)
    constants = constant_losses(objective)
    reference = min(constants, default=None)
    gained = gained_by_training(loss, reference)
    rounding = _ROUNDING * torch.finfo(objective.dtype).eps * max(map(abs, (loss, *constants)))
    falls = _falls(objective, loss, gradient, pairs, noise, gained, rounding)
    check = MinimumCheck(
        loss=loss,
        gradient_norm=float(gradient.norm()),
        smallest_eigenvalue=values[-1],
        smallest_residual=residuals[-1],
        largest_eigenvalue=values[0],
        noise=noise,
        verdict=minimum_verdict(falls.slope, falls.saddle, gained, is_known=falls.is_known),
        reference_loss=reference,
        expected_fall=falls.slope,
        num_products=pairs.num_products + falls.num_products,
        saddle_fall=falls.saddle,
    )
    notes = []
    if max(residuals[0], residuals[-1]) > _RTOL * size:
        notes.append(f"The outermost eigenvalues had not converged after {_MAX_PRODUCTS} products; see their residuals.")
    return check, Spectrum(tuple(values[:k]), tuple(values[k:]), tuple(residuals)), notes


def constant_losses(objective: Objective) -> list[float]:
    """Return losses of outputs that do not depend on the inputs; none where such outputs are not defined.

    Tried are the outputs' mean over the examples and that drawn towards 0, where a confident network's mean is no good guess. The
    l2 term is that of the objective's point.
    """
    if not objective.has_model:
        return []
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
        losses += objective.l2 / 2 * float(objective.theta.square().sum())
    except (FlatminimaError, RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # no one tensor of outputs
        return []
    return [value for value in losses.tolist() if math.isfinite(value)]


def gauss_newton_step(objective: Objective, gradient: Tensor, *, enough: float = math.inf) -> GaussNewtonStep:
    """Return the step −G⁺g, by conjugate gradients on the parameters in which G bends upwards.

    Args:
        objective: The loss.
        gradient: Its gradient ``(n,)``.
        enough: A fall at which to stop.

    Raises:
        NotSupported: If there is no Gauss–Newton matrix.
    """
    G, eps = GaussNewton(objective), torch.finfo(objective.dtype).eps
    curvature = diagonal(G, method="exact").value
    is_rounding = _curvature_nearby(objective) > _GROWS * curvature.clamp_min(0)
    bends = (curvature > 0) & ~is_rounding
    is_all = not bool(((curvature <= 0) & ~is_rounding & (gradient != 0)).any())
    weight, inverse = (torch.where(bends, x, torch.zeros_like(x)) for x in (curvature, 1 / curvature))
    x, r, fall = torch.zeros_like(gradient), gradient.clone(), 0.0
    p = inverse * r
    start = rz = float(r @ p)
    steps: list[Tensor] = []
    num_products = 0
    while num_products < _MAX_STEPS and fall < enough and rz > _SMALL * start:
        Gp, size = G @ p, float(p @ (weight * p))
        num_products += 1
        bend = float(p @ Gp)
        if bend < -(eps**0.5) * size:
            return GaussNewtonStep((*steps, x), fall, False, num_products)
        length = rz / max(bend, _SINGULAR * eps * size)
        fall += length * rz / 2
        x = x - length * p
        if num_products & (num_products - 1) == 0:
            steps.append(x)
        r -= length * Gp
        z = inverse * r
        before, rz = rz, float(r @ z)
        p = z + rz / before * p
    return GaussNewtonStep((*steps, x), fall, is_all, num_products)


def _curvature_nearby(objective: Objective) -> Tensor:
    """Return the diagonal of G a thousand roundings away: what is nothing but rounding is a million times larger there."""
    theta = objective.theta
    generator = torch.Generator(theta.device).manual_seed(0)
    signs = 2 * torch.empty_like(theta).bernoulli_(generator=generator) - 1
    away = objective.at(theta * (1 + _AWAY * torch.finfo(objective.dtype).eps * signs))
    return diagonal(GaussNewton(away), method="exact").value


def fall_along(objective: Objective, steps: Sequence[Tensor], *, loss: float, enough: float = math.inf) -> float:
    """Return how far the loss really falls by one of the steps, or a half, a quarter, … of it; the first such that is enough.

    The quadratic model promises a fall also at a minimum that lies in a kink, as those of networks of ReLUs do.
    """
    best = 0.0
    for step in steps:
        for halvings in range(_MAX_HALVINGS):
            best = max(best, loss - float(objective.value(objective.theta + 0.5**halvings * step)))  # NaN counts as no fall
            if best > enough:
                return best
    return best


def fall_below_tangent(objective: Objective, direction: Tensor, *, loss: float, slope: float, first: float) -> float:
    r"""Return how far the loss falls below its tangent and itself on the line along ``direction``: 0 if it is convex there.

    .. math:: \max_t\; L(θ) - L(θ + t d) - |t\, gᵀd|

    Args:
        objective: The loss.
        direction: d, of shape ``(n,)``.
        loss: L(θ).
        slope: gᵀd.
        first: Size of the first step t tried, to both sides. Doubled ones follow until the fall has not grown twice in a row.
    """
    best = 0.0
    for sign in (1.0, -1.0):
        t, highest, patience = sign * first, 0.0, 3
        for _ in range(_MAX_DOUBLINGS):
            fall = loss - float(objective.value(objective.theta + t * direction)) - abs(t * slope)
            patience = 2 if fall > highest else patience - 1
            if not patience:
                break
            highest, t = max(highest, fall), 2 * t  # NaN counts as no fall
        best = max(best, highest)
    return best


def zero_rows(objective: Objective, generator: torch.Generator) -> list[str]:
    """Return the names of the parameters whose rows of the Hessian are zero. Takes one product."""
    probe = torch.randn(objective.space.size, generator=generator, device=objective.device)
    product = Hessian(objective) @ probe.to(objective.dtype)
    return [name for name, where in objective.space.slices.items() if not bool(product[where].any())]


@final
@dataclass(frozen=True)
class _Falls:
    """How far the loss can fall along its slope and below it, 0 up to rounding, and whether the slope is known to the end."""

    slope: float
    saddle: float
    is_known: bool
    num_products: int


def _falls(
    objective: Objective, loss: float, gradient: Tensor, pairs: Eigenpairs, noise: float, gained: float, rounding: float
) -> _Falls:
    bound = loss - (objective.loss.least if objective.has_model else -math.inf)
    if bound <= rounding:
        return _Falls(0.0, 0.0, True, 0)
    if share_left(bound, gained) <= LARGEST_SHARE_LEFT:
        return _Falls(bound, 0.0, True, 0)
    saddle = _saddle_fall(objective, loss, gradient, pairs, noise, max(LARGEST_SHARE_LEFT * gained, rounding))
    saddle = saddle if saddle > rounding else 0.0
    much = max(LARGEST_SHARE_LEFT * (gained + saddle), rounding)
    step = _step(objective, gradient, float(pairs.values[0]), noise, _ENOUGH * much)
    slope = min(bound, step.fall)
    if slope > much:
        least = max(_KEPT * much, rounding)
        tried = fall_along(objective, step.steps, loss=loss, enough=least)
        slope = slope if tried > least else tried
    return _Falls(slope if slope > rounding else 0.0, saddle, step.is_all, step.num_products)


def _step(objective: Objective, gradient: Tensor, largest: float, noise: float, enough: float) -> GaussNewtonStep:
    """Return ``gauss_newton_step``, or a step of 1/λ_max along the gradient where there is no such matrix."""
    if not bool(gradient.any()):
        return GaussNewtonStep((), 0.0, True, 0)
    try:
        return gauss_newton_step(objective, gradient, enough=enough)
    except FlatminimaError:
        if largest <= noise:
            return GaussNewtonStep((), 0.0, False, 0)
        return GaussNewtonStep((-gradient / largest,), float(gradient.square().sum()) / (2 * largest), True, 0)


def _saddle_fall(objective: Objective, loss: float, gradient: Tensor, pairs: Eigenpairs, noise: float, wanted: float) -> float:
    """Return how far the loss falls below its tangent along an eigenvector of a negative eigenvalue."""
    best = 0.0
    for value, v in zip(pairs.values.flip(0).tolist(), pairs.vectors.T.flip(0), strict=True):
        if value >= -noise or best > 2 * wanted:
            break
        first = math.sqrt(wanted / -value) / 4 or torch.finfo(objective.dtype).eps ** 0.5
        best = max(best, fall_below_tangent(objective, v, loss=loss, slope=float(gradient @ v), first=first))
    return best
