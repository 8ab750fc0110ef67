"""The exact Gauss-Newton diagonal is exact or absent: what its rules presume of a model is checked, not assumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotSupported
from flatminima.estimators import diagonal, trace
from flatminima.estimators.gauss_newton_diagonal import gauss_newton_squares
from flatminima.objective import Objective
from flatminima.operators import GaussNewton

D64 = torch.float64
Loss = Callable[[Tensor, Tensor], Tensor]


class TimeFirst(nn.Module):
    """A layer whose first axis is not that of the outputs, though it may be as long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.first(x.transpose(0, 1)))).mean(0))


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=batch_first)
        self.batch_first = batch_first
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1) if self.batch_first else self.encoder(x.transpose(0, 1)).mean(0))


class TimeFirstRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[0])[-1]


class Scaled(nn.Module):
    """A scale without axes, as contrastive models have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.logit_scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.logit_scale.exp() * torch.tanh(self.layer(x.mean(1)))


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mean(1))


class GatedCoupling(nn.Module):
    """Examples see each other through a gate that may be closed."""

    def __init__(self, gate: float = 0.0) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 3), nn.Parameter(torch.tensor([gate]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        return self.layer(x) + self.gate * x[:, :3].mean(0)


class ClosedBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(4, 5, 1), nn.BatchNorm1d(5), nn.Linear(5, 3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).mean(2))


class Permuted(nn.Module):
    """Row b of the outputs belongs to another row of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(1)).flip(0)


