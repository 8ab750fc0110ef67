"""Example inputs in any form, and a model's outputs on them as float64 tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatminima.objective.session import copied
from flatminima.symmetries.move import unwrapped

__all__ = ["Call", "double_copy", "kept_rng", "num_operations", "outputs", "tensors"]


@dataclass(frozen=True)
class Call:
    """The positional and keyword arguments of one forward call, floating point tensors in float64."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: object, name: str = "example_inputs") -> Call:
        """Read a tensor, a tuple or list of arguments, or a dict of keyword arguments.

        Raises:
            TypeError: If ``inputs`` is none of these.
        """
        if isinstance(inputs, Tensor):
            return cls((_as_double(inputs),), {})
        if isinstance(inputs, Mapping):
            return cls((), {str(k): _as_double(v) for k, v in inputs.items()})
        if isinstance(inputs, list | tuple) and inputs:
            return cls(tuple(_as_double(v) for v in inputs), {})
        raise TypeError(
            f"`{name}` must be a tensor, a tuple of the model's positional inputs or a dict of its keyword inputs. "
            f"Got {type(inputs).__name__}."
        )

    @classmethod
    def of_arguments(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Read positional and keyword arguments."""
        return cls(tuple(_as_double(v) for v in args), {k: _as_double(v) for k, v in kwargs.items()})

    def drawn(self, generator: torch.Generator) -> Call:
        """Return other inputs of the same form: numbers of the same mean and spread; of integers, ones that were there."""
        return Call(tuple(_drawn(v, generator) for v in self.args), {k: _drawn(v, generator) for k, v in self.kwargs.items()})


def _as_double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value.detach()
    if isinstance(value, Mapping):
        return {k: _as_double(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_double(v) for v in value)
    return value


def _drawn(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor) and value.numel():
        if value.dtype == torch.float64 and bool(value.isfinite().all()):
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
            return value.mean() + value.std(correction=0) * noise
        picked = torch.randint(value.numel(), value.shape, generator=generator).to(value.device)
        return value.reshape(-1)[picked]
    if isinstance(value, Mapping):
        return {k: _drawn(v, generator) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_drawn(v, generator) for v in value)
    return value


def double_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model in float64 and eval mode."""
    return copied(unwrapped(model)).double().eval()


def outputs(model: nn.Module, call: Call) -> list[Tensor]:
    """Run ``model`` once without gradients and return every tensor that it gives.

    Raises:
        TypeError: If the model gives no tensor.
    """
    with torch.no_grad():
        found = [t.detach().double() for t in tensors(model(*call.args, **call.kwargs))]
    if not found:
        raise TypeError("`model` must return a tensor, or a tuple or dict of tensors. Got none.")
    return found


def tensors(value: Any) -> list[Tensor]:
    """Return every tensor in a tensor, dict, list or tuple of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    return []


def num_operations(model: nn.Module, call: Call) -> int:
    """Return the number of floating point operations of one forward pass, in products of matrices and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        outputs(model, call)
    return int(counter.get_total_flops())


@contextmanager
def kept_rng(model: nn.Module) -> Iterator[None]:
    """Leave the global random number generators as they were, whatever the model draws."""
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield
