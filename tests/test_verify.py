"""The self-check of an objective's products: silent where all is right, and on the spot where it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm

import flatminima as fm
from tests.conformance.cases import CASES, IDS, Case

D64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X, Y = torch.randn(12, 4, generator=generator(), dtype=D64), torch.randint(0, 3, (12,), generator=generator(1))


class Doubled(torch.autograd.Function):
    """x², whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 4 * x * g


class Untrue(torch.autograd.Function):
    """x³ with a right gradient, whose own gradient is wrong in a way that stays symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * (x.square() - 0.3 * x.square() + 0.3 * x.square().detach())


class Activated(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def objective(*inner: nn.Module, **options: Any) -> fm.Objective:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), *inner, nn.Linear(5, 3)).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    return fm.Objective(model, F.cross_entropy, (X, Y), **options)


def failed(found: fm.Verification) -> set[str]:
    return {check.name for check in found.checks if not check.ok}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_right_products_are_verified(case: Case) -> None:
    found = fm.verify(fm.Objective(case.model(), case.loss, case.batches()), generator=generator())
    assert found.ok, str(found)
    assert {"gradient", "backward", "Hessian", "Hessian is symmetric", "columns at once"} <= {c.name for c in found.checks}


@pytest.mark.parametrize("seed", range(6))
def test_kinks_raise_no_alarm(seed: int) -> None:
    x = torch.randn(2000, 4, generator=generator(seed), dtype=D64)
    y = torch.randint(0, 3, (2000,), generator=generator(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3)).double()
    found = fm.verify(fm.Objective(model, F.cross_entropy, (x, y)), generator=generator(seed))
    assert found.ok, str(found)


def test_at_a_kink_itself_the_point_close_by_is_judged() -> None:
    o = objective(nn.ReLU())
    assert fm.verify(o.at(0 * o.theta), generator=generator()).ok


def test_a_gradient_that_is_not_that_of_the_loss_is_found() -> None:
    for activation in (Doubled.apply, lambda x: x * x.detach().sigmoid()):
        found = fm.verify(objective(Activated(activation)), generator=generator())
        assert "gradient" in failed(found)
        assert "cuts or changes gradients" in str(found)


def test_a_wrong_second_derivative_that_is_symmetric_is_found() -> None:
    found = fm.verify(objective(Activated(Untrue.apply)), generator=generator())
    assert failed(found) == {"Hessian"}
    assert found["Hessian"].difference > 0.01
    assert found["gradient"].verdict == "agrees"


def test_a_product_that_is_refused_is_told_with_the_reason() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()
    found = fm.verify(fm.Objective(model, F.cross_entropy, (X, Y)), generator=generator())
    assert found["Hessian"].verdict == "refused"
    assert "weight_norm" in str(found)
    assert not found


def test_a_gradient_that_backward_does_not_fill_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    o = objective(nn.Tanh())
    right = o.gradient()
    monkeypatch.setattr("flatminima.operators.self_check.gradient_by_backward", lambda _: 0.5 * right)
    assert failed(fm.verify(o, generator=generator())) == {"backward"}


def test_closures_are_verified_without_outputs() -> None:
    w = torch.tensor([1.0, -2.0], dtype=D64, requires_grad=True)
    w.grad = torch.ones(2, dtype=D64)
    found = fm.verify(fm.Objective.from_closure(lambda: (w**4).sum(), [w]), generator=generator())
    assert found.ok, str(found)
    assert found["Gauss-Newton"].verdict == "does not apply"
    assert torch.equal(w.grad, torch.ones(2, dtype=D64))


def test_l2_and_sums_and_short_types_are_verified() -> None:
    assert fm.verify(objective(nn.Tanh(), l2=0.3), generator=generator()).ok
    assert fm.verify(objective(nn.Tanh(), reduction="sum"), generator=generator()).ok
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
        found = fm.verify(fm.Objective(model, F.cross_entropy, (X.to(dtype), Y)), generator=generator())
        assert found.ok, str(found)
        assert found.dtype == D64


def test_a_saturated_softmax_raises_no_alarm() -> None:
    o = objective(nn.ReLU())
    assert fm.verify(o.at(30 * o.theta), generator=generator()).ok


def test_results_repeat_with_the_generator_and_change_nothing() -> None:
    o = objective(nn.Tanh())
    before = o.theta, torch.get_rng_state(), [p.grad for p in o.model.parameters()]
    assert fm.verify(o, generator=generator(3)) == fm.verify(o, generator=generator(3))
    assert torch.equal(o.theta, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert before[2] == [p.grad for p in o.model.parameters()]


def test_the_table_and_the_dictionary_hold_every_check() -> None:
    found = fm.verify(objective(nn.Tanh()), generator=generator())
    text, data = str(found), json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [entry["name"] for entry in data["checks"]] == [check.name for check in found.checks]
    assert all(check.name in text and check.compared in text for check in found.checks)
    assert text.endswith("All checks agree (43 parameters, 12 examples, float64).")
    assert data["ok"] is True
    with pytest.raises(KeyError, match="There is no check 'hessian'"):
        found["hessian"]


def test_only_objectives_are_verified() -> None:
    with pytest.raises(TypeError, match=r"`objective` must be a flatminima.Objective. Got Linear"):
        fm.verify(nn.Linear(1, 1))  # type: ignore[arg-type]


class Once(torch.autograd.Function):
    """x³ of the kind that can be differentiated once, and not in forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3 * ctx.saved_tensors[0] ** 2


def test_a_function_that_can_be_differentiated_once_is_refused_and_no_raw_error() -> None:
    o = objective(Activated(Once.apply))
    found = fm.verify(o, generator=generator())
    assert found["Hessian"].verdict == "refused"
    with pytest.raises(fm.NotSupported, match="no second derivative"):
        fm.GaussNewton(o) @ o.theta
