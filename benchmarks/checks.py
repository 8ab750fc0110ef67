"""Whether what a participant returned is right; the reference is float64 autograd that shares no code with flatminima."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.networks import Problem
from benchmarks.works import COLUMNS, EIGENPAIRS, RUN, Found, Sample, Work

__all__ = ["Reference", "moments_of_probes", "numbers", "wrong_eigenvalues"]

#: Relative error of float32 products and sums that passes.
_TOLERANCE = 2e-3
_PROBES = 8


class Reference:
    """What the results of the short works of one problem are held against; made when first needed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._products: dict[str, Tensor] = {}

    def complaint(self, work: Work, result: Any) -> str:
        """Return "" for a right result, else what is wrong with it."""
        if work.kind in ("hessian", "gauss-newton"):
            truth = self._product(work.kind)[:, : work.columns]
            error = (result.double().reshape(truth.shape) - truth).norm() / truth.norm()
        elif work.kind == "diagonal":
            error = self._error_of_diagonal(result.double())
        elif work.kind == "ggn trace":
            mean, stderr = self._sampled_trace()
            error = ((float(result) - mean).abs() - 5 * stderr).clamp(min=0) / mean
        else:
            return ""
        return "" if float(error) <= _TOLERANCE else f"wrong by {float(error):.1e}"

    def _product(self, kind: str) -> Tensor:
        if kind not in self._products:
            product = self.problem.hessian_reference if kind == "hessian" else self.problem.gauss_newton_reference
            self._products[kind] = product(self.problem.vectors(max(RUN, COLUMNS))[:, :COLUMNS])
        return self._products[kind]

    def _error_of_diagonal(self, diagonal: Tensor) -> Tensor:
        """Compare the largest entries and some others with eᵢᵀ G eᵢ."""
        if "rows" not in self._products:
            others = torch.randint(self.problem.size, (3,), generator=torch.Generator().manual_seed(2))
            rows = torch.cat([diagonal.topk(3).indices, others])
            E = torch.zeros(self.problem.size, len(rows), dtype=torch.float64)
            E[rows, range(len(rows))] = 1.0
            self._products["rows"], self._products["entries"] = rows, (E * self.problem.gauss_newton_reference(E)).sum(0)
        truth = self._products["entries"]
        return (diagonal[self._products["rows"]] - truth).abs().max() / truth.max()

    def _sampled_trace(self) -> tuple[Tensor, Tensor]:
        if "trace" not in self._products:
            V = torch.randn(self.problem.size, _PROBES, generator=torch.Generator().manual_seed(3)).sign().double()
            self._products["trace"] = (V * self.problem.gauss_newton_reference(V)).sum(0)
        terms = self._products["trace"]
        return terms.mean(), terms.std() / len(terms) ** 0.5


class _PlainHessian:
    """H's products in float32 on one kept graph of plain autograd."""

    def __init__(self, problem: Problem) -> None:
        self.params = list(problem.model.parameters())
        loss = functional.cross_entropy(problem.model(problem.inputs), problem.targets)
        self.gradients = torch.autograd.grad(loss, self.params, create_graph=True)

    def __call__(self, V: Tensor) -> Tensor:
        columns = []
        for v in V.T:
            parts = [part.view_as(p) for part, p in zip(v.split([p.numel() for p in self.params]), self.params, strict=True)]
            product = torch.autograd.grad(self.gradients, self.params, parts, retain_graph=True)
            columns.append(torch.cat([part.reshape(-1) for part in product]).double())
        return torch.stack(columns, dim=1)


def numbers(problem: Problem, result: Any) -> dict[str, Any]:
    """Return what the checks of a long work need, ready for JSON."""
    if isinstance(result, Sample):
        return {"probes": result.num_probes, "moments": result.moments}
    if isinstance(result, Found):
        with problem.differentiable():
            return _eigenpair_numbers(_PlainHessian(problem), result)
    if hasattr(result, "nodes"):
        scale = [float(result.weights @ result.nodes.abs() ** j) for j in range(1, 5)]
        moments = [float(result.moment(j).value) for j in range(1, 5)]
        steps = float((result.probe >= 0).sum()) / max(1, result.num_probes) - 1  # a rule has one node more than steps
        told = f"{result.method}, {result.num_products} products, {result.num_probes} probes of {steps:.0f} steps"
        errors = [float(result.moment(j).stderr) / one for j, one in enumerate(scale, 1)]
        note = f"{told}, standard errors ≤ {max(errors):.1%}"
        return {"moments": moments, "scale": scale, "note": note, "converged": result.converged, "steps": steps}
    if hasattr(result, "stderr"):
        told = f"{result.method}, {result.num_products} products"
        value = float(result.value) / problem.size
        return {"moments": [value], "scale": [abs(value)], "note": told, "converged": result.converged}
    return {}


def _eigenpair_numbers(H: _PlainHessian, found: Found) -> dict[str, Any]:
    """Return the values, their residuals, and the Ritz values of the vectors, which no true eigenvalue lies below."""
    values, order = found.values.double().sort(descending=True)
    X = found.vectors.double()[:, order]
    Q = torch.linalg.qr(X).Q
    HX, HQ = H(X.float()), H(Q.float())
    ritz = torch.linalg.eigvalsh((Q.T @ HQ + HQ.T @ Q) / 2).flip(0)
    residuals = (HX - X * values).norm(dim=0) / X.norm(dim=0)
    return {
        "values": values.tolist(),
        "ritz": ritz.tolist(),
        "residual": float((residuals / values[0]).max()),
        "own residual": float((residuals / values.abs()).max()),
        "share": found.share,
    }


def wrong_eigenvalues(values: list[float], best: list[float]) -> str:
    """Return what is wrong with values, given for each place the largest Ritz value that anyone's vectors have."""
    errors = [abs(a - b) / best[0] for a, b in zip(values, best, strict=True)]
    misses = sum(error > _TOLERANCE for error in errors)
    return f"wrong: {misses} of {EIGENPAIRS} values, by up to {max(errors):.0%} of the largest" if misses else ""


def moments_of_probes(problem: Problem, count: int) -> list[list[float]]:
    """Return vᵀ Hʲ v / n for j = 1 … 4 of random signs v, one list a probe."""
    V = torch.randn(problem.size, count, generator=torch.Generator().manual_seed(4)).sign()
    with problem.differentiable():
        H = _PlainHessian(problem)
        first = H(V)
        second = H(first.float())
    V = V.double()
    terms = torch.stack([(V * first).sum(0), (first * first).sum(0), (first * second).sum(0), (second * second).sum(0)], dim=1)
    rows: list[list[float]] = (terms / problem.size).tolist()
    return rows