_class_weights = torch.tensor([0.2, 1.0, 5.0], dtype=D64)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean that weighs an example by what else is in the batch."""
    return F.cross_entropy(outputs, targets, weight=_class_weights)


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "time first": TimeFirst,
    "encoder, time first": partial(Encoder, batch_first=False),
    "encoder, batch first": partial(Encoder, batch_first=True),
    "recurrent, time first": TimeFirstRecurrent,
    "scale without axes": Scaled,
    "learned activation": Activated,
}
COUPLED: dict[str, Callable[[], nn.Module]] = {
    "closed gate": GatedCoupling,
    "gate ajar": partial(GatedCoupling, 1e-4),
    "closed batch norm": ClosedBatchNorm,
    "permuted rows": Permuted,
}


def _gauss_newton(build: Callable[[], nn.Module], loss: Loss, batch: int, length: int, seed: int, mode: str) -> GaussNewton:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().double()
        x = torch.randn(batch, length, 4, dtype=D64) * torch.exp(1.5 * torch.randn(batch, 1, 1, dtype=D64))
        y = torch.randint(0, 3, (batch,))
    return GaussNewton(Objective(model, loss, (x, y), mode=mode))


def _exact(G: GaussNewton) -> tuple[Tensor, Tensor]:
    """Return diagonal and block traces by the closed form."""
    entries, sums = (gauss_newton_squares(G, diagonal=entry_wise)[0] for entry_wise in (True, False))
    return torch.cat([entries[name].reshape(-1) for name in G.blocks]), torch.stack([sums[name] for name in G.blocks])


@settings(max_examples=25, deadline=None)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    loss=st.sampled_from([F.cross_entropy, weighted]),
    batch=st.integers(2, 6),
    length=st.integers(2, 6) | st.none(),
    seed=st.integers(0, 2**16),
)
def test_the_closed_form_is_the_dense_diagonal_for_any_shape_of_a_batch(
    architecture: str, loss: Loss, batch: int, length: int | None, seed: int
) -> None:
    G = _gauss_newton(ARCHITECTURES[architecture], loss, batch, batch if length is None else length, seed, "eval")
    found, sums = _exact(G)
    expected = G.to_dense().diagonal()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11 * float(expected.max()))
    blocks = torch.stack([expected[where].sum() for where in G.blocks.values()])
    torch.testing.assert_close(sums, blocks, rtol=1e-8, atol=1e-11 * float(expected.max()))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("loss", [F.cross_entropy, weighted])
def test_a_sequence_as_long_as_the_batch_is_not_taken_for_the_batch(architecture: str, loss: Loss) -> None:
    G = _gauss_newton(ARCHITECTURES[architecture], loss, 9, 9, 0, "eval")
    found, _ = _exact(G)
    torch.testing.assert_close(found, G.to_dense().diagonal(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("architecture", sorted(COUPLED))
def test_a_coupling_that_does_not_show_in_the_outputs_has_no_closed_form(architecture: str) -> None:
    G = _gauss_newton(COUPLED[architecture], F.cross_entropy, 8, 5, 0, "train")
    with pytest.raises(NotSupported, match="coupled"):
        gauss_newton_squares(G, diagonal=True)
    torch.testing.assert_close(diagonal(G, method="exact").value, G.to_dense().diagonal())


def test_layers_behind_batch_statistics_keep_their_closed_form() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x.mean(1)))

    G = _gauss_newton(Normalised, F.cross_entropy, 8, 5, 0, "train")
    found, _ = _exact(G)
    torch.testing.assert_close(found, G.to_dense().diagonal(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("strength", [1e-3, 1e-5, 1e-8])
def test_a_loss_with_a_weak_term_over_the_batch_has_no_closed_form(strength: float) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + strength * (outputs[:, 0] - outputs[:, 1]).mean().square()

    G = _gauss_newton(Activated, loss, 40, 2, 0, "eval")
    with pytest.raises(NotSupported, match="couples examples"):
        gauss_newton_squares(G, diagonal=False)


def test_an_unused_parameter_has_zeros_and_costs_no_example_by_itself() -> None:
    class Idle(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle = nn.Linear(4, 3), nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            Idle.calls += 1
            return self.layer(x.mean(1))

    G = _gauss_newton(Idle, F.cross_entropy, 8, 5, 0, "eval")
    Idle.calls = 0
    squares, _ = gauss_newton_squares(G, diagonal=True)
    assert torch.equal(squares["idle"], torch.zeros(2, 2, dtype=D64))
    assert Idle.calls <= 1 + 3 * 2  # and two graphs of a few examples, and the rest of those, to know their size


def test_a_layer_that_takes_a_single_example_is_not_taken_for_a_batch() -> None:
    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.single = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mean(1)) * self.single(torch.ones(2, dtype=x.dtype))

    G = _gauss_newton(Modulated, F.cross_entropy, 3, 5, 0, "eval")
    found, _ = _exact(G)
    torch.testing.assert_close(found, G.to_dense().diagonal(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_another_precision_is_squared_in_the_precision_of_the_results(dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(torch.relu(self.low(x.to(dtype))).float())

    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mixed()
    G = GaussNewton(Objective(model, F.cross_entropy, (torch.randn(20, 4, generator=g), torch.randint(0, 3, (20,), generator=g))))
    found, _ = _exact(G)
    expected = G.to_dense().diagonal()
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm() + 1e-5 * expected.norm()


@pytest.mark.parametrize("method", ["auto", "exact", "hutchinson"])
@pytest.mark.parametrize(
    ("loss", "targets"),
    [(nn.MultiMarginLoss(), torch.tensor([0, 1, 2, 0])), (nn.MultiLabelMarginLoss(), torch.tensor([[0, 1, -1]] * 4))],
)
def test_a_loss_without_a_second_derivative_is_refused_by_name(method: str, loss: nn.Module, targets: Tensor) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    G = GaussNewton(Objective(nn.Linear(4, 3), loss, (x, targets)))
    with pytest.raises(NotSupported, match=r"no second derivative.*margin"):
        trace(G, method=method)


def test_a_curvature_that_is_not_finite_has_no_closed_form() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.abs().pow(1.5).sum(1).mean() + 0 * targets.sum()

    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    G = GaussNewton(Objective(model, loss, (torch.ones(4, 4), torch.zeros(4))))
    with pytest.raises(NotSupported, match="no curvature"):
        gauss_newton_squares(G, diagonal=True)
