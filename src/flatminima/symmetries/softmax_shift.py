"""Softmax shift: one vector added to the weights of every class, one number to every bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from flatminima.objective import Objective
from flatminima.objective.evaluators import Evaluation
from flatminima.objective.losses import Loss
from flatminima.symmetries.move import Layout, Move
from flatminima.symmetries.symmetry import Symmetry

__all__ = ["ShiftMove", "SoftmaxShift", "softmax_loss", "softmax_loss_of"]


#: Largest relative change of a loss that counts as none, in float64.
_RTOL = 1e-10


def softmax_loss(loss: object) -> str:
    """Return "cross_entropy" or "nll" for torch's losses of a softmax, as module, function or partial, and "" for any other.

    A subclass may add anything to the loss, so only torch's own classes count; others have to be tried, see
    `softmax_loss_of`.
    """
    name = Loss.of(loss).name if callable(loss) else ""
    return name if name in ("cross_entropy", "nll") else ""


def softmax_loss_of(objective: Objective) -> tuple[str, str]:
    """Return the kind of softmax loss that an objective has, and what could not be told; looked for once an architecture.

    A loss that is not one of torch's own is tried in float64: one random number for each example is added to all its
    outputs. If no batch's total changes by more than 1e-10 (relative), it is a loss of a softmax.

    Returns:
        "cross_entropy", "nll" or "" as `softmax_loss` does, and a note, empty if the answer is known.
    """
    if objective.loss.name != "custom":
        return softmax_loss(objective.loss.function), ""
    known = objective.architecture
    if "softmax loss" not in known:
        known["softmax loss"] = _tried(objective)
    kind, note = known["softmax loss"]
    return str(kind), str(note)


def _tried(objective: Objective) -> tuple[str, str]:
    evaluator = objective.to(torch.float64).model_evaluator("The loss")
    generator = torch.Generator().manual_seed(0)

    def totals(evaluation: Evaluation, _leaves: Mapping[str, Tensor]) -> Tensor:
        outputs = evaluation.outputs
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            raise _CannotTellError("for outputs that are not one tensor of numbers")
        if outputs.ndim != 2:
            raise _CannotTellError(f"for outputs of shape {tuple(outputs.shape)}")
        shift = torch.randn(len(outputs), 1, generator=generator, dtype=torch.float64).to(outputs)
        moved = evaluator.total_of(outputs + shift * (1 + outputs.abs().max()), evaluation)
        before = evaluator.total_of(outputs, evaluation)
        # A batch is its own test: sums over batches may cancel. A loss of one class is constant, and no evidence.
        return torch.stack([(moved - before).abs(), before.abs()]).detach() if outputs.shape[1] > 1 else outputs.new_ones(2)

    try:
        change, size = objective.to(torch.float64).without_l2().integrate(totals, gradients=False).tolist()
    except _CannotTellError as error:
        return "", _note(str(error))
    except Exception as error:  # whatever a user's model or loss raises in float64
        return "", _note(f"({type(error).__name__} in float64)")
    return ("cross_entropy" if change <= _RTOL * size else ""), ""


class _CannotTellError(Exception):
    """The loss cannot be tried on such outputs."""


def _note(why: str) -> str:
    return f"softmax shift: whether this loss stays when one number is added to all classes was not tried {why}: not looked for"


@final
class SoftmaxShift(Symmetry):
    """W_k → W_k + v and b_k → b_k + c for all classes k: each example's logits move by one number, the softmax not at all.

    It is a symmetry of the loss, not of the outputs.

    Attributes:
        weight: Name of the last layer's weight.
        class_axis: Its axis of classes.
        bias: Name of the last layer's bias, shape ``(classes,)``, if it has one.
    """

    kind = "softmax shift"

    def __init__(self, layout: Layout, weight: str, class_axis: int, bias: str | None, weight_rms: float) -> None:
        self.layout = layout
        self.weight, self.class_axis, self.bias = weight, class_axis, bias
        self.weight_rms = weight_rms
        shape = layout.shapes[weight]
        self.dimension = shape.numel() // shape[class_axis] + (bias is not None)
        self.parameters = (weight,) if bias is None else (weight, bias)
        self.buffers = ()
        self.name = f"shift of the {shape[class_axis]} classes of {weight.removesuffix('.weight')}"

    def move(self, vector: Tensor, constant: float = 0.0) -> ShiftMove:
        """Return the move that adds ``vector`` (the weight's shape with size 1 on the class axis) and ``constant``."""
        return ShiftMove(self, vector.detach().double().cpu(), float(constant))

    def centring(self, state: Mapping[str, Tensor]) -> ShiftMove:
        """Return the move that makes the mean over the classes zero."""
        vector = -state[self.weight].detach().double().mean(dim=self.class_axis, keepdim=True)
        return self.move(vector, 0.0 if self.bias is None else -float(state[self.bias].detach().double().mean()))

    def _random(self, generator: torch.Generator | None, scale: float, state: Mapping[str, Tensor]) -> ShiftMove:
        shape = list(self.layout.shapes[self.weight])
        shape[self.class_axis] = 1
        device = torch.device("cpu") if generator is None else generator.device
        draw = torch.randn(torch.Size(shape).numel() + 1, dtype=torch.float64, generator=generator, device=device).cpu()
        rms = float(state[self.weight].detach().double().square().mean().sqrt()) if self.weight in state else self.weight_rms
        draw *= scale * (rms or 1.0)
        return self.move(draw[:-1].reshape(shape), float(draw[-1]) if self.bias else 0.0)

    def describe(self) -> str:
        return f"softmax shift: {self.name} by one common vector (dimension {self.dimension}; the loss stays, the logits shift)"


@final
class ShiftMove(Move):
    """The move that adds a vector to every class's weights and a constant to every bias."""

    def __init__(self, symmetry: SoftmaxShift, vector: Tensor, constant: float) -> None:
        self.symmetry = symmetry
        self.layout = symmetry.layout
        self.vector, self.constant = vector, constant

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.symmetry.parameters)

    def inverse(self) -> ShiftMove:
        return ShiftMove(self.symmetry, -self.vector, -self.constant)

    def _change(self, name: str, value: Tensor) -> Tensor:
        return value + (self.vector.to(value.device) if name == self.symmetry.weight else self.constant)
