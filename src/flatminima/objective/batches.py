"""Batches in the forms that people have them, and the data as something that can be passed over again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Batches", "batch_size", "describe", "inputs_and_targets", "map_tensors", "masked", "rows"]

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a nest of tuples, lists and mappings; other leaves stay."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a nest, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, keep)
    return found


def batch_size(batch: Any) -> int:
    """Return the number of examples: the length of the first tensor that has one.

    Raises:
        ValueError: If the batch holds no tensor with a first dimension.
    """
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ValueError(f"A batch must hold a tensor whose first dimension counts the examples. Got {describe(batch)}.")


def rows(batch: Any, start: int, stop: int) -> Any:
    """Return the examples ``start`` to ``stop`` of a batch, as views."""
    size = batch_size(batch)
    return map_tensors(batch, lambda t: t[start:stop] if t.ndim and t.shape[0] == size else t)


def inputs_and_targets(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Split a batch into the model's positional arguments, its keyword arguments, and the targets.

    ``(x, y)``, ``(x1, x2, y)`` and ``({"name": x}, y)`` end with the targets; a mapping has them under "labels", "label",
    "targets", "target" or "y" and gives the rest by keyword.

    Raises:
        ValueError: If the batch has none of these forms.
    """
    if isinstance(batch, Mapping):
        for key in _TARGET_KEYS:
            if key in batch:
                return (), {k: v for k, v in batch.items() if k != key}, batch[key]
    elif isinstance(batch, tuple | list) and len(batch) >= 2:
        *inputs, targets = batch
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return (), dict(inputs[0]), targets
        return tuple(inputs), {}, targets
    raise ValueError(
        "A batch must be (x, y), (x1, x2, y), (inputs by name, y) or a mapping with its targets under "
        f"{', '.join(_TARGET_KEYS)}. Got {describe(batch)}. For any other form give a loss whose first parameter is "
        "called model: def loss(model, batch)."
    )


def describe(batch: Any) -> str:
    """Return a short description of a batch's form and shapes, for messages."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(describe(v) for v in batch) + ")"
    return type(batch).__name__


class Batches:
    """Data that can be passed over any number of times: a DataLoader, a list of batches, or one batch.

    Args:
        data: See above. A tuple or mapping of tensors is one batch; a list is a list of batches.
        micro_batch_size: Split every batch into pieces of at most this many examples.

    Raises:
        TypeError: If the data can be passed over only once (a generator), or is a data set of single examples.
    """

    def __init__(self, data: Any, micro_batch_size: int | None = None) -> None:
        if isinstance(data, Tensor | Mapping) or (isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data)):
            data = [data]
        elif isinstance(data, Dataset):
            raise TypeError(
                f"`data` must give batches. Got {type(data).__name__}, which gives single examples. "
                "Wrap it: torch.utils.data.DataLoader(dataset, batch_size=256)."
            )
        elif not isinstance(data, Iterable):
            raise TypeError(f"`data` must be a DataLoader, a list of batches or one batch. Got {type(data).__name__}.")
        elif isinstance(data, Iterator):
            raise TypeError(
                f"`data` must allow more than one pass. Got a {type(data).__name__}, which is empty after the first. "
                "Pass list(data) if it fits in memory."
            )
        self.data = cast(Iterable[Any], data)
        self.micro_batch_size = micro_batch_size

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            size = batch_size(batch)
            step = min(self.micro_batch_size or size, size) or 1
            if step >= size:
                yield batch
            else:
                yield from (rows(batch, start, start + step) for start in range(0, size, step))

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of a DataLoader and its samplers, which a pass over the data advances."""
        sampler = getattr(self.data, "sampler", None)
        batch_sampler = getattr(self.data, "batch_sampler", None)
        owners = (self.data, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)}
        return list(found.values())

    def subset(self, num_examples: int, generator: torch.Generator | None) -> Batches:
        """Return the first ``num_examples`` examples, or with a generator a random choice of them, in the data's order."""
        if generator is None:
            return Batches(_first(self, num_examples), self.micro_batch_size)
        sizes = [batch_size(batch) for batch in self]
        chosen = torch.zeros(sum(sizes), dtype=torch.bool)
        chosen[torch.randperm(sum(sizes), generator=generator, device=generator.device)[:num_examples].cpu()] = True
        kept, start = [], 0
        for batch, size in zip(self, sizes, strict=True):
            mask = chosen[start : start + size]
            start += size
            if mask.any():
                kept.append(masked(batch, mask))
        return Batches(kept, self.micro_batch_size)


def _first(batches: Iterable[Any], num_examples: int) -> Sequence[Any]:
    kept, left = [], num_examples
    for batch in batches:
        size = min(batch_size(batch), left)
        kept.append(rows(batch, 0, size))
        left -= size
        if left == 0:
            break
    return kept


def masked(batch: Any, mask: Tensor) -> Any:
    """Return the examples of a batch where the mask ``(batch size,)`` is True."""
    size = batch_size(batch)
    return map_tensors(batch, lambda t: t[mask.to(t.device)] if t.ndim and t.shape[0] == size else t)
