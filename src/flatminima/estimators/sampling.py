"""The one sequential Monte-Carlo loop of all estimators: probes, running moments, and when to stop.

The running mean is a poor guide to its own error: it stands still by chance. So the loop stops on the standard error, and
looks at it rarely: for the first time after ``first_look`` samples, then where the error so far says that it will suffice, at
most twice as far. Stopping at the first moment at which the error *happens* to look small gives intervals that are too short.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_generator, check_one_of, check_positive
from flatminima._errors import NonFiniteLoss
from flatminima._progress import Progress, no_progress
from flatminima.estimators.checkpoint import Checkpoint
from flatminima.estimators.moments import Moments
from flatminima.estimators.stopping import FIRST_LOOK, MIN_SAMPLES, Images, share_of_tolerance
from flatminima.operators.base import LinearOperator

__all__ = [
    "DEFAULT_MAX_PRODUCTS",
    "DEFAULT_RTOL",
    "Draw",
    "Plan",
    "Samples",
    "check_finite",
    "check_operator",
    "columns_at_once",
    "draw_probes",
    "sample_mean",
]

DEFAULT_RTOL = 0.02
DEFAULT_MAX_PRODUCTS = 1000
_AT_ONCE = 32
_NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Plan:
    """How much to sample, checked.

    Attributes:
        num_products: Exactly so many products; None where ``rtol`` decides.
        rtol: Standard error to reach, relative to the value.
        max_products: Most products under ``rtol``.
        deadline: Clock reading (``time.monotonic``) after which no further block is begun; at least two samples are drawn.
        probes: "rademacher" (entries ±1) or "gaussian".
        generator: Source of the probes.
        progress: Told the number of products.
        checkpoint: Where the state is kept.
    """

    num_products: int | None
    rtol: float
    max_products: int
    deadline: float
    probes: str
    generator: torch.Generator | None
    progress: Progress
    checkpoint: Checkpoint = field(default_factory=Checkpoint.none)

    @classmethod
    def checked(
        cls,
        num_products: int | None = None,
        rtol: float | None = None,
        max_products: int = DEFAULT_MAX_PRODUCTS,
        max_seconds: float | None = None,
        probes: str = "rademacher",
        generator: torch.Generator | None = None,
        progress: Progress = no_progress,
    ) -> Plan:
        """Check the arguments that all sampling estimators share.

        Raises:
            ValueError: If ``num_products`` and ``rtol`` are both given, or a number is out of range.
            TypeError: If an argument has the wrong type.
        """
        if num_products is not None and rtol is not None:
            raise ValueError(
                "`num_products` and `rtol` must not both be given (either the cost or the error decides when to stop). "
                f"Got num_products={num_products}, rtol={rtol}. Use max_products= to bound the cost under rtol."
            )
        two = "a standard error takes two samples"
        if num_products is not None:
            check_at_least("num_products", num_products, 2, two)
        seconds = math.inf if max_seconds is None else check_positive("max_seconds", max_seconds)
        return cls(
            num_products,
            DEFAULT_RTOL if rtol is None else check_positive("rtol", rtol),
            check_at_least("max_products", max_products, 2, two),
            time.monotonic() + seconds,
            check_one_of("probes", probes, ("rademacher", "gaussian")),
            check_generator(generator),
            progress,
        )

    @contextmanager
    def running(self, A: LinearOperator, resume: str | os.PathLike[str] | None, **settings: object) -> Iterator[Plan]:
        """Give the plan with the file of this run; within, products with A may share what they have in common.

        Args:
            A: Operator.
            resume: The file, or None.
            settings: What the result depends on besides the plan.
        """
        own = {name: getattr(self, name) for name in ("num_products", "rtol", "max_products", "probes")}
        with A.keeping_graphs(), Checkpoint.open(resume, A, settings | own, self.generator) as checkpoint:
            yield replace(self, checkpoint=checkpoint)

    @property
    def budget(self) -> int:
        """Most products that may be made."""
        return self.max_products if self.num_products is None else self.num_products

    @property
    def fewest_products(self) -> int:
        """Products that plain sampling takes where it is not lucky: a matrix of no more rows is formed whole."""
        return min(MIN_SAMPLES, self.max_products) if self.num_products is None else self.num_products


@dataclass(frozen=True)
class Samples:
    """Mean of independent samples and its standard error, in float64.

    Attributes:
        mean: Any shape.
        stderr: Same shape.
        skewness: Of a single sample, same shape; 0 where the samples are equal.
        num_samples: Number of samples.
        num_products: Products made for them.
        converged: Whether the stop rule was met.
        gave_up: Whether the sampling ended because the rest would have cost more than the alternative.
    """

    mean: Tensor
    stderr: Tensor
    skewness: Tensor
    num_samples: int
    num_products: int
    converged: bool
    gave_up: bool = False


def draw_probes(A: LinearOperator, count: int, plan: Plan) -> Tensor:
    """Return random probes V ``(n, count)`` with E[v vᵀ] = I.

    They are drawn one after the other, so that the sequence does not depend on how many are drawn at once.
    """
    device = A.device if plan.generator is None else plan.generator.device
    rows = torch.empty(count, A.size, dtype=A.dtype, device=device)
    for row in rows:
        if plan.probes == "gaussian":
            row.normal_(generator=plan.generator)
        else:
            row.bernoulli_(0.5, generator=plan.generator)
    if plan.probes == "rademacher":
        rows.mul_(2).sub_(1)
    return rows.T.to(A.device)


#: From a number b of samples to their values, ``(b, …)``, and, where these are linear in v ∘ A v, the images A v, ``(n, b)``.
Draw = Callable[[int], tuple[Tensor, Tensor | None]]


def columns_at_once(size: int) -> int:
    """Return how many vectors of n = ``size`` entries are held at once."""
    return max(1, min(_AT_ONCE, _NUMBERS_AT_ONCE // max(size, 1)))


def sample_mean(
    draw: Draw,
    *,
    size: int,
    plan: Plan,
    relative_error: Callable[[Tensor, Tensor], float],
    message: str,
    cost: int = 1,
    columns: int | None = None,
    spent: int = 0,
    first_look: int = FIRST_LOOK,
    give_up_beyond: float = math.inf,
) -> Samples:
    """Average samples until the plan is fulfilled.

    Args:
        draw: Gives that many new samples.
        size: Number of rows n of a probe; bounds how many are held at once.
        plan: When to stop.
        relative_error: Of a mean and its standard error.
        message: What is being sampled, for the progress.
        cost: Products a sample.
        columns: Vectors that a sample multiplies at once; None for as many as it makes products.
        spent: Products that were made before and count towards the plan's limits.
        first_look: Samples before the first look at the error. Looks before ``MIN_SAMPLES`` ask for a
            share of the tolerance (:func:`~flatminima.estimators.stopping.share_of_tolerance`).
        give_up_beyond: What the alternative costs: stop when more further products are forecast and it fits into the limits.
    """
    limit = max(2, (plan.budget - spent) // cost)
    is_fixed = plan.num_products is not None
    look = limit if is_fixed else min(first_look, limit)
    at_once = max(1, columns_at_once(size) // (columns or cost))
    total = limit * cost + spent if is_fixed else None
    started, gave_up = time.monotonic(), False
    state = plan.checkpoint.load("samples")
    moments, images = Moments(), Images()
    if state is not None:
        tensors = dict(state.tensors)
        images.sketches = tensors.pop("sketches").cpu()
        moments = Moments(state.numbers["count"], **tensors)
        look, total = state.numbers["look"], state.numbers["total"]
    begun = moments.count

    def affordable() -> float:
        return _affordable(plan.deadline, started, moments.count - begun)

    while True:
        if moments.count < look:
            values, some = draw(int(min(at_once, look - moments.count, affordable())))
            moments = moments.with_block(check_finite(values))
            if some is not None:
                images.add(some)
            now = {"count": moments.count, "look": look, "total": total}
            plan.checkpoint.keep("samples", moments.tensors | {"sketches": images.sketches}, now)
            plan.progress(moments.count * cost + spent, total, message)
        count = moments.count
        is_late = count >= 2 and time.monotonic() > plan.deadline
        if count < look and not is_late:
            continue
        error = relative_error(moments.mean, moments.stderr)
        kurtosis = images.kurtosis()
        if kurtosis is None:
            kurtosis = 1.5 * float(moments.skewness.square().mean())  # that of a χ² as skewed
        rtol = plan.rtol * share_of_tolerance(count, kurtosis)
        converged = count >= look and (is_fixed or (count >= first_look and error <= rtol))
        if converged or count >= limit or is_late:
            break
        needed = max(count * (error / rtol) ** 2, count + 1)
        room = min(plan.budget - spent - count * cost, affordable() * cost)
        gave_up = (needed - count) * cost > give_up_beyond and give_up_beyond <= room
        if gave_up:
            break
        look = min(limit, math.ceil(min(needed, 2 * count)))
        total = math.ceil(min(limit, needed)) * cost + spent
    return Samples(moments.mean, moments.stderr, moments.skewness, count, count * cost, converged, gave_up)


def _affordable(deadline: float, started: float, count: int) -> float:
    """Return how many samples fit before the deadline, at the pace so far; two at first, and at least one."""
    if deadline == math.inf:
        return math.inf
    if count < 2:
        return 2 - count
    now = time.monotonic()
    return max(1, int((deadline - now) * count / max(now - started, 1e-9)))


def check_operator(A: LinearOperator) -> LinearOperator:
    """Return ``A`` if it is an operator."""
    if not isinstance(A, LinearOperator):
        raise TypeError(f"`A` must be a LinearOperator. Got {type(A).__name__}. Write as_operator(matrix) for a plain matrix.")
    return A


def check_finite(product: Tensor) -> Tensor:
    """Return ``product`` if it holds neither infinities nor NaNs."""
    if not bool(torch.isfinite(product).all()):
        raise NonFiniteLoss(
            "A product of A with a vector must be finite. Got inf or NaN. "
            "The second derivatives overflow at these parameters: check the loss there, or use a wider dtype."
        )
    return product
