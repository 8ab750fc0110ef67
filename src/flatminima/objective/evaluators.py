"""What turns parameters into batch losses; here, a model with a loss and data."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from flatminima.objective.batches import Batches, batch_size, describe, inputs_and_targets, map_tensors, rows
from flatminima.objective.losses import ELEMENTWISE, Loss
from flatminima.objective.session import session
from flatminima.params import ParameterSpace, clean_name

__all__ = ["Evaluation", "Evaluator", "ModelEvaluator", "Piece", "gradients_of"]

_MODEL_NAMES = ("model", "module", "net", "network")


@final
@dataclass(frozen=True)
class Evaluation:
    """One batch's part of the loss.

    Attributes:
        total: Sum over the batch's terms, scalar, differentiable in the leaves.
        outputs: The model's output (logits), or None where the loss calls the model itself.
        targets: The batch's targets.
        batch: The batch, on the model's device.
    """

    total: Tensor
    outputs: Tensor | None = None
    targets: Any = None
    batch: Any = None


@final
@dataclass(frozen=True)
class Piece:
    """One batch of the data, or a closure's only call, before it is evaluated.

    Attributes:
        batch: The batch, on the model's device; None for a closure.
        leaves: The tensors that the loss is a function of, by name.
        evaluation_of: Gives the batch's loss at leaves.
    """

    batch: Any
    leaves: Mapping[str, Tensor]
    evaluation_of: Callable[[Any, Mapping[str, Tensor]], Evaluation]

    def evaluate(self, leaves: Mapping[str, Tensor] | None = None) -> Evaluation:
        """Return the loss at the piece's own leaves, or at others."""
        return self.evaluation_of(self.batch, self.leaves if leaves is None else leaves)

    def examples(self, start: int, stop: int) -> Piece:
        """Return the piece of some of the examples."""
        return replace(self, batch=rows(self.batch, start, stop))


class Evaluator(ABC):
    """A loss as a sum over batches, as a function of named tensors."""

    @property
    @abstractmethod
    def space(self) -> ParameterSpace:
        """The parameters that the loss is a function of."""

    @property
    @abstractmethod
    def modules(self) -> Iterable[nn.Module]:
        """The modules that are known to run."""

    @abstractmethod
    def current(self) -> Mapping[str, Tensor]:
        """Return the user's tensors, by name."""

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """Return the context in which everything is evaluated; it restores all state of the user's."""

    @abstractmethod
    def leaves(self, theta: Tensor) -> dict[str, Tensor]:
        """Return leaf tensors that hold θ ``(n,)`` and require a gradient."""

    @abstractmethod
    def pieces(self, leaves: Mapping[str, Tensor]) -> Iterator[Piece]:
        """Yield the batches with the leaves, within a session."""

    @final
    def evaluations(self, leaves: Mapping[str, Tensor]) -> Iterator[Evaluation]:
        """Yield each batch's loss at the leaves, within a session."""
        for piece in self.pieces(leaves):
            yield piece.evaluate()


class _Bound(nn.Module):
    """Model and loss as one module, so that one functional call replaces the tensors of both."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss_function = loss.function
        self.loss = loss
        self.takes_model = loss.name == "custom" and _first_parameter(loss.function) in _MODEL_NAMES

    def forward(self, batch: Any, num_terms: Callable[[Any], float] | None) -> Evaluation:
        if self.takes_model:
            return Evaluation(self.custom(self.loss_function(self.model, batch), batch, num_terms), batch=batch)
        args, kwargs, targets = inputs_and_targets(batch)
        outputs = _logits(self.model(*args, **kwargs))
        if self.loss.name == "custom":
            total = self.custom(self.loss_function(outputs, targets), batch, num_terms)
        else:
            total = self.loss.total(outputs, targets, self.options(outputs))
        return Evaluation(total, outputs, targets, batch)

    def options(self, outputs: Tensor) -> dict[str, Any]:
        """Return the standard loss's settings with its tensors in the outputs' dtype and device."""
        return map_tensors(dict(self.loss.options), lambda t: t.to(outputs.device, outputs.dtype))  # type: ignore[no-any-return]

    def custom(self, value: Any, batch: Any, num_terms: Callable[[Any], float] | None) -> Tensor:
        """Return a custom loss's value as the sum over the batch's terms."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"`loss` must return one number per batch. Got {describe(value)}. Average it: loss.mean().")
        count = 1.0 if self.loss.reduction == "sum" else float((num_terms or batch_size)(batch))
        return count * value.reshape(())


