"""What classes explain of the Gauss-Newton matrix adds up to it, and is what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.estimators import diagonal
from flatminima.objective import Objective
from flatminima.operators import GaussNewton, LinearOperator, by_class, class_split

D64 = torch.float64
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=D64)
LOSSES: dict[str, Callable[..., Tensor]] = {
    "plain": F.cross_entropy,
    "weighted": partial(F.cross_entropy, weight=WEIGHTS),
    "ignored": partial(F.cross_entropy, ignore_index=2),
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def _build(tokens: bool, loss: Callable[..., Tensor], l2: float = 0.0) -> tuple[nn.Module, Tensor, Tensor, Objective]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (Tokens() if tokens else nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))).double()
        x = torch.randn(9, 3, 5, dtype=D64) if tokens else torch.randn(9, 3, dtype=D64)
        y = (torch.arange(36) * 7 % 11 % 4).reshape(9, 4) if tokens else torch.arange(9) * 3 % 4
    return model, x, y, Objective(model, loss, [(x[:5], y[:5]), (x[5:], y[5:])], l2=l2)


def _sum(parts: list[LinearOperator]) -> Tensor:
    return reduce(add, parts).to_dense()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_the_parts_add_up_to_the_gauss_newton_matrix(name: str, tokens: bool, l2: float) -> None:
    *_, objective = _build(tokens, LOSSES[name], l2)
    G = GaussNewton(objective).to_dense()
    split, classes = class_split(objective), by_class(objective)
    torch.testing.assert_close(_sum(list(split)), G, rtol=0, atol=1e-12)
    torch.testing.assert_close(_sum(list(classes.values())), G, rtol=0, atol=1e-12)
    assert list(classes) == ([0, 1, 3] if name == "ignored" else [0, 1, 2, 3])
    for part in (*split, *classes.values()):
        dense = part.to_dense()
        torch.testing.assert_close(dense, dense.T, rtol=0, atol=1e-13)
        assert torch.linalg.eigvalsh(dense)[0] > -1e-12
        torch.testing.assert_close(diagonal(part).value, dense.diagonal(), rtol=1e-9, atol=1e-13)
    assert int(torch.linalg.matrix_rank(split.between.to_dense(), rtol=1e-9)) <= 4
    assert int(torch.linalg.matrix_rank(split.cross.to_dense(), rtol=1e-9)) <= 4 * 2


@pytest.mark.parametrize("tokens", [False, True])
def test_the_parts_are_those_of_the_gradients_at_every_label(tokens: bool) -> None:
    model, x, y, objective = _build(tokens, F.cross_entropy)
    outputs, parameters = model(x), list(model.parameters())
    logits = (outputs.movedim(1, -1) if tokens else outputs).reshape(-1, 4)  # (terms, C)
    labels, p = y.reshape(-1), logits.detach().softmax(1)
    log_p = logits.log_softmax(1)

    def gradient(value: Tensor) -> Tensor:
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(-value, parameters, retain_graph=True)])

    g = torch.stack([torch.stack([gradient(log_p[i, k]) for k in range(4)]) for i in range(len(p))])
    w = p / len(p)
    n = g.shape[-1]
    between, cross, within, own = (torch.zeros(n, n, dtype=D64) for _ in range(4))
    for c in range(4):
        mine = labels == c
        means = {k: (w[mine, k, None] * g[mine, k]).sum(0) / w[mine, k].sum() for k in range(4)}
        masses = {k: w[mine, k].sum() for k in range(4)}
        others = [k for k in range(4) if k != c]
        mass = sum(masses[k] for k in others)
        center = sum(masses[k] * means[k] for k in others) / mass
        between += mass * torch.outer(center, center)
        own += masses[c] * torch.outer(means[c], means[c])
        for k in others:
            cross += masses[k] * torch.outer(means[k] - center, means[k] - center)
        for k in range(4):
            for i in mine.nonzero()[:, 0]:
                d = g[i, k] - means[k]
                within += w[i, k] * torch.outer(d, d)
    for found, expected in zip(class_split(objective), (between, cross, within, own), strict=True):
        torch.testing.assert_close(found.to_dense(), expected, rtol=1e-9, atol=1e-13)


def test_the_part_of_a_class_is_the_matrix_of_its_examples() -> None:
    model, x, y, objective = _build(False, F.cross_entropy)
    for c, part in by_class(objective).items():
        mine = y == c
        alone = GaussNewton(Objective(model, nn.CrossEntropyLoss(reduction="sum"), (x[mine], y[mine]))).to_dense() / 9
        torch.testing.assert_close(part.to_dense(), alone)


def test_a_class_without_examples_has_no_part() -> None:
    model, x, _, _ = _build(False, F.cross_entropy)
    objective = Objective(model, F.cross_entropy, (x, torch.arange(9) % 2))
    assert list(by_class(objective)) == [0, 1]
    torch.testing.assert_close(_sum(list(class_split(objective))), GaussNewton(objective).to_dense(), rtol=0, atol=1e-12)


def test_blocks_of_parts_are_parts_of_blocks() -> None:
    *_, objective = _build(False, F.cross_entropy)
    for part in (*class_split(objective), *by_class(objective).values()):
        torch.testing.assert_close(part.block("2").to_dense(), part.to_dense()[16:, 16:], rtol=0, atol=1e-13)


def test_a_sure_network_has_a_split_without_nan() -> None:
    model, x, _, _ = _build(False, F.cross_entropy)
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    objective = Objective(model, F.cross_entropy, (x, model(x).argmax(1)))
    for part in class_split(objective):
        assert bool(torch.isfinite(part.to_dense()).all())


def test_losses_without_class_numbers_are_refused() -> None:
    model, x, y, _ = _build(False, F.cross_entropy)
    squared = Objective(model, F.mse_loss, (x, torch.zeros(9, 4, dtype=D64)))
    soft = Objective(model, F.cross_entropy, (x, F.one_hot(y, 4).double()))
    for split in (class_split, by_class):
        with pytest.raises(NotSupported, match=r"needs a loss of classes.*Got mse"):
            split(squared)
        with pytest.raises(NotSupported, match=r"class numbers\. Got class probabilities"):
            split(soft)


def test_mean_vectors_that_do_not_fit_are_refused_before_they_are_made() -> None:
    *_, objective = _build(False, F.cross_entropy)
    with pytest.raises(ValueError, match=r"`max_bytes` must be at least \d+ .*4² pairs"):
        class_split(objective, max_bytes=1000)
