"""Linear functions of a matrix's diagonal: the closed form first, then its use as a control variate, then random probes.

The trace, the block traces and the diagonal all are linear functions of diag(A) = E[v ∘ A v] (Hutchinson 1989; Bekas,
Kokiopoulou & Saad 2007). What differs is only how the vector v ∘ A v is summed up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from flatminima._checks import check_one_of
from flatminima.estimators import closed_form
from flatminima.estimators.control_variate import by_control_variate
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.quantity import Quantity, by_probes, by_unit_vectors
from flatminima.estimators.sampling import Plan
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["DiagonalFunction", "estimate_diagonal_function"]

_METHODS = ("auto", "exact", "hutchinson")


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
        return Quantity(self.name, lambda V, AV: self.reduce(V * AV), self.relative_error)


def estimate_diagonal_function(A: LinearOperator, function: DiagonalFunction, method: str, plan: Plan) -> Estimate:
    """Return the function's value by the cheapest route that ``method`` allows, in the operator's dtype."""
    check_one_of("method", method, _METHODS)
    with named_missing_derivative():
        estimate = _estimate(A, function, method, plan)
    return replace(estimate, value=estimate.value.to(A.dtype), stderr=estimate.stderr.to(A.dtype))


def _estimate(A: LinearOperator, function: DiagonalFunction, method: str, plan: Plan) -> Estimate:
    if method == "hutchinson":
        return by_probes(A, function.quantity, plan)
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
    return by_probes(A, function.quantity, plan, may_switch=True)