@final
class ModelEvaluator(Evaluator):
    """A model, a loss and batches.

    Args:
        model: The user's module, unwrapped.
        loss: The loss and what is known of it.
        batches: The data.
        space: The parameters to differentiate in; the others stay constant.
        mode: "eval" or "train".
        num_terms: Number of terms of a batch under a custom loss; the batch size when None.
        dtype: Floating point type to compute in; None keeps the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        space: ParameterSpace,
        *,
        mode: str,
        num_terms: Callable[[Any], float] | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.model, self.loss, self.batches, self.mode = model, loss, batches, mode
        self.num_terms_of, self.dtype = num_terms, dtype
        self._space = space
        self._bound = _Bound(model, loss)
        self._slots = _slots(self._bound)
        self._loss_modules = list(loss.function.modules()) if isinstance(loss.function, nn.Module) else []

    @property
    def space(self) -> ParameterSpace:
        return self._space

    @property
    def modules(self) -> Iterable[nn.Module]:
        return [*self.model.modules(), *self._loss_modules]

    @property
    def takes_model(self) -> bool:
        """Whether the loss calls the model itself."""
        return self._bound.takes_model

    @property
    def adds_up(self) -> bool:
        """Whether a batch's total is the sum of those of its parts, provided that the model does not couple examples."""
        return self.loss.name != "custom" and self.mode == "eval"

    def current(self) -> Mapping[str, Tensor]:
        return {clean_name(name): p for name, p in self.model.named_parameters()}

    def session(self) -> AbstractContextManager[None]:
        return session(self.model, mode=self.mode, generators=self.batches.generators, others=self._loss_modules)

    def leaves(self, theta: Tensor) -> dict[str, Tensor]:
        own = self.current()
        return {
            name: part.to(own[name].device, self.dtype or own[name].dtype, copy=True).requires_grad_()
            for name, part in self.space.unflatten(theta).items()
        }

    def pieces(self, leaves: Mapping[str, Tensor]) -> Iterator[Piece]:
        for batch in self.prepared():
            yield Piece(batch, leaves, self.evaluate)

    def prepared(self) -> Iterator[Any]:
        """Yield the batches on the model's device, in the dtype to compute in."""
        device = next(iter(self.current().values())).device

        def prepare(tensor: Tensor) -> Tensor:
            return tensor.to(device, self.dtype) if self.dtype and tensor.is_floating_point() else tensor.to(device)

        for batch in self.batches:
            yield map_tensors(batch, prepare)

    def evaluate(self, batch: Any, leaves: Mapping[str, Tensor]) -> Evaluation:
        """Return one prepared batch's loss. Buffers are copies, so the model's own never change."""
        result = torch.func.functional_call(self._bound, self._tensors(leaves), (batch, self.num_terms_of), tie_weights=False)
        assert isinstance(result, Evaluation)
        return result

    def evaluate_unchanged(self, batch: Any) -> Evaluation:
        """Return one prepared batch's loss with the model's own parameters where they are; only buffers are copies."""
        buffers = {slot.raw_name: slot.tensor.detach().clone() for slot in self._slots if slot.is_buffer}
        result = torch.func.functional_call(self._bound, buffers, (batch, self.num_terms_of), tie_weights=False)
        assert isinstance(result, Evaluation)
        return result

    def replaced(self, **changes: Any) -> ModelEvaluator:
        """Return an evaluator that differs in some of the constructor's arguments."""
        settings: dict[str, Any] = {
            "model": self.model, "loss": self.loss, "batches": self.batches, "space": self.space, "mode": self.mode,
            "num_terms": self.num_terms_of, "dtype": self.dtype, **changes,
        }  # fmt: skip
        return ModelEvaluator(**settings)

    def num_terms(self, evaluation: Evaluation) -> float:
        """Return what the mean divides this batch's total by."""
        if self.loss.name == "custom":
            return float((self.num_terms_of or batch_size)(evaluation.batch))
        assert evaluation.outputs is not None
        self._check_shapes(evaluation.outputs, evaluation.targets)
        return self.loss.num_terms(evaluation.outputs, evaluation.targets, self._bound.options(evaluation.outputs))

    def total_of(self, outputs: Tensor, evaluation: Evaluation) -> Tensor:
        """Return a batch's total as a function of given outputs instead of the model's."""
        if self.loss.name == "custom":
            return self._bound.custom(self.loss.function(outputs, evaluation.targets), evaluation.batch, self.num_terms_of)
        return self.loss.total(outputs, evaluation.targets, self._bound.options(outputs))

    def loss_options(self, outputs: Tensor) -> dict[str, Any]:
        """Return a standard loss's settings, with its tensors in the outputs' dtype and device."""
        return self._bound.options(outputs)

    def _check_shapes(self, outputs: Tensor, targets: Tensor) -> None:
        if self.loss.name in ELEMENTWISE and outputs.shape != targets.shape:
            raise ValueError(
                f"Outputs and targets must have one shape under {self.loss.name} (torch would broadcast them). "
                f"Got {tuple(outputs.shape)} and {tuple(targets.shape)}. Reshape the targets: y.view_as(outputs)."
            )

    def _tensors(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what stands in for every tensor of model and loss: leaves, constants, and copies of buffers."""
        tensors = {}
        for slot in self._slots:
            leaf = leaves.get(slot.name)
            if leaf is None:
                tensor = slot.tensor.detach()
                dtype = self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype
                leaf = tensor.to(dtype, copy=slot.is_buffer)  # a forward pass may write to a buffer
            tensors[slot.raw_name] = leaf
        return tensors


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of a module hangs. It is read anew at every pass, so that the user may replace it."""

    owner: nn.Module
    attribute: str
    raw_name: str
    name: str
    is_buffer: bool

    @property
    def tensor(self) -> Tensor:
        tensor = getattr(self.owner, self.attribute)
        assert isinstance(tensor, Tensor)
        return tensor


def _slots(bound: nn.Module) -> list[_Slot]:
    """Return every place that holds a tensor: once for a shared module, each time for a tied parameter, under its first name."""
    slots: list[_Slot] = []
    first_names: dict[int, str] = {}
    for prefix, module in bound.named_modules():
        start = f"{prefix}." if prefix else ""
        named = ((module.named_parameters, False), (module.named_buffers, True))
        for tensors, is_buffer in named:
            for attribute, tensor in tensors(recurse=False, remove_duplicate=False):
                raw = start + attribute
                name = first_names.setdefault(id(tensor), clean_name(raw).removeprefix("model."))
                slots.append(_Slot(module, attribute, raw, name, is_buffer))
    return slots


def _logits(outputs: Any) -> Any:
    """Return the tensor that a loss takes: the output itself, its ``.logits``, or its entry "logits"."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return getattr(outputs, "logits", outputs)


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        names = list(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters)
    except (TypeError, ValueError):
        return None
    return names[0] if names else None


def gradients_of(
    total: Tensor, leaves: Mapping[str, Tensor], *, create_graph: bool = False, retain_graph: bool | None = None
) -> list[Tensor]:
    """Return ∂total/∂leaf for every leaf; zeros where the total does not depend on it."""
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves.values()]
    inputs = list(leaves.values())
    return list(torch.autograd.grad(total, inputs, None, retain_graph, create_graph, materialize_grads=True))
