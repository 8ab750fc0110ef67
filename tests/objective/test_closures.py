"""What a closure and its parameters must be, and that calls of it leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotDeterministic, NotSupported
from flatminima.objective import Objective
from flatminima.operators import Hessian

g = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=g), torch.randint(0, 3, (8,), generator=g)


def _network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def test_one_memory_under_two_names_is_refused() -> None:
    w = torch.arange(4.0).requires_grad_()
    with pytest.raises(ValueError, match=r"each tensor once. Got the same one as '0' and '1'"):
        Objective.from_closure(lambda: w.square().sum(), [w, w])
    with pytest.raises(ValueError, match=r"each tensor once. Got the same one as 'a' and 'b'"):
        Objective.from_closure(lambda: w.square().sum(), {"a": w, "b": w})
    part = w.detach()[2:].requires_grad_()
    with pytest.raises(ValueError, match=r"must not share memory. Got '0' and '1'"):
        Objective.from_closure(lambda: w.square().sum() + part.sum(), [w, part])
    halves = [half.requires_grad_() for half in torch.arange(4.0).split(2)]
    objective = Objective.from_closure(lambda: sum((h.square().sum() for h in halves), torch.zeros(())), halves)
    assert Hessian(objective).to_dense().equal(2 * torch.eye(4))


@pytest.mark.parametrize("closure", ["x", None, torch.ones(())])
def test_a_closure_that_cannot_be_called_is_refused(closure: Any) -> None:
    with pytest.raises(TypeError, match="`closure` must be a function without arguments"):
        Objective.from_closure(closure, [torch.ones(2, requires_grad=True)])


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "at least one tensor. Got none"),
        (3, TypeError, "in order or by name. Got int"),
        ([torch.ones(2)], ValueError, r"leaf tensors with requires_grad=True. Got float32\[2\] for '0'"),
        ({"w": 2.0}, ValueError, "Got float for 'w'"),
    ],
)
def test_wrong_parameters_of_a_closure_are_named(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Objective.from_closure(lambda: torch.ones(()), params)


def test_one_tensor_stands_for_a_list_of_one() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    assert Objective.from_closure(lambda: w.square().sum(), w).gradient().tolist() == [2.0, 4.0]


@pytest.mark.parametrize("result", [2.0, torch.ones(2)])
def test_a_closure_that_returns_no_number_as_a_tensor_is_refused(result: Any) -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"one number as a tensor.*not loss.item"):
        Objective.from_closure(lambda: result, [w])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_that_calls_backward_is_refused_and_leaves_nothing_behind(set_to_none: bool) -> None:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(X), Y).backward()
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"without calling backward\(\)"):
        Objective.from_closure(closure, list(model.parameters()))
    for parameter, (gradient, content) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, content)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


def test_running_statistics_gradients_and_attributes_inside_a_closure_are_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.shapes = _network(), 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.shapes.append(x.shape)
            return self.inner(x)

    model = Counting()
    F.cross_entropy(model(X), Y).backward()
    gradient, content = model.inner[0].weight.grad, model.inner[0].weight.grad.clone()
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def closure() -> Tensor:
        model.zero_grad(set_to_none=False)
        model.train()
        return F.cross_entropy(model(X), Y)

    model.eval()
    objective = Objective.from_closure(closure, dict(model.named_parameters()))
    Hessian(objective) @ torch.ones(objective.space.size)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert model.inner[0].weight.grad is gradient
    assert torch.equal(gradient, content)
    assert (model.calls, len(model.shapes)) == (1, 1)


class Distillation:
    """A student that follows a teacher whose weights are a running mean of its own."""

    def __init__(self, *, when: str, decay: float = 0.9, alike: bool = False) -> None:
        self.student, self.teacher, self.when, self.decay = _network().eval(), _network().eval(), when, decay
        if not alike:
            with torch.no_grad():
                self.teacher[0].weight.add_(0.5)

    @torch.no_grad()
    def update(self) -> None:
        for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            theirs.mul_(self.decay).add_(ours, alpha=1 - self.decay)

    def __call__(self) -> Tensor:
        if self.when == "before":
            self.update()
        with torch.no_grad():
            target = torch.zeros(8, 3) if self.when == "unused" else self.teacher(X)
        loss = F.mse_loss(self.student(X), target)
        if self.when in ("after", "unused"):
            self.update()
        return loss


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("decay", "alike"), [(0.9, False), (0.9, True), (0.9999, False), (0.99999, True), (1 - 1e-6, False)])
def test_a_closure_that_updates_a_teacher_is_refused_and_the_teacher_stays(
    when: str, decay: float, alike: bool, as_function: bool
) -> None:
    loss = Distillation(when=when, decay=decay, alike=alike)
    before = [p.detach().clone() for p in loss.teacher.parameters()]
    with pytest.raises((NotDeterministic, NotSupported), match=r"update other modules|changes with the number of calls"):
        Objective.from_closure((lambda: loss()) if as_function else loss, list(loss.student.parameters()))
    assert all(torch.equal(p, b) for p, b in zip(loss.teacher.parameters(), before, strict=True))


def test_a_mean_of_weights_that_the_loss_does_not_read_is_put_back() -> None:
    loss = Distillation(when="unused")
    before = [p.detach().clone() for p in loss.teacher.parameters()]
    objective = Objective.from_closure(lambda: loss(), list(loss.student.parameters()))
    Hessian(objective) @ torch.ones(objective.space.size)
    assert all(torch.equal(p, b) for p, b in zip(loss.teacher.parameters(), before, strict=True))
    still = Distillation(when="never")
    expected = Objective.from_closure(lambda: F.mse_loss(still.student(X), torch.zeros(8, 3)), list(still.student.parameters()))
    assert torch.equal(objective.gradient(), expected.gradient())


def test_a_closure_refers_to_what_is_not_bound_yet_without_an_error() -> None:
    w = torch.ones(2, requires_grad=True)

    def closure() -> Tensor:
        return w.square().sum() if w.numel() else late

    assert Objective.from_closure(closure, [w]).value() == 2
    late = torch.zeros(())
