"""The trace of an operator, and of each of its blocks."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from flatminima._progress import Progress, no_progress
from flatminima.estimators import closed_form
from flatminima.estimators.estimate import Estimate
from flatminima.estimators.hutchinson import estimate_diagonal_function
from flatminima.estimators.quantity import DiagonalFunction
from flatminima.estimators.sampling import DEFAULT_MAX_PRODUCTS, Plan, check_operator
from flatminima.estimators.stopping import largest_relative_error
from flatminima.estimators.xtrace import by_xtrace
from flatminima.operators.base import LinearOperator, named_missing_derivative

__all__ = ["block_traces", "trace"]


def trace(
    A: LinearOperator,
    *,
    method: str = "auto",
    num_products: int | None = None,
    rtol: float | None = None,
    max_products: int = DEFAULT_MAX_PRODUCTS,
    max_seconds: float | None = None,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    resume: str | os.PathLike[str] | None = None,
) -> Estimate:
    r"""Return the trace of A, exactly where that is cheap and by random quadratic forms otherwise.

    .. math:: \hat t = \tfrac1m \sum_i v_i^\top A v_i, \qquad \mathbb E[v_i v_i^\top] = I.

    Every method is unbiased:

    * "hutchinson", the formula above. One term has variance 2(‖A‖_F² − Σ A_ii²) with Rademacher probes, so a diagonal A is exact,
      and 2‖A‖_F² with Gaussian ones.
    * "hutch++": tr A = tr QᵀAQ + tr R with R = (I − QQᵀ) A (I − QQᵀ) sampled, and Q a basis of products with earlier probes. It
      pays where few eigenvalues hold most of ‖A‖_F; a matrix of rank below k is exact up to rounding. Costs 2 products for each
      of the k columns of Q and one a probe. Under ``num_products`` k is a third of them; under ``rtol`` Q grows in blocks of
      eight while that is forecast to save products.
    * "xtrace": every probe serves for Q and, left out of it, as a sample; 2 products each, Gaussian probes only. At equal cost
      its error is 0.6 to 0.8 of that of "hutch++" with thirds. The standard error is the paper's, plus the covariance of the
      leave-one-out estimates without which its 95 % intervals cover only 80 to 95 %. With less than 15 probes on fast decaying
      spectra they cover 91 to 93 %.

    "hutch++" and "xtrace" hold 2k vectors, of 1 GiB at most.

    ``"auto"`` takes the first of these that applies: a closed form (a Gauss–Newton matrix); n products, where sampling would take
    as many; the closed form of a part and random probes of the rest, layer by layer (a Hessian: exact up to rounding for
    piecewise-linear networks); what is forecast as the cheapest of probes of groups of little coupled layers, "hutch++" and plain
    probes; n exact products where that is fewer, also when it turns out only under way. ``Estimate.method`` says which.

    Under ``rtol`` the first look at the error is after 12 samples. Before 64 it has to meet the tolerance even with the variance
    at the upper end of its 95 % confidence interval, which is as wide as the images of the probes say
    (:mod:`~flatminima.estimators.stopping`).

    The intervals of the estimate are Student's t, widened by the skewness of the terms (see ``Estimate.interval``, and for how
    often they hold the truth).

    Args:
        A: Symmetric operator, shape ``(n, n)``.
        method: "auto", "exact" (a closed form or n products, whatever the limits below), "hutch++", "xtrace" or "hutchinson"
            (probes only).
        num_products: Number m of products, exactly so many where a method of probes is named and at most so many otherwise.
        rtol: Standard error to reach, relative to the trace; 0.02 where neither this nor ``num_products`` is given.
        max_products: Most products under ``rtol``; the estimate then has ``converged=False``.
        max_seconds: Time after which no further block of products is begun.
        probes: "rademacher" or "gaussian".
        generator: Source of the probes.
        progress: Told the number of products.
        resume: A file in which the state is kept while it runs and from which a later call with the same arguments goes on, to
            the same answer: bit for bit, or up to rounding where a large model's products go another way in the new process.
            Removed when the estimate is complete. One product more, which is not counted.

    Returns:
        Estimate with ``value`` and ``stderr`` of shape ``()``, in units of the loss over those of the parameters squared.

    Raises:
        ValueError: If ``num_products`` and ``rtol`` are both given, an argument is out of range, or the file of ``resume`` is
            another run's.
        TypeError: If A is not an operator.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    References:
        Hutchinson (1989), *A stochastic estimator of the trace of the influence matrix*. Meyer, Musco, Musco & Woodruff (2021),
        *Hutch++: optimal stochastic trace estimation*. Epperly, Tropp & Webber (2024), *XTrace: making the most of every sample
        in stochastic trace estimation*.

    Example:
        >>> from flatminima.operators import as_operator
        >>> float(trace(as_operator(torch.diag(torch.tensor([1.0, 2.0, 3.0]))), num_products=4))
        6.0
    """
    check_operator(A)
    plan = Plan.checked(num_products, rtol, max_products, max_seconds, probes, generator, progress)
    if method != "xtrace":
        return estimate_diagonal_function(A, _trace_of(A), method, plan, resume, also=("xtrace",))
    with named_missing_derivative(), plan.running(A, resume, estimator="trace", method=method) as running:
        estimate = by_xtrace(A, _trace_of(A).quantity, running)
    return replace(estimate, value=estimate.value.to(A.dtype), stderr=estimate.stderr.to(A.dtype))


def block_traces(
    A: LinearOperator,
    *,
    method: str = "auto",
    num_products: int | None = None,
    rtol: float | None = None,
    max_products: int = DEFAULT_MAX_PRODUCTS,
    max_seconds: float | None = None,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    resume: str | os.PathLike[str] | None = None,
) -> dict[str, Estimate]:
    r"""Return the trace of every diagonal block of A; one product a probe serves all blocks.

    .. math:: \hat t_b = \tfrac1m \sum_i v_{i,b}^\top (A v_i)_b.

    Methods, cost and intervals are those of :func:`trace`, without "xtrace".

    Args:
        A: Symmetric operator, shape ``(n, n)``; its ``blocks`` name the ranges of rows.
        method: As in :func:`trace`.
        num_products: As in :func:`trace`.
        rtol: Standard error to reach in *every* block, relative to that block's trace. Blocks whose error is rounding beside
            the largest block's trace count as exact.
        max_products: As in :func:`trace`; blocks that met ``rtol`` by then have ``converged=True``.
        max_seconds: As in :func:`trace`.
        probes: As in :func:`trace`.
        generator: As in :func:`trace`.
        progress: As in :func:`trace`.
        resume: As in :func:`trace`.

    Returns:
        One estimate, of shape ``()``, per block by name. The cost of the call stands with the first, so that the costs add up.

    Raises:
        ValueError: As in :func:`trace`.
        TypeError: If A is not an operator.
        NonFiniteLoss: If a product is infinite or not a number.
        CheckpointError: If the file of ``resume`` is damaged.

    Example:
        >>> from flatminima.operators import as_operator
        >>> A = as_operator(torch.diag(torch.arange(1.0, 7.0)), blocks={"a": slice(0, 2), "b": slice(2, 6)})
        >>> {name: float(estimate) for name, estimate in block_traces(A, num_products=2).items()}
        {'a': 3.0, 'b': 18.0}
    """
    check_operator(A)
    plan = Plan.checked(num_products, rtol, max_products, max_seconds, probes, generator, progress)
    joint = estimate_diagonal_function(A, _block_traces_of(A), method, plan, resume)
    estimates = {}
    for index, name in enumerate(A.blocks):
        value, stderr = joint.value[index], joint.stderr[index]
        is_met = plan.num_products is None and largest_relative_error(value, stderr, A.dtype) <= plan.rtol
        estimates[name] = Estimate(
            value,
            stderr,
            method=joint.method,
            num_samples=joint.num_samples,
            skewness=None if joint.skewness is None else joint.skewness[index],
            num_products=0 if index else joint.num_products,
            num_gradients=0 if index else joint.num_gradients,
            num_losses=0 if index else joint.num_losses,
            converged=joint.converged or is_met,
        )
    return estimates


def _trace_of(A: LinearOperator) -> DiagonalFunction:
    def known(K: LinearOperator) -> Estimate | None:
        blocks = _known_blocks(K)
        return None if blocks is None else _reduced(blocks, blocks.value.sum())

    return DiagonalFunction("trace", _column_sums, lambda m, e: largest_relative_error(m, e, A.dtype), known, _deviation_of_sum)


def _block_traces_of(A: LinearOperator) -> DiagonalFunction:
    def reduce(columns: Tensor) -> Tensor:
        return torch.stack([_column_sums(columns[rows]) for rows in A.blocks.values()], dim=1)

    return DiagonalFunction(
        "block traces", reduce, lambda m, e: largest_relative_error(m, e, A.dtype), _known_blocks, _deviations
    )


def _known_blocks(K: LinearOperator) -> Estimate | None:
    """Return the block traces ``(B,)`` in float64 by a closed form, or None."""
    traces = closed_form.known_block_traces(K)
    if traces is not None:
        parts = [traces[name] for name in K.blocks]
        return Estimate.exact(
            torch.stack([part.value.to(torch.float64) for part in parts]),
            method=parts[0].method,
            num_products=sum(part.num_products for part in parts),
            num_gradients=sum(part.num_gradients for part in parts),
            num_losses=sum(part.num_losses for part in parts),
        )
    diagonal = closed_form.known_diagonal(K)
    if diagonal is None:
        return None
    return _reduced(diagonal, torch.stack([_column_sums(diagonal.value[rows]) for rows in K.blocks.values()]))


def _reduced(known: Estimate, value: Tensor) -> Estimate:
    return Estimate.exact(
        value,
        method=known.method,
        num_products=known.num_products,
        num_gradients=known.num_gradients,
        num_losses=known.num_losses,
    )


def _column_sums(columns: Tensor) -> Tensor:
    return columns.sum(0, dtype=torch.float64)


def _deviations(squares: Tensor) -> Tensor:
    return (2 * squares).sqrt()


def _deviation_of_sum(squares: Tensor) -> Tensor:
    return _deviations(squares.sum())
