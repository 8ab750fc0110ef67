"""The mean over terms, whatever the batches: torch's standard losses, ragged batches, ignored targets, class weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima.objective import Objective
from flatminima.operators import Hessian


class Dot(nn.Module):
    """The smallest model: o = w x, with a single weight."""

    def __init__(self, weight: float = 0.0, num_outputs: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([weight], dtype=torch.float64))
        self.num_outputs = num_outputs

    def forward(self, x: Tensor) -> Tensor:
        o = x * self.w
        return torch.stack([o, torch.zeros_like(o)], 1) if self.num_outputs == 2 else o


def test_ragged_batches_weigh_examples_equally() -> None:
    x = torch.tensor([[1.0]] * 8 + [[3.0]] * 2, dtype=torch.float64)
    batches = [(part, torch.zeros_like(part)) for part in x.split([4, 4, 2])]
    H = Hessian(Objective(Dot(1.0), F.mse_loss, batches))
    assert H.to_dense().item() == pytest.approx(5.2)


def test_token_losses_divide_by_the_tokens_that_are_not_ignored() -> None:
    pad = -100
    batches = [
        (torch.tensor([[1.0, 1.0, 1.0, 1.0]], dtype=torch.float64), torch.zeros(1, 4, dtype=torch.long)),
        (torch.tensor([[3.0, 0.0, 0.0, 0.0]], dtype=torch.float64), torch.tensor([[0, pad, pad, pad]])),
    ]
    objective = Objective(Dot(num_outputs=2), F.cross_entropy, batches)
    assert objective.num_terms == 5
    assert Hessian(objective).to_dense().item() == pytest.approx(0.65)


def test_a_batch_of_ignored_targets_only_adds_nothing() -> None:
    x, y = torch.ones(2, 3, dtype=torch.float64), torch.tensor([[0, 1, 0], [1, 0, 1]])
    empty = (torch.ones(2, 3, dtype=torch.float64), torch.full((2, 3), -100))
    model = Dot(0.3, num_outputs=2)
    with_empty = Objective(model, F.cross_entropy, [(x, y), empty]).value_and_gradient()
    torch.testing.assert_close(with_empty, Objective(model, F.cross_entropy, [(x, y)]).value_and_gradient())


def test_only_ignored_targets_are_an_error() -> None:
    batch = (torch.ones(2, 3, dtype=torch.float64), torch.full((2, 3), -100))
    with pytest.raises(ValueError, match="at least one loss term"):
        Objective(Dot(num_outputs=2), F.cross_entropy, [batch])


def test_squared_error_hessian_of_a_linear_map_has_its_known_trace() -> None:
    g = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(5, k, generator=g, dtype=torch.float64) for k in (4, 3))
    H = Hessian(Objective(nn.Linear(4, 3, bias=False).double(), nn.MSELoss(), [(X[:2], Y[:2]), (X[2:], Y[2:])])).to_dense()
    torch.testing.assert_close(H, 2 / 15 * torch.kron(torch.eye(3, dtype=torch.float64), X.T @ X))
    assert H.trace().item() == pytest.approx(2 * X.square().sum().item() / 5)


def test_two_batches_average_their_hessians() -> None:
    X = torch.tensor([[2**0.5, 0.0], [0.0, 2**0.5]], dtype=torch.float64)

    def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * outputs.square().mean()

    objective = Objective(nn.Linear(2, 1, bias=False).double(), half_squares, [(X[:1], X[:1]), (X[1:], X[1:])])
    torch.testing.assert_close(Hessian(objective).to_dense(), torch.eye(2, dtype=torch.float64))


weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
STANDARD: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cross_entropy": (F.cross_entropy, "classes"),
    "CrossEntropyLoss with weights": (nn.CrossEntropyLoss(weight=weights), "classes"),
    "CrossEntropyLoss with weights, smoothing, ignored": (
        nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2, ignore_index=1),
        "classes",
    ),
    "cross_entropy by partial": (partial(F.cross_entropy, weight=weights, ignore_index=0), "classes"),
    "CrossEntropyLoss with probabilities": (nn.CrossEntropyLoss(weight=weights), "probabilities"),
    "NLLLoss with weights": (nn.NLLLoss(weight=weights), "classes"),
    "MSELoss": (nn.MSELoss(), "real"),
    "l1_loss": (F.l1_loss, "real"),
    "SmoothL1Loss": (nn.SmoothL1Loss(beta=0.3), "real"),
    "HuberLoss": (nn.HuberLoss(delta=0.4), "real"),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(weight=weights, pos_weight=weights), "binary"),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(full=True), "counts"),
    "KLDivLoss mean": (nn.KLDivLoss(log_target=False), "probabilities"),
    "KLDivLoss batchmean": (nn.KLDivLoss(reduction="batchmean"), "probabilities"),
    "SoftMarginLoss": (nn.SoftMarginLoss(), "signs"),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(margin=0.7), "signs"),
    "MultiMarginLoss": (nn.MultiMarginLoss(weight=weights, margin=0.5, p=2), "classes"),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), "label lists"),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(weight=weights), "binary"),
    "sum reduction": (nn.CrossEntropyLoss(weight=weights, reduction="sum"), "classes"),
    "sum by partial": (partial(F.mse_loss, reduction="sum"), "real"),
}


def _targets(kind: str, g: torch.Generator) -> Tensor:
    match kind:
        case "classes":
            return torch.randint(0, 3, (9,), generator=g)
        case "probabilities":
            return torch.rand(9, 3, generator=g, dtype=torch.float64).softmax(1)
        case "binary":
            return torch.randint(0, 2, (9, 3), generator=g).double()
        case "counts":
            return torch.randint(0, 5, (9, 3), generator=g).double()
        case "signs":
            return torch.randint(0, 2, (9, 3), generator=g).double() * 2 - 1
        case "label lists":
            return torch.tensor([[0, 2, -1]] * 9)
        case _:
            return torch.randn(9, 3, generator=g, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", STANDARD)
def test_ragged_batches_give_what_torch_gives_on_all_data_at_once(name: str) -> None:
    loss, kind = STANDARD[name]
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(9, 4, generator=g, dtype=torch.float64), _targets(kind, g)
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)).double()
    ragged = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    expected = loss(model(x), y)
    torch.testing.assert_close(Objective(model, loss, ragged).value(), expected.detach(), rtol=1e-10, atol=1e-12)
    by_pieces = Objective(model, loss, [(x, y)], micro_batch_size=2)
    torch.testing.assert_close(by_pieces.value(), expected.detach(), rtol=1e-10, atol=1e-12)


def test_a_custom_loss_counts_the_batch_size_unless_told() -> None:
    x = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    batches = [(x[:4], x[:4]), (x[4:], x[4:])]

    def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().mean()

    assert Objective(Dot(1.0), mean_square, batches).value().item() == pytest.approx(x.square().mean().item())
    equal = Objective(Dot(1.0), mean_square, batches, num_terms=lambda batch: 1.0)
    assert equal.value().item() == pytest.approx((x[:4].square().mean() + x[4:].square().mean()).item() / 2)


def test_reduction_sum_multiplies_the_mean_by_the_number_of_terms() -> None:
    x = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    mean = Objective(Dot(1.0), F.mse_loss, [(x, 0 * x)])
    total = Objective(Dot(1.0), F.mse_loss, [(x, 0 * x)], reduction="sum")
    torch.testing.assert_close(total.value(), 6 * mean.value())
    torch.testing.assert_close(Hessian(total).to_dense(), 6 * Hessian(mean).to_dense())


def test_l2_adds_its_strength_to_every_eigenvalue() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    plain, decayed = (Objective(model, F.mse_loss, [(x, x[:, :2])], l2=l2) for l2 in (0.0, 0.1))
    torch.testing.assert_close(Hessian(decayed).to_dense(), Hessian(plain).to_dense() + 0.1 * torch.eye(8, dtype=torch.float64))
    torch.testing.assert_close(decayed.gradient(), plain.gradient() + 0.1 * plain.theta)
    torch.testing.assert_close(decayed.value(), plain.value() + 0.05 * plain.theta.square().sum())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, F.softmax(torch.zeros(2), 0), "cross_entropy"])
def test_a_loss_that_is_no_callable_is_refused(loss: object) -> None:
    with pytest.raises(TypeError, match="`loss` must be a callable"):
        Objective(Dot(), loss, [(torch.ones(2), torch.ones(2))])  # type: ignore[arg-type]


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape under mse"), pytest.warns(UserWarning, match="target size"):
        Objective(nn.Linear(3, 1), F.mse_loss, [(torch.ones(4, 3), torch.ones(4))])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="none"),
        nn.MSELoss(reduction="none"),
        partial(F.mse_loss, reduction="none"),
        partial(F.mse_loss, reduction="none", weight=torch.ones(2, 1)),
        partial(partial(F.cross_entropy, reduction="none"), label_smoothing=0.1),
        partial(F.mse_loss, reduction="average"),
    ],
)
def test_a_loss_that_does_not_reduce_is_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"must average or add up its terms.*Use reduction='mean' or 'sum'"):
        Objective(nn.Linear(3, 1), loss, (torch.ones(2, 3), torch.ones(2, 1)))
