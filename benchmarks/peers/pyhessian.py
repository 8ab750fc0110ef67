"""PyHessian: double backward on one kept graph, power iteration with deflation, Lanczos with re-orthogonalisation.

Its density calls ``torch.eig``, which torch no longer has; a stand-in is lent to it while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyhessian import hessian
from pyhessian.utils import hessian_vector_product
from torch import Tensor, nn

from benchmarks.networks import Problem
from benchmarks.works import COLUMNS, EIGENPAIRS, RTOL_EIGENPAIRS, RUN, STEPS, Factories, Found, Job, Sample

__all__ = ["NAME", "factories"]

NAME = "PyHessian"
_PROBES, _RUNS = 8, 4


def factories(problem: Problem, length: int = RUN) -> Factories:
    """Return the works, with a run of so many products; see ``benchmarks.works.Factories``."""
    V = problem.vectors(max(RUN, COLUMNS))

    def batches() -> Job:
        made = hessian(problem.model, nn.CrossEntropyLoss(), dataloader=[problem.data], cuda=False)
        v = _parts(V[:, 0], made.params)
        return lambda: _flat(made.dataloader_hv_product(v)[1])

    def kept(count: int) -> Callable[[], Job]:
        def job() -> Tensor:
            made = _kept(problem)
            columns = [_parts(V[:, i], made.params) for i in range(count)]
            return torch.stack([_flat(hessian_vector_product(made.gradsH, made.params, v)) for v in columns], dim=1)

        return lambda: job

    def run() -> Job:
        job = kept(length)()
        return lambda: job()[:, 0]

    def on_kept(function: Callable[[Any], object]) -> Callable[[], Job]:
        def factory() -> Job:
            made = _kept(problem)  # not measured: the time of a few probes stands for many on one graph
            return lambda: function(made)

        return factory

    return {
        "hessian": batches,
        "run": run,
        "hessian8": kept(COLUMNS),
        "trace": on_kept(_trace),
        "eigenpairs": lambda: lambda: _eigenpairs(_kept(problem)),
        "density3": on_kept(_density),
        "density": on_kept(_density),
    }


def _kept(problem: Problem) -> Any:
    problem.model.zero_grad()
    return hessian(problem.model, nn.CrossEntropyLoss(), data=problem.data, cuda=False)


def _trace(made: Any) -> Sample:
    terms = made.trace(maxIter=_PROBES, tol=-math.inf)
    return Sample(len(terms), (sum(terms) / len(terms) / sum(p.numel() for p in made.params),))


def _eigenpairs(made: Any) -> Found:
    values, vectors = made.eigenvalues(maxIter=100, tol=RTOL_EIGENPAIRS, top_n=EIGENPAIRS)
    return Found(torch.tensor(values), torch.stack([_flat(v) for v in vectors], dim=1))


def _density(made: Any) -> Sample:
    with _lent_eig():
        rules = zip(*made.density(iter=STEPS, n_v=_RUNS), strict=True)
    moments = torch.tensor([[torch.tensor(w) @ torch.tensor(t) ** j for j in range(1, 5)] for t, w in rules])
    return Sample(_RUNS, tuple(moments.mean(0).tolist()))


@contextmanager
def _lent_eig() -> Iterator[None]:
    def eig(T: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(T)
        return torch.stack([values, torch.zeros_like(values)], dim=1), vectors

    before = torch.eig
    torch.eig = eig  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.eig = before


def _parts(v: Tensor, params: list[Tensor]) -> list[Tensor]:
    return [part.view_as(p) for part, p in zip(v.split([p.numel() for p in params]), params, strict=True)]


def _flat(parts: Any) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
