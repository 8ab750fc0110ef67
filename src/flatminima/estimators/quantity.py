"""What random probes average to and unit vectors sum to: a Quantity, or more specially a function of the diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatminima.estimators.estimate import Estimate
from flatminima.estimators.sampling import Plan, check_finite, draw_probes, sample_mean
from flatminima.estimators.stopping import FIRST_LOOK, MIN_SAMPLES
from flatminima.operators.base import LinearOperator

__all__ = ["DiagonalFunction", "Quantity", "by_probes", "by_unit_vectors"]

_COLUMNS_AT_ONCE = 16


@dataclass(frozen=True)
class Quantity:
    r"""A number or tensor Q(A) that is an average over probes.

    .. math:: Q(A) = \mathbb E\, q(v, Av) \quad\text{for}\quad \mathbb E[vv^\top] = I,

    with q linear in :math:`vv^\top`. Because the unit vectors have :math:`\sum_i e_i e_i^\top = I` too, the same q gives the
    exact value :math:`Q(A) = \sum_i q(e_i, A e_i)` after n products.

    Attributes:
        name: For the progress.
        q: From probes V and products A V, both ``(n, b)``, to one value a probe, ``(b, …)``.
        relative_error: Of a value and its standard error; what ``rtol`` bounds.
        of_low_rank: From orthonormal Q and Z = A Q, both ``(n, k)``, to Q(A) − Q(R) with R = (I − QQᵀ) A (I − QQᵀ), and the
            absolute sum of its terms, in float64.
        degree: In A: 1 or 2.
    """

    name: str
    q: Callable[[Tensor, Tensor], Tensor]
    relative_error: Callable[[Tensor, Tensor], float]
    of_low_rank: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    degree: int = 1

    @property
    def first_look(self) -> int:
        """Samples before the first look at their error."""
        return FIRST_LOOK if self.degree == 1 else MIN_SAMPLES


@dataclass(frozen=True)
class DiagonalFunction:
    """A linear function of the diagonal.

    Attributes:
        name: For the progress.
        reduce: From columns ``(n, b)`` that stand for diagonals to values ``(b, …)``.
        relative_error: What ``rtol`` bounds.
        known: Closed form for an operator, or None.
        deviation: From Σ A_ij² over the entries that a probe sees in each block's rows, ``(B,)``, to a bound on the standard
            deviation of a sample, in the shape of a value or ``()``.
    """

    name: str
    reduce: Callable[[Tensor], Tensor]
    relative_error: Callable[[Tensor, Tensor], float]
    known: Callable[[LinearOperator], Estimate | None]
    deviation: Callable[[Tensor], Tensor]

    @property
    def quantity(self) -> Quantity:
        """The same as an average over probes."""
        return Quantity(self.name, lambda V, AV: self.reduce(V * AV), self.relative_error, self._of_low_rank)

    def _of_low_rank(self, Q: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the function of diag(Q Zᵀ + Z Qᵀ − Q (QᵀZ) Qᵀ), one column of Q after the other, and of its terms' sizes."""
        terms = Q * (2 * Z - Q @ (Q.T @ Z))
        value, size = (self.reduce(X).to(torch.float64).sum(0) for X in (terms, terms.abs()))
        return value, size


def by_unit_vectors(A: LinearOperator, quantity: Quantity, plan: Plan, *, spent: int = 0) -> Estimate:
    """Return the exact quantity, in float64, after n products."""
    if not A.size:
        raise ValueError("`A` must have at least one row. Got shape (0, 0).")
    state = plan.checkpoint.load("unit vectors")
    total, begin = (None, 0) if state is None else (state.tensors["total"], state.numbers["end"])
    for start in range(begin, A.size, _COLUMNS_AT_ONCE):
        width = min(_COLUMNS_AT_ONCE, A.size - start)
        E = torch.zeros(A.size, width, dtype=A.dtype, device=A.device)
        E[start : start + width].fill_diagonal_(1)
        part = quantity.q(E, check_finite(A @ E)).to(torch.float64).sum(0)
        total = part if total is None else total + part
        plan.checkpoint.keep("unit vectors", {"total": total}, {"end": start + width})
        plan.progress(spent + start + width, spent + A.size, quantity.name)
    assert total is not None
    return Estimate.exact(total, num_products=spent + A.size)


def by_probes(A: LinearOperator, quantity: Quantity, plan: Plan, *, spent: int = 0, may_switch: bool = False) -> Estimate:
    """Return the sampled quantity, in float64; where ``may_switch``, the exact one once that is forecast to be cheaper."""

    def draw(count: int) -> tuple[Tensor, Tensor | None]:
        V = draw_probes(A, count, plan)
        AV = A @ V
        return quantity.q(V, AV), AV if quantity.degree == 1 else None

    samples = sample_mean(
        draw,
        size=A.size,
        plan=plan,
        relative_error=quantity.relative_error,
        message=quantity.name,
        spent=spent,
        first_look=quantity.first_look,
        give_up_beyond=A.size if may_switch else math.inf,
    )
    spent += samples.num_products
    if samples.gave_up:
        return by_unit_vectors(A, quantity, plan, spent=spent)
    return Estimate(
        samples.mean,
        samples.stderr,
        method="hutchinson",
        num_samples=samples.num_samples,
        skewness=samples.skewness,
        num_products=spent,
        converged=samples.converged,
    )
