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

__all__ = ["LayerRule", "rule_for"]


class LayerRule(ABC):
    """How a module's parameters get their gradients from its input and the derivative in its output."""

    @abstractmethod
    def gradients(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """Return the gradient of every example, by parameter name, ``(batch, *shape)``; forms them (for checks)."""

    @abstractmethod
    def squares(self, x: Tensor, deltas: Tensor, signs: Tensor, *, diagonal: bool) -> dict[str, Tensor]:
        """Return Σ over columns c and examples b of σ_cb g_cb² by parameter name.

        Args:
            x: Input, ``(batch, …)``.
            deltas: Derivatives in the output, ``(columns, batch, …)``.
            signs: σ, ``(columns, batch)``.
            diagonal: Whether to return the squares entry by entry, in the parameter's shape, or their sum, ``()``.
        """


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
    """How a layer's input and output become matrices over positions: x ``(batch, groups, T, I)``, δ ``(…, groups, T, O)``."""

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def derivatives(self, delta: Tensor) -> Tensor: ...

    def weight_shape(self, x: Tensor, delta: Tensor) -> tuple[int, ...]:
        """Return the shape of the weight that the (groups, O, I) squares are viewed in; -1 entries are inferred."""
        return (delta.shape[-3] * delta.shape[-1], x.shape[-1])


@final
class _Positions(_Arrangement):
    def inputs(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 1, -1, x.shape[-1])

    def derivatives(self, delta: Tensor) -> Tensor:
        return delta.reshape(*delta.shape[:2], 1, -1, delta.shape[-1])


@final
class _Patches(_Arrangement):
    """Convolution as a linear layer over the patches that the kernel sees, one group of channels at a time."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        self.module = module

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
        columns, batch, channels = delta.shape[:3]
        return delta.reshape(columns, batch, self.module.groups, channels // self.module.groups, -1).transpose(-1, -2)


@final
class _Matrix(LayerRule):
    """A weight matrix (per group of channels) and a bias."""

    def __init__(self, arrangement: _Arrangement) -> None:
        self.arrangement = arrangement

    def gradients(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        X, D = self.arrangement.inputs(x), self.arrangement.derivatives(delta[None])[0]
        return {"weight": torch.einsum("bgto,bgti->bgoi", D, X).flatten(1), "bias": D.sum(2).flatten(1)}

    def squares(self, x: Tensor, deltas: Tensor, signs: Tensor, *, diagonal: bool) -> dict[str, Tensor]:
        X, D = self.arrangement.inputs(x), self.arrangement.derivatives(deltas)
        bias = torch.einsum("cb,cbgo->go", signs, D.sum(3).square())
        if X.shape[2] == 1:  # one position: the squares factorise
            S = torch.einsum("cb,cbgo->bgo", signs, D.squeeze(3).square())
            weight = torch.einsum("bgo,bgi->goi", S, X.squeeze(2).square())
        elif diagonal or not _gram_is_cheaper(X, D):
            weight = _squares_over_positions(X, D, signs)
        else:
            gram = torch.einsum("bgti,bgsi->bgts", X, X)
            weight = sum(
                (torch.einsum("b,bgts,bgts->", sign, torch.einsum("bgto,bgso->bgts", d, d), gram)
                for sign, d in zip(signs, D, strict=True)), torch.zeros((), dtype=x.dtype, device=x.device)
            )  # fmt: skip
        return {"weight": weight.flatten(), "bias": bias.flatten()} if diagonal else {"weight": weight.sum(), "bias": bias.sum()}


def _gram_is_cheaper(X: Tensor, D: Tensor) -> bool:
    """Compare T²(I + O) with T·I·O multiplications per example, group and column."""
    T, width_in, width_out = X.shape[2], X.shape[3], D.shape[-1]
    return T * (width_in + width_out) < width_in * width_out


def _squares_over_positions(X: Tensor, D: Tensor, signs: Tensor) -> Tensor:
    """Return Σ σ (Σ_t δ_t x_tᵀ)², ``(groups, O, I)``, one column at a time to bound memory."""
    total = torch.zeros(X.shape[1], D.shape[-1], X.shape[3], dtype=X.dtype, device=X.device)
    for sign, d in zip(signs, D, strict=True):
        gradient = torch.einsum("bgto,bgti->bgoi", d, X)
        total += torch.einsum("b,bgoi->goi", sign, gradient.square_())
    return total


@final
class _Affine(LayerRule):
    """Scale and shift after a normalisation: y = γ x̂ + β."""

    def __init__(self, module: nn.Module, *, channels: int) -> None:
        self.module, self.channels = module, channels

    def gradients(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        weight, bias = self._per_example(x, delta[None])
        return {"weight": weight[0].flatten(1), "bias": bias[0].flatten(1)}

    def squares(self, x: Tensor, deltas: Tensor, signs: Tensor, *, diagonal: bool) -> dict[str, Tensor]:
        result = {}
        for name, gradient in zip(("weight", "bias"), self._per_example(x, deltas), strict=True):
            squares = torch.einsum("cb,cbp->p", signs, gradient.flatten(2).square())
            result[name] = squares if diagonal else squares.sum()
        return result

    def _per_example(self, x: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """Return γ's and β's gradient of every column and example, ``(columns, batch, *shape)``."""
        normalised = self._normalised(x)
        return self._reduce(deltas * normalised), self._reduce(deltas)

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

    def _reduce(self, values: Tensor) -> Tensor:
        """Sum over everything but columns, examples and the parameter's own axes."""
        if self.channels > 0:
            return values.flatten(3).sum(3) if values.ndim > 3 else values
        kept = values.shape[self.channels :]
        return values.reshape(*values.shape[:2], -1, *kept).sum(2)
