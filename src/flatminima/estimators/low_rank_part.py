r"""A low-rank part that is known exactly, and random probes of the rest (Hutch++).

With orthonormal Q ``(n, k)``, P = Q Qᵀ and Z = A Q, a symmetric matrix is

.. math:: A = Q Z^\top + Z Q^\top - Q (Q^\top Z) Q^\top + R, \qquad R = (I - P)\, A\, (I - P),

and only R has to be sampled; a product with R is one with A. Where a few eigenvalues hold most of ‖A‖_F, as at the end of a
training, R is small beside A. Q comes from the products of random probes, in blocks. Every block is a sample of the R before it,
and each of its columns, orthogonalised against the others, is one of the R after it: so what the next block would save is known
before it is paid. Q is independent of the probes that are averaged in the end, hence unbiased values and honest standard errors.

Sources: Meyer, Musco, Musco & Woodruff (2021), *Hutch++: optimal stochastic trace estimation*; the choice of k by forecast as in
Persson, Cortinovis & Kressner (2022), *Improved variants of the Hutch++ algorithm*, with other forecasts.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from flatminima.estimators.estimate import Estimate
from flatminima.estimators.quantity import Quantity, by_probes, by_unit_vectors
from flatminima.estimators.sampling import Plan, check_finite, draw_probes, sample_mean
from flatminima.estimators.stopping import samples_to_stop
from flatminima.operators.base import LinearOperator

__all__ = [
    "MAX_BYTES",
    "PILOT",
    "ROUNDING",
    "Grown",
    "LowRankPart",
    "by_cheapest_sampling",
    "by_low_rank_part",
    "fitting_rank",
    "grow",
    "sample_rest",
]

#: Most memory for Q and Z together.
MAX_BYTES = 2**30
#: Error of what is known exactly, in eps times its terms' absolute sum: it counts where there is nothing else.
ROUNDING = 4.0
_BLOCK = 8
#: Products that the cheapest sampling takes to choose.
PILOT = _BLOCK
#: Blocks that are thought ahead.
_MOST_BLOCKS = 32
#: First look at the error of the rest, from which the large eigenvalues are gone.
_FIRST_LOOK = 24
#: Below this room under a fixed number of products the first block, which only chooses, costs too much.
_LEAST_FIXED = 32
#: Fewest products for a part of rank 1 and a standard error.
_LEAST = 4


@final
@dataclass(frozen=True, eq=False)
class LowRankPart:
    """Orthonormal Q ``(n, k)`` and Z = A Q; k may be 0."""

    Q: Tensor
    Z: Tensor

    @classmethod
    def nothing(cls, A: LinearOperator) -> LowRankPart:
        """Return the part of rank 0."""
        empty = torch.zeros(A.size, 0, dtype=A.dtype, device=A.device)
        return cls(empty, empty)

    @property
    def rank(self) -> int:
        """Number k of columns."""
        return self.Q.shape[1]

    def rest(self, V: Tensor, AV: Tensor) -> Tensor:
        """Return R V, given A V."""
        return self._outside(AV - self.Z @ (self.Q.T @ V))

    def rest_product(self, A: LinearOperator, V: Tensor) -> Tensor:
        """Return R V by one product with A a column, from vectors without the large part: no cancellation."""
        return self._outside(check_finite(A @ self._outside(V)))

    def extended(self, A: LinearOperator, X: Tensor) -> LowRankPart:
        """Return the part with the span of X ``(n, b)`` added, without directions that are rounding, for a product each."""
        scale = torch.linalg.vector_norm(X, dim=0).max()
        X = self._outside(X)
        U, sizes, _ = torch.linalg.svd(X, full_matrices=False)
        U = U[:, sizes > 100 * torch.finfo(X.dtype).eps * scale]
        U = torch.linalg.qr(self._outside(U))[0]
        return LowRankPart(torch.cat([self.Q, U], 1), torch.cat([self.Z, check_finite(A @ U)], 1)) if U.shape[1] else self

    def _outside(self, X: Tensor) -> Tensor:
        """Return (I − P) X."""
        return X - self.Q @ (self.Q.T @ X)


def fitting_rank(A: LinearOperator) -> int:
    """Return the largest k for which Q and Z fit into ``MAX_BYTES``; 0 for types in which Q would not be orthonormal."""
    if torch.finfo(A.dtype).eps > 1e-5:
        return 0
    return min(A.size, MAX_BYTES // (2 * A.size * A.dtype.itemsize))


@final
@dataclass(frozen=True, eq=False)
class Grown:
    """A low-rank part, and what it promises.

    Attributes:
        part: Of any rank, also 0.
        spent: Products made so far.
        price: Forecast of the products that are still to be made; under ``num_products`` the number of products that would give
            the same error without a low-rank part, as a share of those needed.
        is_done: Whether it has stopped growing.
    """

    part: LowRankPart
    spent: int
    price: float = math.inf
    is_done: bool = False


def by_low_rank_part(A: LinearOperator, quantity: Quantity, plan: Plan) -> Estimate:
    """Return the quantity, in float64, as that of a low-rank part plus sampled rest, whatever other ways would cost.

    Under ``num_products`` a third of them are for the sketch, a third for Q and a third for the rest, as in the paper.

    Raises:
        ValueError: If there is no room for a low-rank part.
    """
    if fitting_rank(A) < 1 or plan.budget < _LEAST:
        raise ValueError(
            f"`method` must not be 'hutch++' here (it takes at least {_LEAST} products, and memory for two vectors of at least "
            f"float32 for each of its directions, {MAX_BYTES / 2**30:g} GiB in all). Got {plan.budget} products with {A!r}. "
            "Use method='hutchinson'."
        )
    return sample_rest(A, quantity, plan, grow(A, quantity, plan, is_asked_for=True), may_switch=False)


def by_cheapest_sampling(A: LinearOperator, quantity: Quantity, plan: Plan, *, spent: int = 0) -> Estimate:
    """Return the quantity, in float64, by plain probes, a low-rank part and probes, or exactly: what is forecast cheapest."""
    return sample_rest(A, quantity, plan, grow(A, quantity, plan, spent=spent), may_switch=True)


def grow(
    A: LinearOperator,
    quantity: Quantity,
    plan: Plan,
    *,
    spent: int = 0,
    other_price: float = math.inf,
    is_asked_for: bool = False,
) -> Grown:
    """Return a low-rank part that has grown until the next block is forecast to cost more than it saves.

    Args:
        A: Operator.
        quantity: What is to be estimated.
        plan: When to stop.
        spent: Products that were made before.
        other_price: Products that another way would take; a part that is not forecast to beat it is given up.
        is_asked_for: Whether there must be a part.
    """
    state = plan.checkpoint.load("low rank")
    if state is None:
        grown = Grown(LowRankPart.nothing(A), spent)
    else:
        grown = Grown(LowRankPart(state.tensors["Q"], state.tensors["Z"]), **state.numbers)
    growth = _Growth(A, quantity, plan, spent, other_price, is_asked_for)
    while not grown.is_done:
        grown = growth.fixed_step(grown) if is_asked_for and plan.num_products else growth.step(grown)
        numbers = {"spent": grown.spent, "price": grown.price, "is_done": grown.is_done}
        plan.checkpoint.keep("low rank", {"Q": grown.part.Q, "Z": grown.part.Z}, numbers)
        plan.progress(grown.spent, plan.num_products, quantity.name)
    return grown


def sample_rest(A: LinearOperator, quantity: Quantity, plan: Plan, grown: Grown, *, may_switch: bool) -> Estimate:
    """Return the quantity, in float64, as that of the part plus the mean over probes of the rest.

    Args:
        A: Operator.
        quantity: What to estimate.
        plan: When to stop.
        grown: The low-rank part.
        may_switch: Whether n exact products, or plain probes, may be taken where they are cheaper.
    """
    part, spent = grown.part, grown.spent
    if may_switch and plan.num_products is None and A.size < min(grown.price, plan.budget - spent):
        return by_unit_vectors(A, quantity, plan, spent=spent)
    if may_switch and not part.rank:
        return by_probes(A, quantity, plan, spent=spent, may_switch=True)
    known, magnitude = quantity.of_low_rank(part.Q, part.Z)

    def draw(count: int) -> tuple[Tensor, Tensor | None]:
        V = draw_probes(A, count, plan)
        RV = part.rest_product(A, V)
        return quantity.q(V, RV), RV if quantity.degree == 1 else None

    samples = sample_mean(
        draw,
        size=A.size,
        plan=plan,
        relative_error=lambda mean, stderr: quantity.relative_error(known + mean, stderr),
        message=quantity.name,
        spent=spent,
        first_look=_FIRST_LOOK,
        give_up_beyond=A.size if may_switch else math.inf,
    )
    spent += samples.num_products
    if samples.gave_up:
        return by_unit_vectors(A, quantity, plan, spent=spent)
    return Estimate(
        known + samples.mean,
        (samples.stderr**2 + (ROUNDING * torch.finfo(A.dtype).eps * magnitude) ** 2).sqrt(),
        method="hutch++",
        num_samples=samples.num_samples,
        skewness=samples.skewness,
        num_products=spent,
        converged=samples.converged,
        details={"rank": part.rank},
    )


@final
@dataclass(frozen=True, eq=False)
class _Growth:
    """What decides whether a low-rank part grows on."""

    A: LinearOperator
    quantity: Quantity
    plan: Plan
    begin: int
    other_price: float
    is_asked_for: bool

    def fixed_step(self, grown: Grown) -> Grown:
        """Add a block, to a third of the products in all."""
        rank = grown.part.rank
        width = min(_BLOCK, self.plan.budget // 3 - rank, fitting_rank(self.A) - rank)
        if width <= 0:
            return replace(grown, is_done=True)
        part = grown.part.extended(self.A, check_finite(self.A @ draw_probes(self.A, width, self.plan)))
        return Grown(part, grown.spent + width + part.rank - rank, is_done=part.rank == rank)

    def step(self, grown: Grown) -> Grown:
        """Draw a block of samples of the rest, and add it to the part where that pays."""
        started = time.monotonic()
        part, rank = grown.part, grown.part.rank
        width = min(_BLOCK, fitting_rank(self.A) - rank)
        room = self.plan.budget - grown.spent - 2 * _BLOCK
        if not self.is_asked_for and (width < _BLOCK or room < (_LEAST_FIXED if self.plan.num_products else _BLOCK)):
            return replace(grown, is_done=True)
        V = draw_probes(self.A, max(width, 2), self.plan)
        RV = part.rest(V, check_finite(self.A @ V))
        spent = grown.spent + V.shape[1]
        needed = self._needed(part, self.quantity.q(V, RV).to(torch.float64))
        price = self._price(needed, rank, spent)
        then = self._price_of_growing(needed, _remaining(RV) ** self.quantity.degree, rank, spent)
        exact = self.A.size if self.plan.num_products is None and self.A.size <= self.plan.budget - spent else math.inf
        seconds = 4 * (time.monotonic() - started)  # the block's images, the next block, and as much again for samples
        pays = (
            width == _BLOCK
            and room >= _BLOCK
            and (rank > 0 or needed > _FIRST_LOOK)  # a matrix on whose diagonal plain probes are exact stays with them
            and then < min(price, self.other_price, exact)
            and time.monotonic() + seconds < self.plan.deadline
        )
        if not pays and (rank or not self.is_asked_for):
            return Grown(part, spent, price, is_done=True)
        part = part.extended(self.A, RV[:, :width])
        return Grown(part, spent + part.rank - rank, price, is_done=part.rank == rank)

    def _needed(self, part: LowRankPart, samples: Tensor) -> float:
        """Return the number of samples of the rest until the tolerance is met."""
        value = self.quantity.of_low_rank(part.Q, part.Z)[0] + samples.mean(0)
        return (self.quantity.relative_error(value, samples.std(0)) / self.plan.rtol) ** 2

    def _price_of_growing(self, needed: float, share: float, rank: int, spent: int) -> float:
        """Return the least price of growing by one block or several, each of which leaves that share of the variance."""
        prices = []
        for count in range(1, _MOST_BLOCKS + 1):
            cost = 2 * _BLOCK * count
            price = self._price(needed * share**count, rank + _BLOCK * count, spent + cost)
            prices.append(price if self.plan.num_products else price + cost)
        return min(prices)

    def _price(self, needed: float, rank: int, spent: int) -> float:
        """Return how many products are still to be made."""
        if self.plan.num_products is not None:
            room = self.plan.budget - spent
            return needed * (self.plan.budget - self.begin) / room if room >= _FIRST_LOOK else math.inf
        if not rank:
            return samples_to_stop(needed, self.quantity.first_look)
        return samples_to_stop(needed, _FIRST_LOOK)


def _remaining(X: Tensor) -> float:
    """Return the share of the squared lengths of X's columns ``(n, b)`` that the other columns' span leaves, on average.

    The squared length of column i outside the others' span is 1 / ((Xᵀ X)⁻¹)_ii.
    """
    values, vectors = torch.linalg.eigh(X.double().T @ X.double())
    total = float(values.sum())
    if total == 0:
        return 0.0
    inverse = (vectors.square() / values.clamp_min(torch.finfo(X.dtype).eps ** 2 * total)).sum(1)
    return float((1 / inverse).sum()) / total
