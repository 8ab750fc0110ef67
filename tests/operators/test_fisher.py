"""Fisher informations, exact, drawn and empirical, are the second moments of gradients that they say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.estimators import diagonal, trace
from flatminima.objective import Objective
from flatminima.operators import EmpiricalFisher, Fisher, GaussNewton, Hessian

D64 = torch.float64
WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=D64)


def _model(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def _x(num_examples: int = 6) -> Tensor:
    return torch.randn(num_examples, 3, generator=torch.Generator().manual_seed(1), dtype=D64)


Y = torch.tensor([0, 1, 2, 2, 1, 0])


def _gradient(model: nn.Module, value: Tensor) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)])


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Line(nn.Module):
    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=D64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


@pytest.mark.parametrize("residual", [0.0, 0.5, -3.0])
def test_a_line_has_fisher_eight_and_empirical_fisher_sixteen_r_squared(residual: float) -> None:
    x = torch.tensor([2.0], dtype=D64)
    objective = Objective(Line(1.0), F.mse_loss, (x, x - residual))
    for A in (Hessian(objective), GaussNewton(objective), Fisher(objective)):
        assert A.to_dense().item() == pytest.approx(8.0)
    for per in ("example", "term"):
        assert EmpiricalFisher(objective, per=per).to_dense().item() == pytest.approx(16 * residual**2)


def test_the_exact_fisher_is_the_expectation_over_all_labels() -> None:
    model, x = _model(), _x()
    p = model(x).softmax(1)
    expected = torch.zeros(31, 31, dtype=D64)
    for i in range(6):
        for k in range(3):
            g = _gradient(model, p[i, k].log())
            expected += p[i, k].detach() * torch.outer(g, g) / 6
    for y in (Y, Y.flip(0)):  # whatever was observed
        found = Fisher(Objective(model, F.cross_entropy, [(x[:4], y[:4]), (x[4:], y[4:])]))
        torch.testing.assert_close(found.to_dense(), expected, rtol=1e-10, atol=1e-14)


def test_the_exact_fisher_of_yes_and_no_is_the_expectation_over_both() -> None:
    model, x = _model(1), _x()
    p = model(x).sigmoid()[:, 0]
    expected = torch.zeros(21, 21, dtype=D64)
    for i in range(6):
        for q in (p[i], 1 - p[i]):
            g = _gradient(model, q.log())
            expected += q.detach() * torch.outer(g, g) / 6
    found = Fisher(Objective(model, F.binary_cross_entropy_with_logits, (x, (Y > 0).double()[:, None])))
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-10, atol=1e-14)


LIKELIHOODS: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module], Tensor]] = {
    "cross-entropy": (F.cross_entropy, _model, Y),
    "weighted": (partial(F.cross_entropy, weight=WEIGHTS, ignore_index=1), _model, Y),
    "log-probabilities": (F.nll_loss, lambda: nn.Sequential(_model(), nn.LogSoftmax(1)), Y),
    "squared error": (F.mse_loss, _model, torch.zeros(6, 3, dtype=D64)),
    "logistic": (partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHTS), _model, F.one_hot(Y, 3).double()),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_exact_fisher_is_the_gauss_newton_matrix(name: str) -> None:
    loss, build, y = LIKELIHOODS[name]
    objective = Objective(build(), loss, (_x(), y))
    torch.testing.assert_close(Fisher(objective).to_dense(), GaussNewton(objective).to_dense(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_fisher_of_drawn_labels_is_unbiased(name: str) -> None:
    loss, build, y = LIKELIHOODS[name]
    objective = Objective(build(), loss, (_x(), y))
    exact = Fisher(objective)
    v = torch.randn(exact.size, generator=_generator(), dtype=D64)
    expected = v @ (exact @ v)
    drawn = [Fisher(objective, num_samples=8, generator=_generator(seed)) for seed in range(60)]
    samples = torch.stack([v @ (F_hat @ v) for F_hat in drawn])
    stderr = samples.std() / len(samples) ** 0.5
    assert stderr < 0.1 * expected
    assert abs(samples.mean() - expected) < 4 * stderr


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_more_labels_come_nearer_to_the_exact_fisher(name: str) -> None:
    loss, build, y = LIKELIHOODS[name]
    objective = Objective(build(), loss, (_x(), y))
    exact = Fisher(objective).to_dense()
    near, far = (Fisher(objective, num_samples=s, generator=_generator()).to_dense() - exact for s in (1600, 4))
    assert near.norm() < 0.1 * exact.norm()
    assert near.norm() < far.norm() / 4


def test_drawn_labels_stay_the_same_and_follow_the_generator() -> None:
    objective = Objective(_model(), F.cross_entropy, [(_x()[:4], Y[:4]), (_x()[4:], Y[4:])])
    A, same, other = (Fisher(objective, num_samples=1, generator=_generator(seed)) for seed in (3, 3, 4))
    dense = A.to_dense(columns_at_once=7)
    assert torch.equal(dense, A.to_dense(columns_at_once=7))
    assert torch.equal(dense, same.to_dense(columns_at_once=7))
    assert not torch.allclose(dense, other.to_dense())
    torch.testing.assert_close(dense, dense.T)
    assert int(torch.linalg.matrix_rank(dense)) <= 6
    torch.testing.assert_close(diagonal(A).value, dense.diagonal())


def test_without_a_generator_labels_come_from_the_global_one() -> None:
    objective = Objective(_model(), F.cross_entropy, (_x(), Y))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = (Fisher(objective, num_samples=1).to_dense() for _ in range(2))
        torch.manual_seed(0)
        assert torch.equal(first, Fisher(objective, num_samples=1).to_dense())
    assert not torch.allclose(first, second)


def test_products_with_drawn_labels_leave_the_global_generator_alone() -> None:
    A = Fisher(Objective(_model(), F.cross_entropy, (_x(), Y)), num_samples=2, generator=_generator())
    before = torch.get_rng_state()
    A @ torch.ones(A.size, dtype=D64)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_example_of_many_tokens_brings_one_gradient_and_its_tokens_several() -> None:
    model = nn.Conv1d(3, 3, 1).double()
    x = torch.randn(4, 3, 5, generator=_generator(), dtype=D64)
    y = torch.randint(0, 3, (4, 5), generator=_generator())
    objective = Objective(model, F.cross_entropy, [(x[:3], y[:3]), (x[3:], y[3:])])
    by_token = F.cross_entropy(model(x), y, reduction="none")
    for per, totals in (("example", by_token.sum(1)), ("term", by_token.flatten())):
        g = torch.stack([_gradient(model, total) for total in totals])
        A = EmpiricalFisher(objective, per=per)
        torch.testing.assert_close(A.to_dense(), g.T @ g / 20, rtol=1e-10, atol=1e-14)
        found = trace(A)
        assert (found.method, found.num_gradients) == ("exact empirical Fisher trace", 2 if per == "example" else 6)
        assert float(found) == pytest.approx(float(g.square().sum() / 20))
    drawn = Fisher(objective, num_samples=2, generator=_generator())
    assert float(trace(drawn)) == pytest.approx(float(drawn.to_dense().trace()))


@pytest.mark.parametrize("per", ["example", "term"])
@pytest.mark.parametrize("outputs", [(3,), (3, 2), ()])
def test_terms_of_an_elementwise_loss_are_its_entries(per: str, outputs: tuple[int, ...]) -> None:
    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, torch.Size(outputs).numel(), dtype=D64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).reshape(len(x), *outputs)

    model, x = Shaped(), _x()
    y = torch.randn(6, *outputs, generator=_generator(), dtype=D64)
    objective = Objective(model, F.mse_loss, (x, y))
    terms = (model(x) - y).square().reshape(6, -1)
    totals = terms.sum(1) if per == "example" else terms.flatten()
    g = torch.stack([_gradient(model, total) for total in totals])
    A = EmpiricalFisher(objective, per=per)
    torch.testing.assert_close(A.to_dense(), g.T @ g / terms.numel(), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(diagonal(A).value, A.to_dense().diagonal())


def test_a_custom_loss_has_the_gradients_of_its_rows() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.exp().sum(1).log1p() - outputs[:, 0] * targets).mean()

    model, x = _model(), _x()
    o = model(x)
    g = torch.stack([_gradient(model, loss(o[i : i + 1], Y[i : i + 1])) for i in range(6)])
    A = EmpiricalFisher(Objective(model, loss, [(x[:4], Y[:4]), (x[4:], Y[4:])]))
    torch.testing.assert_close(A.to_dense(), g.T @ g / 6, rtol=1e-10, atol=1e-14)
    assert float(trace(A)) == pytest.approx(float(A.to_dense().trace()))
    with pytest.raises(NotSupported, match="terms are not known"):
        EmpiricalFisher(Objective(model, loss, (x, Y)), per="term")


@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-8])
@pytest.mark.parametrize("rows", [(0, 1), (3, 4), (2, 5)])
def test_a_loss_that_couples_two_examples_is_refused(strength: float, rows: tuple[int, int]) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        a, b = rows
        return F.cross_entropy(outputs, targets) + strength * (outputs[a] * outputs[b]).sum().sin()

    A = EmpiricalFisher(Objective(_model(), loss, (_x(), Y)))
    with pytest.raises(NotSupported, match="couples examples"):
        A @ torch.ones(A.size, dtype=D64)


def test_equal_outputs_do_not_hide_a_coupling() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs @ outputs.T).logsumexp(1).mean() + 0 * targets.sum()

    model = nn.Linear(3, 3, dtype=D64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    A = EmpiricalFisher(Objective(model, loss, (_x(), Y)))
    with pytest.raises(NotSupported, match="couples examples"):
        A @ torch.ones(A.size, dtype=D64)


def test_a_loss_of_probabilities_is_told_apart_from_one_that_couples() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs.gather(1, targets[:, None]).log() + 0.1 * (1 - outputs).log().sum(1, keepdim=True)).mean()

    model = nn.Sequential(_model(), nn.Softmax(1))
    A = EmpiricalFisher(Objective(model, loss, (_x(), Y)))
    g = torch.stack([_gradient(model, loss(model(_x()[i : i + 1]), Y[i : i + 1])) for i in range(6)])
    torch.testing.assert_close(A.to_dense(), g.T @ g / 6)


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.l1_loss, lambda o, t: (o - t).square().mean()])
def test_a_loss_without_a_likelihood_has_no_fisher(loss: Callable[..., Tensor]) -> None:
    objective = Objective(_model(), loss, (_x(), torch.zeros(6, 3, dtype=D64)))
    with pytest.raises(NotSupported, match=r"negative log-likelihood of labels.*Got (smooth_l1|l1|a custom loss)\."):
        Fisher(objective)


def test_arguments_are_checked() -> None:
    objective = Objective(_model(), F.cross_entropy, (_x(), Y))
    with pytest.raises(ValueError, match="`num_samples` must be at least 1"):
        Fisher(objective, num_samples=0)
    with pytest.raises(TypeError, match="`generator` must be"):
        Fisher(objective, num_samples=1, generator=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`per` must be one of example, term.*Did you mean 'example'"):
        EmpiricalFisher(objective, per="examples")
    w = torch.ones(2, requires_grad=True)
    for operator, name in ((Fisher, "Fisher"), (EmpiricalFisher, "empirical Fisher")):
        with pytest.raises(NotSupported, match=f"The {name} matrix is not known to an objective made from a closure"):
            operator(Objective.from_closure(lambda: w.square().sum(), [w]))
