"""curvlinops: operators by forward-over-reverse under vmap, SciPy's eigsh, Lanczos without re-orthogonalisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from curvlinops import GGNLinearOperator, HessianLinearOperator, hutchinson_trace
from curvlinops.papyan2020traces.spectrum import fast_lanczos
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from benchmarks.networks import Problem
from benchmarks.works import COLUMNS, EIGENPAIRS, RTOL_EIGENPAIRS, RUN, STEPS, Factories, Found, Job, Sample

__all__ = ["NAME", "factories"]

NAME = "curvlinops"
_PROBES, _RUNS = 8, 4


def factories(problem: Problem, length: int = RUN) -> Factories:
    """Return the works, with a run of so many products; see ``benchmarks.works.Factories``."""
    V = problem.vectors(max(RUN, COLUMNS))
    one, eight = V[:, 0].clone(), V[:, :COLUMNS].clone()

    def hessian() -> HessianLinearOperator:
        return _operator(HessianLinearOperator, problem)

    def products(operator: type, X: Tensor) -> Callable[[], Job]:
        def factory() -> Job:
            A = _operator(operator, problem)
            return lambda: A @ X

        return factory

    def run() -> Job:
        H = hessian()
        return lambda: torch.stack([H @ V[:, i] for i in range(length)], dim=1)[:, 0]

    return {
        "hessian": products(HessianLinearOperator, one),
        "run": run,
        "hessian8": products(HessianLinearOperator, eight),
        "ggn": products(GGNLinearOperator, one),
        "ggn8": products(GGNLinearOperator, eight),
        "trace": lambda: _job(hessian(), _trace),
        "eigenpairs": lambda: _job(hessian(), _eigenpairs),
        "density3": lambda: _job(hessian(), _density),
        "density": lambda: _job(hessian(), _density),
    }


def _operator(kind: type, problem: Problem) -> HessianLinearOperator:
    params = [p for p in problem.model.parameters() if p.requires_grad]
    return kind(problem.model, nn.CrossEntropyLoss(), params, [problem.data], check_deterministic=False)


def _job(H: HessianLinearOperator, function: Callable[[HessianLinearOperator], object]) -> Job:
    return lambda: function(H)


def _trace(H: HessianLinearOperator) -> Sample:
    return Sample(_PROBES, (float(hutchinson_trace(H, _PROBES)) / H.shape[0],))


def _eigenpairs(H: HessianLinearOperator) -> Found:
    values, vectors = eigsh(H.to_scipy(), EIGENPAIRS, which="LA", tol=RTOL_EIGENPAIRS)
    return Found(torch.from_numpy(values), torch.from_numpy(vectors))


def _density(H: HessianLinearOperator) -> Sample:
    rules = [fast_lanczos(H, STEPS) for _ in range(_RUNS)]
    moments = torch.tensor([[vectors[0].square() @ nodes**j for j in range(1, 5)] for nodes, vectors in rules])
    return Sample(_RUNS, tuple(moments.mean(0).tolist()))
