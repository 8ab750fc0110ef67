"""Hutchinson on what a closed form leaves over.

With A = K + R and K's diagonal known, only R's has to be sampled. For piecewise-linear networks R (the Hessian minus the
Gauss–Newton matrix) has no diagonal block per layer, although its off-diagonal blocks are as large as ever: probes supported
on one layer at a time see none of them. So each layer is probed by itself first. Layers whose block of R vanishes are settled;
the others are sampled by whichever of three unbiased samplers promises to be cheapest after a pilot run: R layer by layer, R
on all of them at once, or A itself. The pilot's samples are not used again, so that choosing by them biases nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from flatminima.estimators.closed_form import ControlVariate
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.low_rank_part import by_cheapest_sampling, grow, sample_rest
from flatminima.estimators.quantity import Quantity, by_probes, by_unit_vectors
from flatminima.estimators.sampling import MIN_SAMPLES, Plan, check_finite, draw_probes, sample_mean
from flatminima.operators.base import LinearOperator

__all__ = ["by_control_variate"]

_METHOD = "exact Gauss-Newton part + hutchinson residual"
#: Sweeps over the layers before any decision; two give a standard error.
_SWEEPS = 2
#: Whole-vector probes that decide between samplers.
_PILOT = 8
#: First look at the error of the residual, whose samples are nearly symmetric about 0.
_FIRST_LOOK = 16
_AT_ONCE = 16

_Layer = tuple[slice, ...]


def by_control_variate(
    A: LinearOperator,
    variate: ControlVariate,
    known: Estimate,
    quantity: Quantity,
    reduce: Callable[[Tensor], Tensor],
    plan: Plan,
) -> Estimate | None:
    """Return the quantity as its known part plus a sampled rest, or None where the plan has no room for the first probes.

    A probe of R costs two products, one with A and one with K; both are counted.

    Args:
        A: Operator.
        variate: Its split, and its layers.
        known: The quantity of ``variate.known``.
        quantity: What to estimate.
        reduce: From columns ``(n, b)`` that stand for diagonals to values ``(b, …)``.
        plan: When to stop.
    """
    with variate.known.keeping_graphs():
        return _by_residual(A, variate, known, quantity, reduce, plan)


def _by_residual(
    A: LinearOperator,
    variate: ControlVariate,
    known: Estimate,
    quantity: Quantity,
    reduce: Callable[[Tensor], Tensor],
    plan: Plan,
) -> Estimate | None:
    layers = [tuple(A.blocks[name] for name in names) for names in variate.groups]
    spent = 2 * _SWEEPS * len(layers)
    if spent > plan.budget:
        return None
    residual = _Residual(A, variate.known, reduce, plan)
    # Gaussian: a block such as [[1, −1], [−1, 1]] is blind to every fourth pair of Rademacher probes, and would seem to vanish.
    sweeps = residual.sweep(layers, _SWEEPS, probes="gaussian")
    plan.progress(spent, None, quantity.name)
    active = [layer for layer, vanishes in zip(layers, sweeps.vanishing(layers), strict=True) if not vanishes]
    room = plan.budget - spent
    if active and room >= 2:
        if room < 4 * _PILOT:
            return _with_cost_of(known, by_probes(A, quantity, plan, spent=spent))
        settled = [layer for layer in layers if layer not in active]
        start = _Start(known, *residual.mean(sweeps, settled), spent + 2 * _PILOT)
        return _sample_active(residual, sweeps, active, start, quantity, is_all=not settled)
    mean, stderr = residual.mean(sweeps, layers)
    met = not active or plan.num_products is not None
    return replace(_Start(known, mean, stderr, spent).estimate(), converged=met, num_samples=_SWEEPS)


def _with_cost_of(known: Estimate, estimate: Estimate) -> Estimate:
    """Return an estimate that did not use the known part, which has been computed all the same."""
    return replace(
        estimate,
        num_products=estimate.num_products + known.num_products,
        num_gradients=estimate.num_gradients + known.num_gradients,
        num_losses=estimate.num_losses + known.num_losses,
    )


@final
@dataclass(frozen=True)
class _Start:
    """The known part and the settled layers' rest."""

    known: Estimate
    mean: Tensor
    stderr: Tensor
    spent: int

    @property
    def offset(self) -> Tensor:
        return self.known.value.to(torch.float64) + self.mean

    def estimate(self) -> Estimate:
        known = self.known
        return Estimate(
            self.offset,
            self.stderr,
            method=_METHOD,
            num_products=known.num_products + self.spent,
            num_gradients=known.num_gradients,
            num_losses=known.num_losses,
        )


@final
@dataclass(frozen=True)
class _Sampler:
    draw: Callable[[int], Tensor]
    cost: int
    deviation: Tensor
    fewest: int = _FIRST_LOOK


