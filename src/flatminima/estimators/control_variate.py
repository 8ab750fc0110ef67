"""Hutchinson on what a closed form leaves over.

With A = K + R and K's diagonal known, only R's has to be sampled. For piecewise-linear networks R (the Hessian minus the
Gauss–Newton matrix) has no diagonal block per layer, although its off-diagonal blocks are as large as ever: probes supported
on one layer at a time see none of them. So each layer is probed by itself first. Layers whose block of R vanishes are settled;
the others are sampled by whichever unbiased sampler promises to be cheapest: R or A itself, by groups of layers
(:mod:`~flatminima.estimators.layer_probes`) or all of them at once. What the first probes said of these layers is not used
again, so that choosing by it biases nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from flatminima.estimators.closed_form import ControlVariate
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.layer_groups import cheapest_groups, sample_groups
from flatminima.estimators.layer_probes import Couplings, Layer, expanded, only, squares_by_block
from flatminima.estimators.low_rank_part import grow, sample_rest
from flatminima.estimators.quantity import DiagonalFunction, by_probes, by_unit_vectors
from flatminima.estimators.sampling import Draw, Plan, check_finite, draw_probes, sample_mean
from flatminima.estimators.stopping import FIRST_LOOK, MIN_SAMPLES, samples_to_stop
from flatminima.operators.base import LinearOperator
from flatminima.operators.composites import BlockDiagonal

__all__ = ["by_control_variate"]

_METHOD = "exact Gauss-Newton part + hutchinson residual"
#: Sweeps over the layers before any decision; two give a standard error.
_SWEEPS = 2
#: Fewest products with which choosing among samplers pays.
_LEAST_ROOM = 32
_AT_ONCE = 16


def by_control_variate(
    A: LinearOperator,
    variate: ControlVariate,
    known: Estimate,
    function: DiagonalFunction,
    plan: Plan,
) -> Estimate | None:
    """Return the function as its known part plus a sampled rest, or None where the plan has no room for the first probes.

    A probe of R costs two products, one with A and one with K; both are counted.

    Args:
        A: Operator.
        variate: Its split, and its layers.
        known: The function of ``variate.known``.
        function: What to estimate.
        plan: When to stop.
    """
    with variate.known.keeping_graphs():
        return _by_residual(A, variate, known, function, plan)


def _by_residual(
    A: LinearOperator,
    variate: ControlVariate,
    known: Estimate,
    function: DiagonalFunction,
    plan: Plan,
) -> Estimate | None:
    layers = variate.groups
    spent = 2 * _SWEEPS * len(layers)
    if spent > plan.budget:
        return None
    residual = _Residual(A, variate.known, function, plan)
    # Gaussian: a block such as [[1, −1], [−1, 1]] is blind to every fourth pair of Rademacher probes, and would seem to vanish.
    sweeps = residual.sweep(layers, _SWEEPS, probes="gaussian")
    plan.progress(spent, None, function.name)
    active = [layer for layer, vanishes in zip(layers, sweeps.vanishing(A, layers), strict=True) if not vanishes]
    room = plan.budget - spent
    if active and room >= 2:
        if room < _LEAST_ROOM:
            return _with_cost_of(known, by_probes(A, function.quantity, plan, spent=spent))
        settled = [layer for layer in layers if layer not in active]
        start = _Start(known, *residual.mean(sweeps, settled), spent)
        return _sample_active(residual, sweeps, layers, active, start)
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


def _sample_active(
    residual: _Residual, sweeps: _Sweeps, layers: Sequence[Layer], active: Sequence[Layer], start: _Start
) -> Estimate:
    plan, offset, spent, quantity = residual.plan, start.offset, start.spent, residual.function.quantity
    A, room = residual.A, plan.budget - spent

    def price(within: Tensor, num_groups: int) -> float:
        needed = (quantity.relative_error(offset, residual.function.deviation(within)) / plan.rtol) ** 2
        if plan.num_products is not None:
            return 2 * num_groups * needed if room // (2 * num_groups) >= 2 else math.inf
        return 2 * num_groups * samples_to_stop(needed, FIRST_LOOK)

    def couplings(squares: Tensor) -> Couplings:
        return Couplings(tuple(active), tuple(A.blocks), squares[:, [layers.index(layer) for layer in active]])

    found = couplings(sweeps.residual_squares).cheapest(price)
    groups, own = found.layers, found.price
    if len(active) == len(layers):
        plain = cheapest_groups(couplings(sweeps.squares), residual.function, offset, plan, room)
        if plain.price < own:
            return _with_cost_of(start.known, sample_groups(A, residual.function, plain, plan, spent=spent))
    if A.size < min(own, room):
        return _with_cost_of(start.known, by_unit_vectors(A, quantity, plan, spent=spent))
    if own > MIN_SAMPLES:
        grown = grow(A, quantity, plan, spent=spent, other_price=own)
        if grown.part.rank and grown.price < own:
            return _with_cost_of(start.known, sample_rest(A, quantity, plan, grown, may_switch=True))
        spent = grown.spent
    samples = sample_mean(
        residual.by_groups(groups),
        size=A.size,
        plan=plan,
        relative_error=lambda mean, stderr: quantity.relative_error(offset + mean, stderr),
        message=quantity.name,
        cost=2 * len(groups),
        columns=1,
        spent=spent,
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
    """Probes layer by layer.

    Attributes:
        V: The probes, ``(n, b)``.
        AV: Each layer's rows of A's products with that layer's probes, ``(n, b)``.
        RV: The same of R.
        squares: Estimates of ‖A_bj‖_F² for block b and layer j, ``(B, L)``.
        residual_squares: The same of R.
    """

    V: Tensor
    AV: Tensor
    RV: Tensor
    squares: Tensor
    residual_squares: Tensor

    def vanishing(self, A: LinearOperator, layers: Sequence[Layer]) -> list[bool]:
        """Tell for each layer whether R's block is 0 up to rounding, by the whole vectors R v and not just vᵀ R v."""
        eps = torch.finfo(self.V.dtype).eps
        residual = [_norm(A, self.RV, layer) for layer in layers]
        total = [max(_norm(A, self.AV, layer), _norm(A, self.AV - self.RV, layer)) for layer in layers]
        floor = 8 * eps * max(total)
        return [r <= max(eps**0.5 * t, floor) for r, t in zip(residual, total, strict=True)]


