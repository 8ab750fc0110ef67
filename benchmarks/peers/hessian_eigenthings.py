"""hessian-eigenthings: double backward anew for each product, Lanczos with as many steps as the user names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hessian_eigenthings import GGNOperator, HessianOperator, hutchinson, lanczos, spectral_density
from hessian_eigenthings.loss_fns import supervised_forward, supervised_loss, supervised_loss_of_output
from torch.nn import functional

from benchmarks.networks import Problem
from benchmarks.works import COLUMNS, EIGENPAIRS, RTOL_EIGENPAIRS, RUN, STEPS, Factories, Found, Job, Sample

__all__ = ["NAME", "factories"]

NAME = "hessian-eigenthings"
_PROBES, _RUNS = 8, 4
_MOST_STEPS = 320


def factories(problem: Problem, length: int = RUN) -> Factories:
    """Return the works, with a run of so many products; see ``benchmarks.works.Factories``."""
    V = problem.vectors(max(RUN, COLUMNS))

    def hessian() -> HessianOperator:
        return HessianOperator(problem.model, [problem.data], supervised_loss(functional.cross_entropy))

    def ggn() -> GGNOperator:
        of_output = supervised_loss_of_output(functional.cross_entropy)
        return GGNOperator(problem.model, [problem.data], supervised_forward, of_output)

    def loop(operator: Callable[[], HessianOperator | GGNOperator], count: int) -> Callable[[], Job]:
        def factory() -> Job:
            A = operator()
            return lambda: torch.stack([A.matvec(V[:, i]) for i in range(count)], dim=1)

        return factory

    def first_of_run() -> Job:
        job = loop(hessian, length)()
        return lambda: job()[:, 0]

    return {
        "hessian": loop(hessian, 1),
        "run": first_of_run,
        "hessian8": loop(hessian, COLUMNS),
        "ggn": loop(ggn, 1),
        "ggn8": loop(ggn, COLUMNS),
        "trace": lambda: _job(hessian(), _trace),
        "eigenpairs": lambda: _job(hessian(), _eigenpairs),
        "density3": lambda: _job(hessian(), _density),
        "density": lambda: _job(hessian(), _density),
    }


def _job(H: HessianOperator, function: Callable[[HessianOperator], object]) -> Job:
    return lambda: function(H)


def _trace(H: HessianOperator) -> Sample:
    return Sample(_PROBES, (hutchinson(H, num_samples=_PROBES).estimate / H.size,))


def _eigenpairs(H: HessianOperator) -> Found:
    """Double the steps until all pairs have converged by the package's own word; only the last attempt counts.

    It re-orthogonalises all steps, which is not the default beyond 50: without, it returns copies of the largest eigenvalues.
    """
    steps, spent = 2 * EIGENPAIRS, 0
    while True:
        found = lanczos(H, k=EIGENPAIRS, max_iter=steps, tol=RTOL_EIGENPAIRS, which="LA", reorthogonalize=True)
        spent += steps
        if bool(found.converged.all()) or steps >= _MOST_STEPS:
            return Found(found.eigenvalues, found.eigenvectors.T, share=steps / spent)
        steps *= 2


def _density(H: HessianOperator) -> Sample:
    found = spectral_density(H, num_runs=_RUNS, lanczos_steps=STEPS, num_grid_points=2)
    nodes, weights = found.raw_eigenvalues, found.raw_weights
    return Sample(_RUNS, tuple(float((weights * nodes**j).sum(1).mean()) for j in range(1, 5)))