def _sample_active(
    residual: _Residual, sweeps: _Sweeps, active: Sequence[_Layer], start: _Start, quantity: Quantity, *, is_all: bool
) -> Estimate:
    plan, offset, spent = residual.plan, start.offset, start.spent
    of_A, of_R = residual.whole(active, _PILOT)
    whole = _Sampler(lambda count: residual.whole(active, count)[1], 2, of_R.std(0))
    samplers = [whole]
    if 1 < len(active) <= (plan.budget - spent) // 4:
        by_layer = _Sampler(
            lambda count: residual.by_layer(active, count), 2 * len(active), residual.deviation_by_layer(sweeps, active)
        )
        samplers.append(by_layer)
    plain = _Sampler(lambda count: residual.whole(active, count)[0], 1, of_A.std(0), MIN_SAMPLES)
    if is_all:
        samplers.append(plain)

    def price(sampler: _Sampler) -> float:
        needed = (quantity.relative_error(offset, sampler.deviation) / plan.rtol) ** 2
        return sampler.cost * (max(needed, sampler.fewest) if plan.num_products is None else needed)

    best = min(samplers, key=price)
    if residual.A.size < min(price(best), plan.budget - spent):
        return _with_cost_of(start.known, by_unit_vectors(residual.A, quantity, plan, spent=spent))
    if best is plain:
        return _with_cost_of(start.known, by_cheapest_sampling(residual.A, quantity, plan, spent=spent))
    if price(best) > MIN_SAMPLES:
        grown = grow(residual.A, quantity, plan, spent=spent, other_price=price(best))
        if grown.part.rank and grown.price < price(best):
            return _with_cost_of(start.known, sample_rest(residual.A, quantity, plan, grown, may_switch=True))
        spent = grown.spent
    samples = sample_mean(
        best.draw,
        size=residual.A.size,
        plan=plan,
        relative_error=lambda mean, stderr: quantity.relative_error(offset + mean, stderr),
        message=quantity.name,
        cost=best.cost,
        spent=spent,
        first_look=best.fewest,
    )
    estimate = start.estimate()
    return replace(
        estimate,
        value=offset + samples.mean,
        stderr=(start.stderr**2 + samples.stderr**2).sqrt(),
        num_samples=samples.num_samples,
        skewness=samples.skewness,
        num_products=start.known.num_products + spent + samples.num_products,
        converged=samples.converged,
    )


@final
@dataclass(frozen=True)
class _Sweeps:
    """Probes layer by layer: each layer's rows of the probes, of A's products, and of R's, all ``(n, b)``."""

    V: Tensor
    AV: Tensor
    RV: Tensor

    def vanishing(self, layers: Sequence[_Layer]) -> list[bool]:
        """Tell for each layer whether R's block is 0 up to rounding, by the whole vectors R v and not just vᵀ R v."""
        eps = torch.finfo(self.V.dtype).eps
        residual = [_norm(self.RV, layer) for layer in layers]
        total = [max(_norm(self.AV, layer), _norm(self.AV - self.RV, layer)) for layer in layers]
        floor = 8 * eps * max(total)
        return [r <= max(eps**0.5 * t, floor) for r, t in zip(residual, total, strict=True)]


@final
class _Residual:
    """R = A − K by its products."""

    def __init__(self, A: LinearOperator, K: LinearOperator, reduce: Callable[[Tensor], Tensor], plan: Plan) -> None:
        self.A, self.K, self.reduce, self.plan = A, K, reduce, plan

    def sweep(self, layers: Sequence[_Layer], count: int, *, probes: str | None = None) -> _Sweeps:
        """Probe every layer by itself, ``count`` times."""
        V = _only(draw_probes(self.A, count, replace(self.plan, probes=probes or self.plan.probes)), layers)
        AV, RV = torch.zeros_like(V), torch.zeros_like(V)
        for start in range(0, len(layers), _AT_ONCE):
            some = layers[start : start + _AT_ONCE]
            X = torch.cat([_only(V, [layer]) for layer in some], dim=1)
            AX = check_finite(self.A @ X)
            RX = AX - self.K @ X
            for j, layer in enumerate(some):
                for rows in layer:
                    AV[rows] = AX[rows, j * count : (j + 1) * count]
                    RV[rows] = RX[rows, j * count : (j + 1) * count]
        return _Sweeps(V, AV, RV)

    def mean(self, sweeps: _Sweeps, layers: Sequence[_Layer]) -> tuple[Tensor, Tensor]:
        """Return the mean and standard error of the layers' part of R."""
        samples = self.reduce(_only(sweeps.V * sweeps.RV, layers)).to(torch.float64)
        return samples.mean(0), samples.std(0) / samples.shape[0] ** 0.5

    def by_layer(self, layers: Sequence[_Layer], count: int) -> Tensor:
        """Return samples of R's part on these layers, from probes of one layer at a time."""
        sweeps = self.sweep(layers, count)
        return self.reduce(sweeps.V * sweeps.RV)

    def deviation_by_layer(self, sweeps: _Sweeps, layers: Sequence[_Layer]) -> Tensor:
        """Return the standard deviation of such a sample; the layers' variances add up, since their probes are independent."""
        product = sweeps.V * sweeps.RV
        variances = [self.reduce(_only(product, [layer])).to(torch.float64).var(0) for layer in layers]
        return torch.stack(variances).sum(0).sqrt()

    def whole(self, layers: Sequence[_Layer], count: int) -> tuple[Tensor, Tensor]:
        """Return samples of A's and of R's part on these layers, from probes of all of them at once."""
        V = _only(draw_probes(self.A, count, self.plan), layers)
        AV = check_finite(self.A @ V)
        samples_of_A, samples_of_R = self.reduce(V * AV), self.reduce(V * (AV - self.K @ V))
        return samples_of_A.to(torch.float64), samples_of_R.to(torch.float64)


def _only(X: Tensor, layers: Sequence[_Layer]) -> Tensor:
    """Return X ``(n, b)`` with all rows outside the layers set to 0."""
    result = torch.zeros_like(X)
    for layer in layers:
        for rows in layer:
            result[rows] = X[rows]
    return result


def _norm(X: Tensor, layer: _Layer) -> float:
    return float(torch.linalg.vector_norm(torch.cat([X[rows] for rows in layer])))