@final
class _Residual:
    """R = A − K by its products."""

    def __init__(self, A: LinearOperator, K: LinearOperator, function: DiagonalFunction, plan: Plan) -> None:
        self.A, self.K, self.function, self.plan = A, K, function, plan

    def sweep(self, layers: Sequence[Layer], count: int, *, probes: str) -> _Sweeps:
        """Probe every layer by itself, ``count`` times."""
        V = draw_probes(self.A, count, replace(self.plan, probes=probes))
        AV, RV = torch.zeros_like(V), torch.zeros_like(V)
        squares: list[Tensor] = []
        residual_squares: list[Tensor] = []
        for start in range(0, len(layers), _AT_ONCE):
            some = layers[start : start + _AT_ONCE]
            X = expanded(self.A, V, some)
            AX = check_finite(self.A @ X)
            RX = AX - self.K @ X
            for found, products in ((squares, AX), (residual_squares, RX)):
                found.append(squares_by_block(self.A, products).reshape(-1, len(some), count).mean(2))
            for j, layer in enumerate(some):
                for rows in (self.A.blocks[name] for name in layer):
                    AV[rows] = AX[rows, j * count : (j + 1) * count]
                    RV[rows] = RX[rows, j * count : (j + 1) * count]
        return _Sweeps(V, AV, RV, torch.cat(squares, 1), torch.cat(residual_squares, 1))

    def mean(self, sweeps: _Sweeps, layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
        """Return the mean and standard error of the layers' part of R."""
        samples = self.function.reduce(only(self.A, sweeps.V * sweeps.RV, layers)).to(torch.float64)
        return samples.mean(0), samples.std(0) / samples.shape[0] ** 0.5

    def by_groups(self, groups: Sequence[Layer]) -> Draw:
        """Return what draws samples of R's part on these groups of layers, from probes of one group at a time."""
        A, K = BlockDiagonal(self.A, groups), BlockDiagonal(self.K, groups)

        def draw(count: int) -> tuple[Tensor, Tensor]:
            V = draw_probes(self.A, count, self.plan)
            RV = check_finite(A @ V) - K @ V
            return self.function.reduce(V * RV), RV

        return draw


def _norm(A: LinearOperator, X: Tensor, layer: Layer) -> float:
    return float(torch.linalg.vector_norm(torch.cat([X[A.blocks[name]] for name in layer])))
