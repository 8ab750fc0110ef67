"""Hooks on gradients of parameters: those of training are off while the library works, those hung in forward are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.objective import Objective
from flatminima.operators import Hessian

g = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=g), torch.randint(0, 3, (8,), generator=g)


def _objective(model: nn.Module, *, from_closure: bool) -> Objective:
    if from_closure:
        return Objective.from_closure(lambda: F.cross_entropy(model(X), Y), dict(model.named_parameters()))
    return Objective(model, F.cross_entropy, [(X[:4], Y[:4]), (X[4:], Y[4:])])


@pytest.mark.parametrize("from_closure", [False, True])
def test_hooks_on_parameters_neither_run_nor_change_derivatives_and_stay(from_closure: bool) -> None:
    model, calls = nn.Linear(3, 3), []
    plain = _objective(model, from_closure=from_closure)
    v = torch.ones(plain.space.size)
    gradient, product = plain.gradient(), Hessian(plain) @ v
    handle = model.weight.register_hook(lambda gradient: calls.append(1) or 10 * gradient)
    hooked = _objective(model, from_closure=from_closure)
    assert torch.equal(hooked.gradient(), gradient)
    assert torch.equal(Hessian(hooked) @ v, product)
    assert calls == []
    F.cross_entropy(model(X), Y).backward()
    assert calls == [1]
    handle.remove()
    F.cross_entropy(model(X), Y).backward()
    assert calls == [1]


class Hooking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.weight.requires_grad:
            self.layer.weight.register_hook(lambda gradient: 2 * gradient)
        return self.layer(x)


@pytest.mark.parametrize("from_closure", [False, True])
def test_a_hook_that_a_forward_pass_hangs_on_a_parameter_is_named_and_taken_off(from_closure: bool) -> None:
    model = Hooking()
    with pytest.raises(NotSupported, match=r"registers a gradient hook on 'layer.weight'"):
        _objective(model, from_closure=from_closure)
    assert not model.layer.weight._backward_hooks
