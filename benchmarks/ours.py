"""flatminima in the curvature benchmark, by its public interface alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import flatminima as fm
from benchmarks.networks import Problem
from benchmarks.works import COLUMNS, EIGENPAIRS, OUR_STEPS, RTOL_EIGENPAIRS, RTOL_SAMPLED, RUN, Factories, Found, Job

__all__ = ["NAME", "factories"]

NAME = "flatminima"
#: The second single product of an operator tries the ways to it and the third is made by the best of them.
_WARM_UP = 3
#: Enough to see that a diagonal is sampled, where it has no closed form.
_MOST_PRODUCTS = 16


def factories(problem: Problem, length: int = RUN) -> Factories:
    """Return the works, with a run of so many products; see ``benchmarks.works.Factories``."""

    def objective() -> fm.Objective:
        return fm.Objective(problem.model, functional.cross_entropy, problem.data)

    def warm(operator: Callable[[fm.Objective], Any], V: Tensor) -> Callable[[], Job]:
        def factory() -> Job:
            A = operator(objective())
            for _ in range(_WARM_UP):
                A @ V
            return lambda: A @ V

        return factory

    def fresh(job: Callable[[fm.Objective], Any]) -> Callable[[], Job]:
        def factory() -> Job:
            made = objective()
            return lambda: job(made)

        return factory

    def run_known() -> Job:
        made = objective()
        _run(fm.Hessian(made), V[:, :_WARM_UP])
        return lambda: _run(fm.Hessian(made), V[:, :length])

    V = problem.vectors(max(RUN, COLUMNS))
    one, eight = V[:, 0].clone(), V[:, :COLUMNS].clone()
    return {
        "hessian": warm(fm.Hessian, one),
        "run": fresh(lambda made: _run(fm.Hessian(made), V[:, :length])),
        "hessian8": warm(fm.Hessian, eight),
        "ggn": warm(fm.GaussNewton, one),
        "ggn8": warm(fm.GaussNewton, eight),
        "ggn-trace": fresh(lambda made: _exact(fm.trace(fm.GaussNewton(made), max_products=_MOST_PRODUCTS))),
        "ggn-diagonal": fresh(lambda made: _exact(fm.diagonal(fm.GaussNewton(made), max_products=_MOST_PRODUCTS))),
        "trace": fresh(lambda made: fm.trace(fm.Hessian(made), rtol=RTOL_SAMPLED)),
        "eigenpairs": fresh(lambda made: _eigenpairs(fm.Hessian(made))),
        "density3": fresh(lambda made: fm.spectral_density(fm.Hessian(made), rtol=RTOL_SAMPLED, num_steps=OUR_STEPS)),
        "density": fresh(lambda made: fm.spectral_density(fm.Hessian(made), rtol=RTOL_SAMPLED)),
        "run-known": run_known,
        "first": fresh(lambda made: [A @ one for A in [fm.Hessian(made)] for _ in range(2)]),
        "first8": fresh(lambda made: fm.Hessian(made) @ eight),
    }


def _exact(estimate: fm.Estimate) -> Tensor:
    """Return the value, or say that there was no closed form."""
    if bool((estimate.stderr > 0).any()):
        raise RuntimeError(f"sampled, not exact: {estimate.method}, {estimate.num_products} products")
    return estimate.value


def _eigenpairs(H: fm.Hessian) -> Found:
    found = fm.eigenpairs(H, EIGENPAIRS, rtol=RTOL_EIGENPAIRS)
    return Found(found.values, found.vectors)


def _run(H: fm.Hessian, V: Tensor) -> Tensor:
    """Return the first column's product after all of the run's."""
    with H.keeping_graphs():
        return torch.stack([H @ v for v in V.T], dim=1)[:, 0]
