"""Networks of the kinds that the symmetries cover, small, in float64, with nothing zero and nothing equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima.symmetries import Rescaling, find_symmetries


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return the model in float64 and eval mode with generic parameters and running statistics."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.3)
    return model


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Return a chain of linear layers."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b, bias=bias)] + ([activation()] if i < len(widths) - 2 else [])
    torch.manual_seed(seed)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    model = randomised(nn.Sequential(*layers), seed)
    assert isinstance(model, nn.Sequential)
    return model


def cnn() -> nn.Module:
    """conv-BN-ReLU-pool, conv without bias-BN-LeakyReLU-pool, flatten over positions, dropout, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(24, 5),
        nn.PReLU(5),
        nn.Linear(5, 3),
    )


def separable_cnn() -> nn.Module:
    """A depthwise, a pointwise and a grouped convolution in two dimensions, average pooling between."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.PReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 6, 3, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


class Functional(nn.Module):
    """Everything as functional calls: F.linear, x @ W + b, relu, clamp, view, in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 4))
        self.a0 = nn.Parameter(torch.randn(5))
        self.w = nn.Parameter(torch.randn(5, 6))
        self.b = nn.Parameter(torch.randn(6))
        self.v = nn.Parameter(torch.randn(6, 3))
        self.v0 = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.relu_(F.linear(x, self.a, self.a0)), training=self.training)
        h = (h @ self.w + self.b).clamp(min=0).view(x.shape[0], 2, 3).flatten(1)
        return torch.addmm(self.v0, 0.5 * h, self.v)


class Conv1d3d(nn.Module):
    """A one-dimensional and a three-dimensional branch, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten())
        self.cube = nn.Sequential(nn.Conv3d(1, 2, 2), nn.LeakyReLU(), nn.AdaptiveMaxPool3d(1), nn.Flatten())
        self.head = nn.Linear(3 * 3 + 2, 3)

    def forward(self, line: Tensor, cube: Tensor) -> Tensor:
        return self.head(torch.cat([self.line(line), self.cube(cube)], dim=1))


class Residual(nn.Module):
    """A stream of 4 units with two branches of 5 and 3: the stream's units share one scale wherever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(3, 4), nn.Linear(4, 3)
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)
        self.up2, self.down2 = nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.inlet(x))
        h = h + self.down(F.relu(self.up(h)))
        h = F.relu(h + self.down2(F.relu(self.up2(h))))
        return self.outlet(h)


class Siamese(nn.Module):
    """One layer read twice in the same role, so its units keep one scale for both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 5), nn.Linear(10, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.encoder(a)), F.relu(self.encoder(b))], dim=1))


def _randn(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


#: Name -> (network, inputs, dimensions of layer, node and norm-scale symmetry).
NETWORKS: dict[str, tuple[Callable[[], nn.Module], object, dict[str, int]]] = {
    "mlp": (lambda: mlp(4, 5, 6, 3), _randn(9, 4), {"layer": 2, "node": 11}),
    "mlp without biases": (lambda: mlp(4, 5, 6, 3, bias=False), _randn(9, 4), {"layer": 2, "node": 11}),
    "leaky mlp": (lambda: mlp(4, 5, 3, activation=lambda: nn.LeakyReLU(0.2)), _randn(9, 4), {"layer": 1, "node": 5}),
    "prelu mlp": (lambda: mlp(4, 5, 5, 3, activation=lambda: nn.PReLU(5)), _randn(9, 4), {"layer": 2, "node": 10}),
    "shared prelu": (lambda: mlp(4, 5, 6, 3, activation=nn.PReLU), _randn(9, 4), {"layer": 2, "node": 11}),
    "linear net": (lambda: mlp(4, 5, 3, activation=nn.Identity), _randn(9, 4), {"layer": 1, "node": 5}),
    "cnn": (cnn, _randn(5, 2, 8, 8), {"layer": 3, "node": 15, "norm-scale": 10}),
    "separable cnn": (separable_cnn, _randn(5, 2, 8, 8), {"layer": 3, "node": 18}),
    "functional": (Functional, _randn(9, 4), {"layer": 2, "node": 11}),
    "conv1d and conv3d": (
        Conv1d3d,
        {"line": _randn(4, 2, 8), "cube": _randn(4, 1, 4, 4, 4)},
        {"layer": 2, "node": 5, "norm-scale": 3},
    ),
    "residual": (Residual, _randn(9, 3), {"layer": 3, "node": 12}),
    "siamese": (Siamese, (_randn(9, 4), _randn(9, 4, seed=8)), {"layer": 1, "node": 5}),
}


def build(name: str) -> tuple[nn.Module, object]:
    """Return the network and its inputs."""
    make, inputs, _ = NETWORKS[name]
    torch.manual_seed(0)
    return randomised(make()), inputs


def rescaling(model: nn.Module, inputs: object, kind: str) -> Rescaling:
    """Return the model's rescaling of one kind."""
    (found,) = find_symmetries(model, inputs).of_kind(kind)
    assert isinstance(found, Rescaling)
    return found


def vector(model: nn.Module) -> Tensor:
    """Return all parameters and floating point buffers as one vector."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])
