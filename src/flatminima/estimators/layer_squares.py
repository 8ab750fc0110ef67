r"""Squared per-example gradients of a layer from what goes in and what comes back, without forming the gradients.

With x the layer's input and δ the derivative in its output, the gradient of one example is Σ_t δ_t x_tᵀ over its positions t
(one for a plain linear layer, pixels for a convolution, tokens for a sequence). Needed are its squares, entry by entry or
summed: for one position ‖δxᵀ‖² = ‖δ‖²‖x‖², and for several the T×T Gram matrices give the sum when that is cheaper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LayerRule", "Squares", "rule_for"]


class LayerRule(ABC):
    """How a module's parameters get their gradients from its input and the derivative in its output."""

    @abstractmethod
    def fits(self, x: Tensor) -> bool:
        """Tell whether an input has the axes that the rule counts on, the first for the examples."""

    @abstractmethod
    def squares(self, x: Tensor, *, diagonal: bool) -> Squares:
        """Return an empty sum of squares for a batch with this input, ``(batch, …)``.

        Args:
            x: The layer's input.
            diagonal: Whether squares are wanted entry by entry, in the parameter's shape, or as their sum, ``()``.
        """


class Squares(ABC):
    """Σ over columns c and examples b of σ_cb g_cb² for one layer's parameters, added up column by column."""

    @abstractmethod
    def add(self, delta: Tensor, signs: Tensor) -> None:
        """Add a column: the derivative in the layer's output, ``(batch, …)``, and σ, ``(batch,)``."""

    @abstractmethod
    def result(self) -> dict[str, Tensor]:
        """Return the squares by parameter name, flat or summed."""

    @abstractmethod
    def gradient(self, delta: Tensor) -> dict[str, Tensor]:
        """Return Σ_b of the gradients for one derivative in the layer's output, by parameter name, flat."""


def rule_for(module: nn.Module, *, training: bool) -> LayerRule | None:
    """Return the rule of a module, or None for a kind without one."""
    kind = type(module)
    if kind is nn.Linear:
        return _Matrix(_Positions())
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        return _Matrix(_Patches(module))
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and not training:
        assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        return _Affine(module, channels=1) if module.running_mean is not None else None
    if kind is nn.GroupNorm:
        return _Affine(module, channels=1)
    if kind is nn.LayerNorm:
        assert isinstance(module, nn.LayerNorm)
        return _Affine(module, channels=-len(module.normalized_shape))
    return None


class _Arrangement(ABC):
    """How a layer's input and output become matrices over positions: x ``(batch, groups, T, I)``, δ ``(batch, groups, T, O)``."""

    @abstractmethod
    def fits(self, x: Tensor) -> bool: ...

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def derivatives(self, delta: Tensor) -> Tensor: ...


@final
class _Positions(_Arrangement):
    def fits(self, x: Tensor) -> bool:
        return x.ndim >= 2

    def inputs(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 1, -1, x.shape[-1])

    def derivatives(self, delta: Tensor) -> Tensor:
        return delta.reshape(delta.shape[0], 1, -1, delta.shape[-1])


