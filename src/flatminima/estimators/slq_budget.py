"""How much a stochastic Lanczos quadrature may do: the arguments that all estimators by quadrature share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, final

import torch

from flatminima._checks import check_at_least, check_one_of
from flatminima._progress import Progress
from flatminima.estimators.deflation import Known, known_from
from flatminima.estimators.eigenpairs import Eigenpairs
from flatminima.estimators.probe_lanczos import MIN_STEPS
from flatminima.estimators.sampling import Plan
from flatminima.operators.base import LinearOperator

__all__ = ["DENSE_ROWS", "Budget", "checked_budget"]

#: Most rows of a matrix that is formed to find all its eigenvalues.
DENSE_ROWS = 2048
#: Most products at which all eigenvalues are found without a thought for sampling.
_DENSE_AT_ONCE = 128


@final
@dataclass(frozen=True)
class Budget:
    """How much to do, checked.

    Attributes:
        num_probes: Exactly so many probes; None where the plan's ``rtol`` decides.
        num_steps: Exactly so many steps a probe; None where they go on until they have settled.
        method: "auto", "exact" or "slq".
        deflate: Number of eigenvalues to find and take out; None where that is forecast.
        known: Eigenvalues that the caller knows.
        is_kept: Whether the state is kept in a file.
    """

    num_probes: int | None
    num_steps: int | None
    method: str
    deflate: int | None
    known: Known
    is_kept: bool

    @property
    def settings(self) -> dict[str, Any]:
        """What the result depends on, for the file that an interrupted run leaves."""
        names = ("num_probes", "num_steps", "method", "deflate")
        return {name: getattr(self, name) for name in names} | {"known": self.known.values.tolist()}

    def is_dense(self, A: LinearOperator, plan: Plan) -> bool:
        """Whether n products and all eigenvalues are the cheaper way from the start."""
        if self.method != "auto":
            return self.method == "exact"
        fewest = min(_DENSE_AT_ONCE, plan.max_products)
        if self.num_probes is not None:
            fewest = self.num_probes * (self.num_steps or 2 * MIN_STEPS)
        return A.size <= min(fewest, DENSE_ROWS)


def checked_budget(
    A: LinearOperator,
    num_probes: int | None,
    num_steps: int | None,
    rtol: float | None,
    max_products: int,
    max_seconds: float | None,
    method: str,
    deflate: Eigenpairs | int | None,
    probes: str,
    generator: torch.Generator | None,
    progress: Progress,
    resume: str | os.PathLike[str] | None,
) -> tuple[Plan, Budget]:
    """Check the arguments that all estimators by quadrature share."""
    if num_probes is not None and rtol is not None:
        raise ValueError(
            "`num_probes` and `rtol` must not both be given (either the number or the error decides when to stop). "
            f"Got num_probes={num_probes}, rtol={rtol}. Use max_products= to bound the cost under rtol."
        )
    check_one_of("method", method, ("auto", "exact", "slq"))
    check_at_least("max_products", max_products, 2 * MIN_STEPS, "two probes of four steps")
    plan = Plan.checked(None, rtol, max_products, max_seconds, probes, generator, progress)
    if num_probes is not None:
        check_at_least("num_probes", num_probes, 1)
    if num_steps is not None:
        check_at_least("num_steps", num_steps, 1)
    known, count = Known.nothing(A), None
    if isinstance(deflate, Eigenpairs):
        known = known_from(A, deflate)
    elif deflate is not None:
        count = check_at_least("deflate", deflate, 0, "a number of eigenvalues")
    return plan, Budget(num_probes, num_steps, method, count, known, is_kept=resume is not None)
