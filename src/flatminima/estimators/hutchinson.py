"""Linear functions of a matrix's diagonal: the closed form, its use as a control variate, a low-rank part, random probes.

The trace, the block traces and the diagonal all are linear functions of diag(A) = E[v ∘ A v] (Hutchinson 1989; Bekas,
Kokiopoulou & Saad 2007). What differs is only how the vector v ∘ A v is summed up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatminima._checks import check_one_of
from flatminima.estimators import closed_form
from flatminima.estimators.control_variate import by_control_variate
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.low_rank_part import by_cheapest_sampling, by_low_rank_part
from flatminima.estimators.quantity import Quantity, by_probes, by_unit_vectors
from flatminima.estimators.sampling import Plan
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["DiagonalFunction", "estimate_diagonal_function"]

_METHODS = ("auto", "exact", "hutch++", "hutchinson")


@dataclass(frozen=True)
class DiagonalFunction:
    """A linear function of the diagonal.

    Attributes:
        name: For the progress.
        reduce: From columns ``(n, b)`` that stand for diagonals to values ``(b, …)``.
        relative_error: What ``rtol`` bounds.
        known: Closed form for an operator, or None.
    """

    name: str
    reduce: Callable[[Tensor], Tensor]
    relative_error: Callable[[Tensor, Tensor], float]
    known: Callable[[LinearOperator], Estimate | None]

    @property
    def quantity(self) -> Quantity:
        """The same as an average over probes."""
        return Quantity(self.name, lambda V, AV: self.reduce(V * AV), self.relative_error, self._of_low_rank)

    def _of_low_rank(self, Q: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the function of diag(Q Zᵀ + Z Qᵀ − Q (QᵀZ) Qᵀ), one column of Q after the other, and of its terms' sizes."""
        terms = Q * (2 * Z - Q @ (Q.T @ Z))
        value, size = (self.reduce(X).to(torch.float64).sum(0) for X in (terms, terms.abs()))
        return value, size


def estimate_diagonal_function(
    A: LinearOperator,
    function: DiagonalFunction,
    method: str,
    plan: Plan,
    resume: str | os.PathLike[str] | None,
    also: tuple[str, ...] = (),
) -> Estimate:
    """Return the function's value by the cheapest route that ``method`` allows, in the operator's dtype.

    ``also`` names methods that the caller has besides, for the message about a wrong one.
    """
    check_one_of("method", method, (*_METHODS, *also))
    with named_missing_derivative(), plan.running(A, resume, estimator=function.name, method=method) as running:
        estimate = _estimate(A, function, method, running)
    return replace(estimate, value=estimate.value.to(A.dtype), stderr=estimate.stderr.to(A.dtype))


def _estimate(A: LinearOperator, function: DiagonalFunction, method: str, plan: Plan) -> Estimate:
    if method == "hutchinson":
        return by_probes(A, function.quantity, plan)
    if method == "hutch++":
        return by_low_rank_part(A, function.quantity, plan)
    known = function.known(A)
    if known is not None:
        return known
    if method == "exact" or A.size <= plan.fewest_products:
        return by_unit_vectors(A, function.quantity, plan)
    variate = closed_form.control_variate(A)
    known = None if variate is None else function.known(variate.known)
    if variate is not None and known is not None:
        estimate = by_control_variate(A, variate, known, function.quantity, function.reduce, plan)
        if estimate is not None:
            return estimate
    return by_cheapest_sampling(A, function.quantity, plan)
