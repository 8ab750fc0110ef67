"""The networks and the data that the curvature benchmark runs on, and their products in float64 as the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["NETWORKS", "Problem", "digits", "mlp", "problem"]

_ROOT = Path(__file__).resolve().parents[1]
_MNIST = ("shared/data/mnist.npz", "../shared/data/mnist.npz")
_SEED = 0


@dataclass(frozen=True)
class Problem:
    """A network, its data, and what a mean cross-entropy over them needs.

    Attributes:
        name: Name in the table.
        model: In eval mode.
        inputs: First axis: examples.
        targets: Class indices; of shape (B,), or (B, T) where the logits are (B, V, T).
        note: What the data is.
        is_attention: Whether second derivatives need the math kernel of attention. flatminima takes it by itself.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    note: str
    is_attention: bool = False

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def own(self) -> Problem:
        """Return the same problem with its own copy of the model, since some peers write to ``.grad``."""
        return Problem(self.name, copy.deepcopy(self.model), self.inputs, self.targets, self.note, self.is_attention)

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """Switch attention to the kernel that has second derivatives."""
        if not self.is_attention:
            yield
            return
        with sdpa_kernel(SDPBackend.MATH):
            yield

    def vectors(self, count: int) -> Tensor:
        """Return fixed random vectors, shape ``(n, count)``."""
        return torch.randn(self.size, count, generator=torch.Generator().manual_seed(1))

    def gradient(self) -> None:
        """Make one plain gradient over the data: the unit of every time."""
        loss = functional.cross_entropy(self.model(self.inputs), self.targets)
        torch.autograd.grad(loss, list(self.model.parameters()))

    # --- the reference ----------------------------------------------------------------------------------------------------

    def hessian_reference(self, V: Tensor) -> Tensor:
        """Return H V in float64 by two reverse passes, shape ``(n, k)``."""
        with self.differentiable():
            model, params, x = self._double()
            loss = functional.cross_entropy(model(x), self.targets)
            gradients = torch.autograd.grad(loss, params, create_graph=True)
            return _columns(V, params, lambda parts: torch.autograd.grad(gradients, params, parts, retain_graph=True))

    def gauss_newton_reference(self, V: Tensor) -> Tensor:
        """Return G V = Jᵀ ∇²ℓ J V in float64; J v is the derivative of Jᵀ u in u. Shape ``(n, k)``."""
        with self.differentiable():
            model, params, x = self._double()
            outputs = model(x)
            u = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(outputs, params, u, create_graph=True)
            leaf = outputs.detach().requires_grad_()
            slope = torch.autograd.grad(functional.cross_entropy(leaf, self.targets), leaf, create_graph=True)[0]

            def product(parts: list[Tensor]) -> tuple[Tensor, ...]:
                pushed = torch.autograd.grad(pulled, u, parts, retain_graph=True)[0]
                middle = torch.autograd.grad(slope, leaf, pushed, retain_graph=True)[0]
                return torch.autograd.grad(outputs, params, middle, retain_graph=True)

            return _columns(V, params, product)

    def _double(self) -> tuple[nn.Module, list[Tensor], Tensor]:
        model = copy.deepcopy(self.model).double()
        x = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        return model, list(model.parameters()), x


def _columns(V: Tensor, params: list[Tensor], product: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> Tensor:
    columns = []
    for v in V.double().T:
        parts, start = [], 0
        for p in params:
            parts.append(v[start : start + p.numel()].view_as(p))
            start += p.numel()
        columns.append(torch.cat([part.reshape(-1) for part in product(parts)]))
    return torch.stack(columns, dim=1)


# --- networks -------------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3, 1)
        self.shortcut = nn.Identity() if inputs == outputs else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


class _Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class _Layer(nn.Module):
    """Transformer layer, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class _GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*[_Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits as (B, V, T), the order in which cross-entropy takes them."""
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits: Tensor = self.head(self.norm(self.layers(y)))
        return logits.transpose(1, 2)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def _lenet5() -> Problem:
    torch.manual_seed(_SEED)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    inputs, targets, note = digits(1024)
    return Problem("LeNet-5", model, inputs, targets, note)


def _resnet8() -> Problem:
    torch.manual_seed(_SEED)
    stem = nn.Sequential(_convolution(3, 16, 3, 1), nn.ReLU())
    body = nn.Sequential(_Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2))
    model = nn.Sequential(stem, body, _Average(), nn.Linear(64, 10))
    with torch.no_grad():
        for _ in range(20):  # running statistics near those of the data
            model(torch.randn(64, 3, 32, 32))
    inputs, targets = torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,))
    return Problem("ResNet-8", model.eval(), inputs, targets, "256 random images 3×32×32")


def mlp(width: int = 512, num_examples: int = 1024) -> Problem:
    """Return the perceptron 784-width-width-10."""
    torch.manual_seed(_SEED)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    return Problem("MLP", model, *digits(num_examples))


def _gpt() -> Problem:
    torch.manual_seed(_SEED)
    model = _GPT(vocabulary=256, width=128, heads=4, layers=2, length=64)
    inputs, targets = torch.randint(0, 256, (16, 64)), torch.randint(0, 256, (16, 64))
    return Problem("GPT", model, inputs, targets, "16 × 64 random tokens of 256", is_attention=True)


def digits(count: int) -> tuple[Tensor, Tensor, str]:
    """Return images (count, 1, 28, 28) of mean 0 and deviation 1, classes, and what they are."""
    for place in _MNIST:
        if (_ROOT / place).exists():
            with np.load(_ROOT / place) as arrays:
                images, labels = (torch.from_numpy(arrays[f"train_{what}"][:count]) for what in ("images", "labels"))
            x = images.float()[:, None] / 255
            return (x - 0.1307) / 0.3081, labels.long(), f"{count} MNIST images"
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(count, 1, 28, 28, generator=generator)
    return x, torch.randint(0, 10, (count,), generator=generator), f"{count} random images (no shared/data/mnist.npz)"


NETWORKS: dict[str, Callable[[], Problem]] = {"lenet": _lenet5, "resnet8": _resnet8, "mlp": mlp, "gpt": _gpt}


def problem(name: str) -> Problem:
    """Return the problem of a name in ``NETWORKS``."""
    return NETWORKS[name]()
