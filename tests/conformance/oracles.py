"""Dense float64 references, written without the library: all data as one batch, autograd's own Hessian and Jacobian."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def as_dict(model: nn.Module, theta: Tensor) -> dict[str, Tensor]:
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    parts = theta.split([p.numel() for p in named.values()])
    return {n: part.view(p.shape) for (n, p), part in zip(named.items(), parts, strict=True)}


def loss_function(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """The scalar that the library must differentiate, when loss is a mean over all the data."""
    return lambda theta: loss(functional_call(model, as_dict(model, theta), (x,)), y)


def dense_hessian(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
        return torch.autograd.functional.hessian(loss_function(model, loss, x, y), flat_parameters(model))


def dense_gauss_newton(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    theta = flat_parameters(model)
    outputs = functional_call(model, as_dict(model, theta), (x,)).detach()
    J = torch.autograd.functional.jacobian(lambda t: functional_call(model, as_dict(model, t), (x,)).reshape(-1), theta)
    curvature = torch.autograd.functional.hessian(lambda o: loss(o.view(outputs.shape), y), outputs.reshape(-1))
    return J.T @ curvature @ J


def dense_empirical_fisher(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, scale: float
) -> Tensor:
    """The sum of outer products of the rows' gradients, of a loss that is ``scale`` times a sum over rows, times scale."""
    theta = flat_parameters(model)
    outputs = functional_call(model, as_dict(model, theta), (x,)).detach().requires_grad_()
    (s,) = torch.autograd.grad(loss(outputs, y) / scale, outputs)
    J = torch.autograd.functional.jacobian(lambda t: functional_call(model, as_dict(model, t), (x,)).reshape(len(x), -1), theta)
    g = torch.einsum("bkn,bk->bn", J, s.reshape(len(x), -1))
    return scale * g.T @ g
