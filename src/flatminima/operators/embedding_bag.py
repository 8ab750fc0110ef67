"""Bags of embeddings by operations that torch can differentiate twice.

torch's own ``embedding_bag`` has neither a second derivative nor one in forward mode. Looking up rows and adding them has both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatminima._errors import NotSupported
from flatminima.objective import Objective

__all__ = ["twice_differentiable"]

Result = TypeVar("Result")

_KEY = "spelt-out embedding bags"


def twice_differentiable(objective: Objective, run: Callable[[], Result]) -> Result:
    """Return ``run()``; with bags spelt out where torch has no second derivative of them.

    What was found is remembered for the objective's architecture, since every call that goes through Python is slower.
    """
    if not objective.architecture.get(_KEY):
        try:
            return run()
        except (RuntimeError, NotSupported) as error:
            if "embedding_bag" not in str(error):
                raise
    with _spelt_out():
        result = run()
    objective.architecture[_KEY] = True
    return result


@contextmanager
def _spelt_out() -> Iterator[None]:
    with _Bags():
        yield


class _Bags(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.embedding_bag:
            return _embedding_bag(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _embedding_bag(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return what torch.nn.functional.embedding_bag returns, with its arguments."""
    if max_norm is not None or scale_grad_by_freq or input.dtype.is_floating_point:  # changes weights, or is no derivative
        return functional.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    if input.ndim == 2:
        num_bags = input.shape[0]
        bag = torch.arange(num_bags, device=input.device).repeat_interleave(input.shape[1])
    else:
        assert offsets is not None
        starts = offsets[:-1] if include_last_offset else offsets
        num_bags = starts.numel()
        bag = torch.searchsorted(starts.contiguous(), torch.arange(input.numel(), device=input.device), right=True) - 1
    index, factors = input.reshape(-1), None if per_sample_weights is None else per_sample_weights.reshape(-1)
    if padding_idx is not None:
        kept = index != padding_idx % weight.shape[0]
        index, bag = index[kept], bag[kept]
        factors = None if factors is None else factors[kept]
    vectors = weight[index.long()] if factors is None else weight[index.long()] * factors[:, None]
    if mode == "max":
        return _largest(vectors, bag, num_bags)
    total = vectors.new_zeros(num_bags, weight.shape[1]).index_add(0, bag, vectors)
    if mode == "sum":
        return total
    return total / torch.bincount(bag, minlength=num_bags).clamp_min(1)[:, None]


def _largest(vectors: Tensor, bag: Tensor, num_bags: int) -> Tensor:
    """Return each bag's largest entries, and zeros for an empty bag."""
    rows = [vectors[bag == b] for b in range(num_bags)]
    return torch.stack([own.max(0).values if len(own) else vectors.new_zeros(vectors.shape[1]) for own in rows])
