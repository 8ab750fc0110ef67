"""The derivative check tells a loss with its own derivative from one whose gradient was stopped in part."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima.objective import Objective
from flatminima.objective.consistency import check_derivative

g = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 4, generator=g), torch.randint(0, 3, (24,), generator=g)


class Network(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor], *, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, width), nn.Linear(width, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Turned(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def _hooked(h: Tensor) -> Tensor:
    h = h * 1.0
    if h.requires_grad:
        h.register_hook(lambda gradient: 0.5 * gradient)
    return h


STOPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "detached norm": lambda h: h / h.norm(dim=1, keepdim=True).detach(),
    "straight-through": lambda h: h + (torch.round(4 * h) / 4 - h).detach(),
    "gradient reversal": Turned.apply,
    "hook": _hooked,
    "small part": lambda h: h + 0.01 * h.detach().square(),
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "norm": lambda h: h / h.norm(dim=1, keepdim=True),
    "identity": lambda h: h,
    "hook that only looks": lambda h: (h.requires_grad and h.register_hook(lambda _: None), h)[1],
}


@pytest.mark.parametrize("how", STOPPED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_gradient_that_is_stopped_or_changed_in_part_is_told(how: str, seed: int) -> None:
    objective = Objective(Network(STOPPED[how]), F.cross_entropy, (X, Y))
    check = check_derivative(objective, generator=torch.Generator().manual_seed(seed))
    assert not check
    assert "is not that of the loss" in str(check)
    assert json.loads(json.dumps(check.to_dict()))["agrees"] is False


@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_whole_gradient_raises_no_alarm(how: str, dtype: torch.dtype, seed: int) -> None:
    objective = Objective(Network(WHOLE[how]).to(dtype), F.cross_entropy, (X.to(dtype), Y))
    check = check_derivative(objective, generator=torch.Generator().manual_seed(seed))
    assert check
    assert check.dtype == torch.float64
    assert check.here.derivative == pytest.approx(check.here.differences[-1], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_kinks_raise_no_alarm_in_a_wide_network_nor_where_the_point_is_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert check_derivative(Objective(Network(torch.relu, width=2000), F.cross_entropy, (X, Y)), generator=generator)
    model = Network(torch.relu)
    nn.init.zeros_(model.first.bias)
    at_kink = check_derivative(Objective(model, F.cross_entropy, (torch.zeros_like(X), Y)), generator=generator)
    assert at_kink
    assert not at_kink.here.agrees
    assert "a kink" in str(at_kink)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_a_closure_is_checked_in_its_own_precision_also_at_a_minimum(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = torch.arange(1.0, 9.0, dtype=dtype)
    w = target.clone().requires_grad_()
    whole = check_derivative(Objective.from_closure(lambda: (w - target).square().sum(), [w]), generator=generator)
    assert whole
    assert whole.dtype == dtype
    stopped = Objective.from_closure(lambda: ((w - target) * (w - target).detach()).sum(), [w])
    check = check_derivative(stopped, generator=generator)
    assert check.here.derivative == 0
    assert not check


def test_the_check_repeats_with_its_generator_and_leaves_the_model_alone() -> None:
    model = Network(torch.relu)
    before = [p.detach().clone() for p in model.parameters()]
    objective = Objective(model, F.cross_entropy, (X, Y), l2=0.1)
    one, two = (check_derivative(objective, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one == two
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))
