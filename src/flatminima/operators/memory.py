"""predicted_memory: how much memory a product will take, before it is made."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatminima._checks import check_at_least
from flatminima._errors import NotSupported
from flatminima.objective import Objective
from flatminima.objective.batches import batch_size
from flatminima.operators.base import LinearOperator
from flatminima.operators.curvature import Curvature
from flatminima.operators.empirical_fisher import EmpiricalFisher
from flatminima.operators.fisher import Fisher
from flatminima.operators.free_memory import free_bytes, gib
from flatminima.operators.gauss_newton import GaussNewton
from flatminima.operators.hessian import Hessian

__all__ = ["MemoryForecast", "predicted_memory"]


@final
@dataclass(frozen=True)
class MemoryForecast:
    """The most memory that a product takes beside what is there already: the model, the data, and the vectors it is given.

    Attributes:
        parameters: Bytes that do not grow with the batch: copies of the parameters, gradients, the result of one column.
        columns: Bytes of the further columns.
        activations: Bytes that grow with the examples that go through at once: what the graphs keep, the outputs and what is made
            of them.
        largest_tensor: Bytes of the largest single tensor, which is part of the above.
        batch_size: Most examples that go through at once: the largest batch, or what of it is split off to save memory.
        num_columns: Number k of columns.
        free: Bytes that were free when this was predicted; None where that is not known.
    """

    parameters: int
    columns: int
    activations: int
    largest_tensor: int
    batch_size: int
    num_columns: int
    free: int | None

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.parameters + self.columns + self.activations

    @property
    def fits(self) -> bool:
        """Whether so much is free; true where that is not known."""
        return self.free is None or self.total <= self.free

    def __str__(self) -> str:
        more = f", {gib(self.columns)} for {self.num_columns} columns" if self.num_columns > 1 else ""
        free = "" if self.free is None else f"; {gib(self.free)} is free"
        return (
            f"A product takes {gib(self.total)} at its peak: {gib(self.parameters)} for the parameters{more}, "
            f"{gib(self.activations)} for {self.batch_size} examples at once; "
            f"the largest tensor has {gib(self.largest_tensor)}{free}."
        )

    def to_dict(self) -> dict[str, int | bool | None]:
        """Return the numbers, ready for JSON."""
        return {**vars(self), "total": self.total, "fits": self.fits}


def predicted_memory(operator: LinearOperator, *, columns: int = 1) -> MemoryForecast:
    """Predict the peak memory of a product with a matrix ``(n, k)``, from products with one and two examples.

    The storages that are alive are counted while the products are made; the part that grows with the examples is scaled to the
    most of them that go through at once, and the part that grows with the columns to ``columns``. It is that of a single product:
    in a run of products graphs are kept as well, to the limit that ``keeping_graphs`` is given. Examples of other sizes than the
    first ones, and scratch memory inside torch's kernels, are not seen. Warns where the peak is larger than the memory that is
    free.

    Cost: two products, with one and two examples; two more with one example for several columns.

    Args:
        operator: A matrix that belongs to an objective, or a sum, multiple, block, … of such.
        columns: Number k of columns.

    Raises:
        NotSupported: If the operator belongs to no objective, or the objective is a closure, whose data are not known.

    Example:
        >>> model = torch.nn.Linear(100, 2)
        >>> objective = Objective(model, torch.nn.functional.cross_entropy, (torch.ones(50, 100), torch.zeros(50, dtype=int)))
        >>> predicted_memory(Hessian(objective)).batch_size
        50
    """
    check_at_least("columns", columns, 1)
    curvatures = list(_curvatures(operator))
    if not curvatures:
        raise NotSupported("Memory is predicted for the matrices of an objective. Got an operator without one.")
    forecasts = [_forecast(_rebuilder(A), A.objective, A.device, columns) for A in curvatures]
    worst = max(forecasts, key=lambda forecast: forecast.total)
    if not worst.fits:
        warnings.warn(
            f"{worst} Use smaller batches, or Objective(…, micro_batch_size=…).",
            RuntimeWarning,
            stacklevel=2,
        )
    return worst


def _curvatures(operator: LinearOperator) -> Iterator[Curvature]:
    if isinstance(operator, Curvature):
        yield operator
        return
    for value in vars(operator).values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, LinearOperator):
                yield from _curvatures(part)


def _rebuilder(A: Curvature) -> Callable[[Objective], LinearOperator]:
    """Return what makes the same matrix of another objective. A matrix of another kind is taken for a Gauss-Newton matrix."""

    def rebuild(objective: Objective) -> LinearOperator:
        whole: Curvature
        if isinstance(A, Hessian):
            whole = Hessian(objective)
        elif isinstance(A, Fisher):
            generator = torch.Generator(A.device).manual_seed(0)
            whole = Fisher(objective, num_samples=A.num_samples, generator=generator)
        elif isinstance(A, EmpiricalFisher):
            whole = EmpiricalFisher(objective, per=A.per)
        else:
            whole = GaussNewton(objective)
        return whole if A.space.names == objective.space.names else whole.block(list(A.space.names))

    return rebuild


def _forecast(
    rebuild: Callable[[Objective], LinearOperator], objective: Objective, device: torch.device, columns: int
) -> MemoryForecast:
    batches = objective.model_evaluator("The size of its batches").batches
    size = min(max(batch_size(batch) for batch in batches), _most_at_once(rebuild, objective))
    few = min(2 if objective.mode == "train" else 1, size)  # batch statistics need more than one example
    more = min(2 * few, size)
    first = _first(objective, few)
    little, largest = _peak(rebuild, first, 1)
    much, larger = _peak(rebuild, _first(objective, more), 1) if more > few else (little, largest)
    per_column = 0.0
    if columns > 1:  # without the checks that come with the very first product
        one, three = (_peak(rebuild, _first(first, few), k)[0] for k in (1, 3))
        per_column = max(three - one, 0) / 2
    per_example = max(much - little, 0) / max(more - few, 1)
    return MemoryForecast(
        parameters=max(round(little - few * per_example), 0),
        columns=round((columns - 1) * per_column),
        activations=round(size * per_example),
        largest_tensor=round(larger if larger == largest else max(larger, size * larger / more)),
        batch_size=size,
        num_columns=columns,
        free=free_bytes(device),
    )


def _most_at_once(rebuild: Callable[[Objective], LinearOperator], objective: Objective) -> int:
    """Return how many examples of a batch the products take at a time."""
    known = {**objective.architecture, "ways": {}, "piece sizes": dict(objective.architecture.get("piece sizes", {}))}
    A = next(_curvatures(rebuild(objective._with(architecture=known))))
    return A.engine.base.piece_size or sys.maxsize


def _first(objective: Objective, num_examples: int) -> Objective:
    """Return the objective over its first examples, not inspected anew, and with nothing learnt for the objective itself."""
    evaluator = objective.model_evaluator("Its first examples")
    with evaluator.session():
        batches = evaluator.batches.subset(num_examples, None)
    known = {**objective.architecture, "ways": {}, "piece sizes": {}}
    return objective._with(_evaluator=evaluator.replaced(batches=batches), architecture=known)


def _peak(rebuild: Callable[[Objective], LinearOperator], objective: Objective, columns: int) -> tuple[int, int]:
    """Return the most bytes that are alive at once in a product, and those of the largest tensor."""
    A = rebuild(objective)
    V = torch.ones(A.size, columns, dtype=A.dtype, device=A.device)
    with _Counter() as counter:
        A @ V
    return counter.peak, counter.largest


class _Counter(TorchDispatchMode):
    """Counts the bytes of the storages that operations make and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.peak, self.largest = 0, 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for given in tree_leaves((args, kwargs or {})):  # what is there already is not counted
            if isinstance(given, Tensor):
                self._see(given, new=False)
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._see(made, new=True)
        return result

    def _see(self, tensor: Tensor, *, new: bool) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes() if new else 0
        self._seen.add(key)
        self.alive += size
        self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)
        weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size
