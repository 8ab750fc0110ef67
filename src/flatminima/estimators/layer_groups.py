"""A function of the diagonal by probes of a few groups of layers, where that is forecast to be the cheapest."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from flatminima.estimators.estimate import Estimate
from flatminima.estimators.layer_probes import Couplings, Grouping, Layer, expanded, roles, squares_by_block
from flatminima.estimators.low_rank_part import PILOT, by_cheapest_sampling, grow, sample_rest
from flatminima.estimators.quantity import DiagonalFunction, by_unit_vectors
from flatminima.estimators.sampling import Plan, check_finite, columns_at_once, draw_probes, sample_mean
from flatminima.estimators.stopping import FIRST_LOOK, MIN_SAMPLES, samples_to_stop
from flatminima.operators.base import LinearOperator
from flatminima.operators.composites import BlockDiagonal

__all__ = ["by_layer_groups", "cheapest_groups", "sample_groups"]

#: Layers that are measured at most, and the share of the products that may go into it.
_MOST_LAYERS = 32
_SHARE = 4


def by_layer_groups(A: LinearOperator, function: DiagonalFunction, plan: Plan) -> Estimate | None:
    """Return the function, in float64; by the cheapest other sampling where groups do not pay, None before anything is spent.

    The sweep that measures the couplings is no sample: choosing by it biases nothing.
    """
    layers = roles(A)
    count = len(layers)
    if not 2 <= count <= min(_MOST_LAYERS, plan.budget // _SHARE) or A.size <= _SHARE * count:
        return None
    measured = _measure(A, layers, function, plan)
    if isinstance(measured, int):
        return by_cheapest_sampling(A, function.quantity, plan, spent=measured)
    couplings, pilot = measured
    found = cheapest_groups(couplings, function, pilot, plan, plan.budget - count)
    return sample_groups(A, function, found, plan, spent=count)


def cheapest_groups(couplings: Couplings, function: DiagonalFunction, pilot: Tensor, plan: Plan, room: int) -> Grouping:
    """Return the groups with which the function is forecast to take the fewest products.

    Args:
        couplings: Of A.
        function: What to estimate.
        pilot: Its value, roughly.
        plan: When to stop.
        room: Products that may be made.
    """

    def price(squares: Tensor, num_groups: int) -> float:
        needed = (function.relative_error(pilot, function.deviation(squares)) / plan.rtol) ** 2
        if plan.num_products is not None:
            return needed * num_groups if num_groups == 1 or room // num_groups >= FIRST_LOOK else math.inf
        return num_groups * samples_to_stop(needed, FIRST_LOOK) + (PILOT if num_groups == 1 else 0)

    return couplings.cheapest(price)


def sample_groups(A: LinearOperator, function: DiagonalFunction, found: Grouping, plan: Plan, *, spent: int) -> Estimate:
    """Return the function, in float64, by probes of the groups; with a single group by the cheapest sampling of all layers.

    A low-rank part, or n exact products, are taken where they are forecast to be cheaper still.
    """
    groups, quantity, room = found.layers, function.quantity, plan.budget - spent
    if len(groups) == 1:
        return by_cheapest_sampling(A, quantity, plan, spent=spent)
    if plan.num_products is None and A.size < min(found.price, room):
        return by_unit_vectors(A, quantity, plan, spent=spent)
    if found.price > MIN_SAMPLES:
        grown = grow(A, quantity, plan, spent=spent, other_price=found.price)
        if grown.part.rank and grown.price < found.price:
            return sample_rest(A, quantity, plan, grown, may_switch=True)
        spent = grown.spent

    B = BlockDiagonal(A, groups)

    def draw(number: int) -> tuple[Tensor, Tensor]:
        V = draw_probes(A, number, plan)
        BV = check_finite(B @ V)
        return function.reduce(V * BV), BV

    samples = sample_mean(
        draw,
        size=A.size,
        plan=plan,
        relative_error=quantity.relative_error,
        message=quantity.name,
        cost=len(groups),
        columns=1,
        spent=spent,
    )
    return Estimate(
        samples.mean,
        samples.stderr,
        method="hutchinson by groups of layers",
        num_samples=samples.num_samples,
        skewness=samples.skewness,
        num_products=spent + samples.num_products,
        converged=samples.converged,
        details={"groups": len(groups)},
    )


def _measure(
    A: LinearOperator, layers: tuple[Layer, ...], function: DiagonalFunction, plan: Plan
) -> tuple[Couplings, Tensor] | int:
    """Probe each layer by itself, once; return their couplings and a rough value.

    Where that would take more than half of the time, return the number of products that were made before this was seen.
    """
    blocks = tuple(A.blocks)
    state = plan.checkpoint.load("couplings")
    if state is not None:
        return Couplings(layers, blocks, state.tensors["squares"].cpu()), state.tensors["value"]
    v, parts, value, at_once = draw_probes(A, 1, plan), [], torch.zeros((), dtype=torch.float64), columns_at_once(A.size)
    for start in range(0, len(layers), at_once):
        some, begun = layers[start : start + at_once], time.monotonic()
        X = expanded(A, v, some)
        AX = check_finite(A @ X)
        parts.append(squares_by_block(A, AX))
        value = value + function.reduce(X * AX).to(torch.float64).sum(0).cpu()
        done, now = start + len(some), time.monotonic()
        plan.progress(done, plan.num_products, function.name)
        if 2 * (now - begun) / len(some) * (len(layers) - done) > plan.deadline - now:
            return done
    squares = torch.cat(parts, 1)
    plan.checkpoint.keep("couplings", {"squares": squares, "value": value}, {})
    return Couplings(layers, blocks, squares), value
