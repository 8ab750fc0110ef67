"""Argument checks with one form of message.

``argument must be <rule> (<why>). Got <value or shape>. <What to do>.``
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from flatminima._suggest import nearest

__all__ = ["check_at_least", "check_generator", "check_one_of", "check_positive", "check_shape"]


def check_at_least(name: str, value: int, minimum: int, why: str = "") -> int:
    """Return ``value`` if it is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer. Got {value!r}.")
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}{_because(why)}. Got {value}.")
    return value


def check_positive(name: str, value: float, why: str = "", *, allow_zero: bool = False) -> float:
    """Return ``value`` as a float if it is finite and positive (or zero, where allowed)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a number. Got {value!r}.")
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        rule = "a finite number of at least 0" if allow_zero else "a finite number above 0"
        raise ValueError(f"`{name}` must be {rule}{_because(why)}. Got {value}.")
    return float(value)


def check_one_of(name: str, value: str, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; otherwise name the nearest one."""
    options = list(allowed)
    if value not in options:
        raise ValueError(f"`{name}` must be one of {', '.join(options)}. Got {value!r}.{nearest(value, options)}")
    return value


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], why: str = "") -> torch.Tensor:
    """Return ``tensor`` if it has exactly this shape."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor of shape {shape}. Got {type(tensor).__name__}.")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"`{name}` must have shape {shape}{_because(why)}. Got {tuple(tensor.shape)}.")
    return tensor


def check_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return ``generator`` if it is a torch.Generator or None (torch's global RNG)."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"`generator` must be a torch.Generator or None. Got {generator!r}. "
            "For a seed write torch.Generator().manual_seed(seed)."
        )
    return generator


def _because(why: str) -> str:
    return f" ({why})" if why else ""