@final
class _Patches(_Arrangement):
    """Convolution as a linear layer over the patches that the kernel sees, one group of channels at a time."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        self.module = module

    def fits(self, x: Tensor) -> bool:
        return x.ndim == 2 + len(self.module.kernel_size)

    def inputs(self, x: Tensor) -> Tensor:
        module, space = self.module, len(self.module.kernel_size)
        pad = list(module._reversed_padding_repeated_twice)
        if any(pad):
            x = functional.pad(x, pad, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
        for axis, (kernel, stride, dilation) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
            x = x.unfold(2 + axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
        # (batch, channels, *positions, *kernel) -> (batch, groups, T, channels/groups * kernel)
        batch, channels = x.shape[:2]
        x = x.reshape(batch, module.groups, channels // module.groups, *x.shape[2:])
        positions, kernel_axes = range(3, 3 + space), range(3 + space, 3 + 2 * space)
        x = x.permute(0, 1, *positions, 2, *kernel_axes)
        return x.reshape(batch, module.groups, x.shape[2 : 2 + space].numel(), -1)

    def derivatives(self, delta: Tensor) -> Tensor:
        batch, channels = delta.shape[:2]
        return delta.reshape(batch, self.module.groups, channels // self.module.groups, -1).transpose(-1, -2)


@final
class _Matrix(LayerRule):
    """A weight matrix (per group of channels) and a bias."""

    def __init__(self, arrangement: _Arrangement) -> None:
        self.arrangement = arrangement

    def fits(self, x: Tensor) -> bool:
        return self.arrangement.fits(x)

    def squares(self, x: Tensor, *, diagonal: bool) -> Squares:
        X = self.arrangement.inputs(x)
        if X.shape[2] == 1:
            return _OnePosition(self.arrangement, X.squeeze(2), diagonal)
        return _ManyPositions(self.arrangement, X, diagonal)


@final
class _OnePosition(Squares):
    """The squares factorise, (δ xᵀ)² = δ² (x²)ᵀ: columns add up in δ², and one product ends the batch."""

    def __init__(self, arrangement: _Arrangement, X: Tensor, diagonal: bool) -> None:
        self.arrangement, self.X, self.diagonal = arrangement, X, diagonal
        self.S: Tensor | None = None

    def add(self, delta: Tensor, signs: Tensor) -> None:
        D = self.arrangement.derivatives(delta).squeeze(2)
        part = signs[:, None, None] * D.square()
        self.S = part if self.S is None else self.S.add_(part)

    def result(self) -> dict[str, Tensor]:
        assert self.S is not None
        if self.diagonal:
            weight = torch.einsum("bgo,bgi->goi", self.S, self.X.square())
            return {"weight": weight.flatten(), "bias": self.S.sum(0).flatten()}
        return {"weight": (self.S.sum(2) * self.X.square().sum(2)).sum(), "bias": self.S.sum()}

    def gradient(self, delta: Tensor) -> dict[str, Tensor]:
        D = self.arrangement.derivatives(delta).squeeze(2)
        return {"weight": torch.einsum("bgo,bgi->goi", D, self.X).flatten(), "bias": D.sum(0).flatten()}


@final
class _ManyPositions(Squares):
    """Gradients Σ_t δ_t x_tᵀ are formed and squared, or their sums of squares come from Gram matrices."""

    def __init__(self, arrangement: _Arrangement, X: Tensor, diagonal: bool) -> None:
        self.arrangement, self.X, self.diagonal = arrangement, X, diagonal
        self.gram: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, delta: Tensor, signs: Tensor) -> None:
        D = self.arrangement.derivatives(delta)
        weight, bias = self._weight(D, signs), torch.einsum("b,bgo->go", signs, D.sum(2).square())
        self.weight = weight if self.weight is None else self.weight.add_(weight)
        self.bias = bias if self.bias is None else self.bias.add_(bias)

    def _weight(self, D: Tensor, signs: Tensor) -> Tensor:
        if self.diagonal or not _gram_is_cheaper(self.X, D):
            squares = torch.einsum("bgto,bgti->bgoi", D, self.X).square_()
            return torch.einsum("b,bgoi->goi" if self.diagonal else "b,bgoi->", signs, squares)
        if self.gram is None:
            self.gram = torch.einsum("bgti,bgsi->bgts", self.X, self.X)
        return torch.einsum("b,bgts,bgts->", signs, torch.einsum("bgto,bgso->bgts", D, D), self.gram)

    def result(self) -> dict[str, Tensor]:
        assert self.weight is not None
        assert self.bias is not None
        if self.diagonal:
            return {"weight": self.weight.flatten(), "bias": self.bias.flatten()}
        return {"weight": self.weight, "bias": self.bias.sum()}

    def gradient(self, delta: Tensor) -> dict[str, Tensor]:
        D = self.arrangement.derivatives(delta)
        return {"weight": torch.einsum("bgto,bgti->goi", D, self.X).flatten(), "bias": D.sum((0, 2)).flatten()}


def _gram_is_cheaper(X: Tensor, D: Tensor) -> bool:
    """Compare T²(I + O) with T·I·O multiplications per example, group and column."""
    T, width_in, width_out = X.shape[2], X.shape[3], D.shape[-1]
    return T * (width_in + width_out) < width_in * width_out


@final
class _Affine(LayerRule):
    """Scale and shift after a normalisation: y = γ x̂ + β."""

    def __init__(self, module: nn.Module, *, channels: int) -> None:
        self.module, self.channels = module, channels

    def fits(self, x: Tensor) -> bool:
        return x.ndim >= 2 if self.channels > 0 else x.ndim > -self.channels

    def squares(self, x: Tensor, *, diagonal: bool) -> Squares:
        return _AffineSquares(self, self._normalised(x), diagonal)

    def reduce(self, values: Tensor) -> Tensor:
        """Sum over everything but examples and the parameter's own axes."""
        if self.channels > 0:
            return values.flatten(2).sum(2) if values.ndim > 2 else values
        kept = values.shape[self.channels :]
        return values.reshape(values.shape[0], -1, *kept).sum(1)

    def _normalised(self, x: Tensor) -> Tensor:
        match self.module:
            case nn.LayerNorm() as norm:
                return functional.layer_norm(x, norm.normalized_shape, eps=norm.eps)
            case nn.GroupNorm() as group:
                return functional.group_norm(x, group.num_groups, eps=group.eps)
            case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d() as batch:
                assert batch.running_mean is not None
                assert batch.running_var is not None
                mean, variance = batch.running_mean.to(x.dtype), batch.running_var.to(x.dtype)
                return functional.batch_norm(x, mean, variance, eps=batch.eps)
            case _:
                raise AssertionError("rule_for gives no other module")


@final
class _AffineSquares(Squares):
    def __init__(self, rule: _Affine, normalised: Tensor, diagonal: bool) -> None:
        self.rule, self.normalised, self.diagonal = rule, normalised, diagonal
        self.totals: dict[str, Tensor] = {}

    def add(self, delta: Tensor, signs: Tensor) -> None:
        for name, values in (("weight", delta * self.normalised), ("bias", delta)):
            squares = torch.einsum("b,bp->p", signs, self.rule.reduce(values).flatten(1).square())
            part = squares if self.diagonal else squares.sum()
            self.totals[name] = self.totals[name] + part if name in self.totals else part

    def result(self) -> dict[str, Tensor]:
        return self.totals

    def gradient(self, delta: Tensor) -> dict[str, Tensor]:
        products = {"weight": delta * self.normalised, "bias": delta}
        return {name: self.rule.reduce(values).sum(0).flatten() for name, values in products.items()}
