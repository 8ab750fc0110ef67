"""One list of models with losses and data that every operator and closed form is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    input_shape: tuple[int, ...]
    targets: str  # "classes", "token classes", "probabilities", "binary", "real"
    num_outputs: int = 3
    piecewise_linear: bool = False
    token_inputs: bool = False

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build().double().eval()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                    module.running_mean.normal_()
                    module.running_var.uniform_(0.5, 2.0)
                    nn.init.normal_(module.weight)
                    nn.init.normal_(module.bias)
        return model

    def data(self, num_examples: int = 7) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(1)
        if self.token_inputs:
            x = torch.randint(0, 5, (num_examples, *self.input_shape), generator=g)
        else:
            x = torch.randn(num_examples, *self.input_shape, generator=g, dtype=torch.float64)
        with torch.no_grad():
            shape = self.model()(x).shape
        if self.targets == "classes":
            return x, torch.randint(0, self.num_outputs, (shape[0], *shape[2:]), generator=g)
        if self.targets == "probabilities":
            return x, torch.randn(shape, generator=g, dtype=torch.float64).softmax(1)
        if self.targets == "binary":
            return x, torch.randint(0, 2, shape, generator=g).double()
        return x, torch.randn(shape, generator=g, dtype=torch.float64)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The same data in ragged batches."""
        x, y = self.data()
        return [(x[:3], y[:3]), (x[3:6], y[3:6]), (x[6:], y[6:])]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer, self.head = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        return self.head(h + self.outer(F.relu(self.inner(h))))


class Tied(nn.Module):
    """A weight used by two layers, and once more as a plain matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.first.weight)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(5, 3), nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])


class TokenClassifier(nn.Module):
    """Logits (batch, classes, positions), as torch's cross-entropy wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)).cumsum(1)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _mlp(activation: type[nn.Module], **kwargs: object) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), activation(**kwargs), nn.Linear(5, 4), activation(**kwargs), nn.Linear(4, 3))


def _cnn2d() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, (2, 3), padding=(1, 2), dilation=(1, 2), groups=2, bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


def _initialised(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    model = build().eval()
    model(torch.zeros(2, *shape))
    return model


def _soft_plus_margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss without a closed form here; not convex in the outputs."""
    picked = outputs.gather(1, targets[:, None])[:, 0]
    return (F.softplus(-picked) + torch.sin(outputs).sum(1)).mean()


def _mixed_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(20, 6),
        nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3),
    )  # fmt: skip


def _cnn3d() -> nn.Module:
    convolution = nn.Conv3d(1, 2, (1, 3, 1), padding="same")
    return nn.Sequential(convolution, nn.BatchNorm3d(2), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(2, 3))


_weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
CASES = [
    Case("relu mlp", lambda: _mlp(nn.ReLU), F.cross_entropy, (4,), "classes", piecewise_linear=True),
    Case("tanh mlp", lambda: _mlp(nn.Tanh), F.cross_entropy, (4,), "classes"),
    Case("leaky mlp, squared error", lambda: _mlp(nn.LeakyReLU), nn.MSELoss(), (4,), "real", piecewise_linear=True),
    Case("gelu mlp, logistic loss", lambda: _mlp(nn.GELU), F.binary_cross_entropy_with_logits, (4,), "binary"),
    Case(
        "logistic loss with pos_weight and weight", lambda: _mlp(nn.Tanh),
        nn.BCEWithLogitsLoss(weight=_weights, pos_weight=_weights * 2), (4,), "binary",
    ),
    Case(
        "class weights and label smoothing", lambda: _mlp(nn.Tanh),
        partial(F.cross_entropy, weight=_weights, label_smoothing=0.1), (4,), "classes",
    ),
    Case("target probabilities", lambda: _mlp(nn.ReLU), nn.CrossEntropyLoss(weight=_weights), (4,), "probabilities"),
    Case("ignored targets", lambda: _mlp(nn.Tanh), partial(F.cross_entropy, ignore_index=1), (4,), "classes"),
    Case("sum reduction", lambda: _mlp(nn.Tanh), nn.CrossEntropyLoss(reduction="sum"), (4,), "classes"),
    Case("custom loss, not convex", lambda: _mlp(nn.Tanh), _soft_plus_margin, (4,), "classes"),
    Case("smooth l1", lambda: _mlp(nn.Tanh), nn.SmoothL1Loss(beta=0.5), (4,), "real"),
    Case("strided, grouped, dilated convolutions", lambda: _initialised(_cnn2d, (2, 6, 6)), F.cross_entropy, (2, 6, 6), "classes",
         piecewise_linear=True),
    Case("convolution 1d, group and layer norm", _mixed_norms, F.cross_entropy, (2, 5), "classes"),
    Case("convolution 3d", _cnn3d, F.cross_entropy, (1, 2, 2, 2), "classes", piecewise_linear=True),
    Case("dense prediction", lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)), F.cross_entropy,
         (1, 2, 3), "classes"),
    Case("residual", Residual, F.cross_entropy, (4,), "classes", piecewise_linear=True),
    Case("tied weights", Tied, F.cross_entropy, (4,), "classes"),
    Case("layer called twice", CalledTwice, F.cross_entropy, (4,), "classes"),
    Case("recurrent with embedding", Recurrent, F.cross_entropy, (4,), "classes", token_inputs=True),
    Case("token classifier", TokenClassifier, F.cross_entropy, (4,), "classes", token_inputs=True),
    Case("transformer layer", Attention, F.cross_entropy, (3, 4), "classes"),
    Case("unused parameters", WithUnused, F.cross_entropy, (4,), "classes", piecewise_linear=True),
    Case("sequence through a linear layer", lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3)),
         F.cross_entropy, (3, 4), "classes", piecewise_linear=True),
]  # fmt: skip
IDS = [case.name for case in CASES]
