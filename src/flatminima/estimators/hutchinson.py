"""Linear functions of a matrix's diagonal: the closed form, its use as a control variate, a low-rank part, random probes.

The trace, the block traces and the diagonal all are linear functions of diag(A) = E[v ∘ A v] (Hutchinson 1989; Bekas,
Kokiopoulou & Saad 2007). What differs is only how the vector v ∘ A v is summed up.
"""

from __future__ import annotations

import os
from dataclasses import replace

from flatminima._checks import check_one_of
from flatminima.estimators import closed_form
from flatminima.estimators.control_variate import by_control_variate
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.layer_groups import by_layer_groups
from flatminima.estimators.low_rank_part import by_cheapest_sampling, by_low_rank_part
from flatminima.estimators.quantity import DiagonalFunction, by_probes, by_unit_vectors
from flatminima.estimators.sampling import Plan
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["estimate_diagonal_function"]

_METHODS = ("auto", "exact", "hutch++", "hutchinson")


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
        estimate = by_control_variate(A, variate, known, function, plan)
        if estimate is not None:
            return estimate
    return by_layer_groups(A, function, plan) or by_cheapest_sampling(A, function.quantity, plan)
