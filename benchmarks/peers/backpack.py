"""BackPACK: exact Gauss–Newton diagonals of sequential networks, and the Hessian-free products that come with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from backpack import backpack, extend
from backpack.extensions import DiagGGNExact
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.hessianfree.hvp import hessian_vector_product
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.networks import Problem
from benchmarks.works import COLUMNS, RUN, Factories, Job

__all__ = ["NAME", "factories"]

NAME = "BackPACK"


def factories(problem: Problem, length: int = RUN) -> Factories:
    """Return the works, with a run of so many products; see ``benchmarks.works.Factories``."""
    V = problem.vectors(max(RUN, COLUMNS))
    params = list(problem.model.parameters())
    x, y = problem.data

    def hessian(count: int) -> Tensor:
        loss = functional.cross_entropy(problem.model(x), y)
        gradients = torch.autograd.grad(loss, params, create_graph=True)
        columns = (_parts(V[:, i], params) for i in range(count))
        return torch.stack([_flat(hessian_vector_product(loss, params, v, grad_params=gradients)) for v in columns], dim=1)

    def ggn(count: int) -> Tensor:
        outputs = problem.model(x)
        loss = functional.cross_entropy(outputs, y)
        columns = (_parts(V[:, i], params) for i in range(count))
        return torch.stack([_flat(ggn_vector_product(loss, outputs, problem.model, v)) for v in columns], dim=1)

    def diagonal(reduce: Callable[[Tensor], Tensor]) -> Callable[[], Job]:
        def factory() -> Job:
            model, loss = extend(problem.model), extend(nn.CrossEntropyLoss())

            def job() -> Tensor:
                model.zero_grad()
                with backpack(DiagGGNExact()):
                    loss(model(x), y).backward()
                return reduce(_flat(p.diag_ggn_exact for p in model.parameters()))

            return job

        return factory

    products: Factories = {
        "hessian": lambda: lambda: hessian(1),
        "run": lambda: lambda: hessian(length)[:, 0],
        "hessian8": lambda: lambda: hessian(COLUMNS),
        "ggn": lambda: lambda: ggn(1),
        "ggn8": lambda: lambda: ggn(COLUMNS),
    }
    if not _is_sequential(problem.model):
        return products
    return {**products, "ggn-trace": diagonal(torch.sum), "ggn-diagonal": diagonal(lambda d: d)}


def _is_sequential(model: nn.Module) -> bool:
    """Tell whether the exact diagonal is there: a sequence of layers that it knows."""
    known = (nn.Linear, nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten)
    return isinstance(model, nn.Sequential) and all(isinstance(layer, known) for layer in model)


def _parts(v: Tensor, params: list[Tensor]) -> list[Tensor]:
    return [part.view_as(p) for part, p in zip(v.split([p.numel() for p in params]), params, strict=True)]


def _flat(parts: object) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])  # type: ignore[attr-defined]
