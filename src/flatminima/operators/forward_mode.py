"""Derivatives along directions, in forward mode, and for several directions at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["along", "for_all"]

_AT_ONCE = 16

_Point = Mapping[str, Tensor]


def along(function: Callable[[_Point], Any], point: _Point, direction: _Point) -> Any:
    """Return the derivative of ``function`` at ``point`` along ``direction``, in the form of what it returns."""
    with _quiet():
        return torch.func.jvp(function, (dict(point),), (dict(direction),))[1]


def for_all(function: Callable[[Any], Any], stacks: Any) -> Any:
    """Return what ``function`` gives for every entry of stacks ``(k, …)``, 16 of them in one vectorised pass."""
    with _quiet():
        return torch.func.vmap(function, chunk_size=_AT_ONCE)(stacks)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch about itself: its use of ``torch.jit.script`` at the first dual number, and batching rules that it lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield
