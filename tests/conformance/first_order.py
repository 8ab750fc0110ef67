"""References that take first derivatives alone, by plain backward passes on a copy: no operation needs a second derivative."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Outputs = Callable[[nn.Module], Tensor]
LossOf = Callable[[Tensor], Tensor]


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def moved(model: nn.Module, v: Tensor, h: float) -> nn.Module:
    """A copy of the model at θ + h v."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for p, part in zip(parameters(result), v.split([p.numel() for p in parameters(model)]), strict=True):
            p.add_(h * part.view(p.shape))
    return result


def gradient(model: nn.Module, total: Tensor) -> Tensor:
    """What ``total.backward()`` leaves in the parameters of a model."""
    for p in parameters(model):
        p.grad = None
    total.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters(model)]
    return torch.cat([g.reshape(-1) for g in grads])


def hessian_product(model: nn.Module, outputs: Outputs, loss: LossOf, v: Tensor, h: float = 1e-5) -> Tensor:
    above, below = (gradient(m, loss(outputs(m))) for m in (moved(model, v, h), moved(model, v, -h)))
    return (above - below) / (2 * h)


def gauss_newton_product(model: nn.Module, outputs: Outputs, loss: LossOf, v: Tensor, h: float = 1e-5) -> Tensor:
    with torch.no_grad():
        pushed = (outputs(moved(model, v, h)) - outputs(moved(model, v, -h))) / (2 * h)
    own = copy.deepcopy(model)
    o = outputs(own)
    variable = o.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(variable), variable, create_graph=True)
    (pulled,) = torch.autograd.grad(slope, variable, pushed)
    return gradient(own, (o * pulled).sum())


def empirical_fisher_product(model: nn.Module, totals: Callable[[nn.Module], list[Tensor]], v: Tensor, scale: float) -> Tensor:
    """scale · Σ_b g_b (g_b·v) of the totals of the examples."""
    count = len(totals(copy.deepcopy(model)))
    result = torch.zeros_like(v)
    for b in range(count):
        own = copy.deepcopy(model)
        g = gradient(own, totals(own)[b])
        result += g * (g @ v)
    return scale * result


def relative(found: Tensor, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm())
