r"""The Hessian of one batch's loss in the model's outputs: the middle factor Λ of the Gauss–Newton matrix Jᵀ Λ J.

For softmax cross-entropy, squared error and logistic loss there is a closed form, applied to a vector without any K×K matrix;
for every other loss the product comes from autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective import Evaluation
from flatminima.objective.evaluators import ModelEvaluator
from flatminima.objective.losses import Loss
from flatminima.operators.middle_factor import MiddleFactor

__all__ = ["check_log_probabilities", "check_outputs", "is_softmax", "logistic_weights", "loss_hessian", "row_weights"]


#: Losses whose columns cost nothing to form again; they are sums over rows.
CLOSED_FORMS = ("cross_entropy", "nll", "mse", "bce_with_logits")


def is_softmax(loss: Loss) -> bool:
    """Return whether a loss is a softmax's: of logits, or of log-probabilities, which are logits that are normalised."""
    return loss.name in ("cross_entropy", "nll")


def check_outputs(loss: Loss, outputs: object) -> Tensor:
    """Return the model's output if it has a first axis of examples, and one of classes where the loss needs it.

    Raises:
        NotSupported: If it is no such tensor.
    """
    least = 2 if is_softmax(loss) else 1
    if not isinstance(outputs, Tensor) or outputs.ndim < least:
        got = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise NotSupported(
            f"The Gauss-Newton matrix needs one output tensor of at least {least} axes, the first for the examples. Got {got}."
        )
    return outputs


def num_columns(loss: Loss, outputs: Tensor) -> int:
    """Return how many columns ``output_factor`` needs for one example."""
    width = outputs[0].numel() if len(outputs) else 0
    return width // outputs.shape[1] * (outputs.shape[1] - 1) if is_softmax(loss) else width


def loss_hessian(evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor) -> MiddleFactor:
    """Return the Hessian of one batch's total in the outputs.

    Args:
        evaluator: Tells the loss and its settings.
        evaluation: The batch's evaluation.
        outputs: The outputs, detached.
    """
    loss = evaluator.loss
    return MiddleFactor(
        product=output_product(evaluator, evaluation, outputs),
        columns=lambda: output_factor(evaluator, evaluation, outputs),
        num_columns=num_columns(loss, outputs),
        has_exact_columns=loss.name in CLOSED_FORMS,
    )


def output_product(evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function u ↦ Λ u for one batch, with u and Λ u in the outputs' shape.

    Args:
        evaluator: Tells the loss and its settings.
        evaluation: The batch's evaluation.
        outputs: The outputs, detached.
    """
    loss, targets, options = evaluator.loss, evaluation.targets, evaluator.loss_options(outputs)
    if is_softmax(loss):
        check_log_probabilities(loss, outputs)
        p = outputs.softmax(1)
        weight = row_weights(outputs, targets, options).unsqueeze(1)
        return lambda u: weight * (p * u - p * (p * u).sum(1, keepdim=True))
    if loss.name == "mse":
        return lambda u: 2 * u
    if loss.name == "bce_with_logits":
        diagonal = _logistic_curvature(outputs, targets, options)
        return lambda u: diagonal * u
    return _autograd_product(evaluator, evaluation, outputs)


def output_factor(evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    r"""Return columns s and signs σ with Λ = Σ_c σ_c s_c s_cᵀ, one after the other, each column within one example.

    For softmax cross-entropy the K−1 columns of the Cholesky factor of diag(p) − ppᵀ (Tanabe & Sagae 1992): column j is
    √(p_j q_j / q_{j−1}) (e_j − p_{>j} / q_j) with the tail sums q_j = Σ_{k>j} p_k, which lose no digit however small p is.

    Args:
        evaluator: Tells the loss and its settings.
        evaluation: The batch's evaluation.
        outputs: The outputs, detached.

    Returns:
        ``num_columns`` pairs of a column in the outputs' shape and signs ``(batch,)``.

    Raises:
        ValueError: If the loss couples examples, so that Λ has no factor within one example.
    """
    loss, targets, options = evaluator.loss, evaluation.targets, evaluator.loss_options(outputs)
    if is_softmax(loss):
        check_log_probabilities(loss, outputs)
        return _softmax_columns(outputs, row_weights(outputs, targets, options))
    if loss.name == "mse":
        return _diagonal_columns(torch.full_like(outputs, 2.0))
    if loss.name == "bce_with_logits":
        return _diagonal_columns(_logistic_curvature(outputs, targets, options))
    return _autograd_columns(_autograd_product(evaluator, evaluation, outputs), outputs)


def check_log_probabilities(loss: Loss, outputs: Tensor) -> None:
    """nll_loss is linear in its input: its curvature lies in the log-softmax before it, so there must be one."""
    if loss.name == "nll" and outputs.logsumexp(1).abs().max() > 1e-3:
        raise NotSupported(
            "nll_loss has a curvature in the outputs only where these are log-probabilities. Got outputs whose exponentials do "
            "not add up to 1. End the model with log_softmax, or use cross_entropy on logits."
        )


def row_weights(outputs: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the factor of diag(p) − ppᵀ in every row: Σ_k weight_k q_k for target probabilities q, 0 where ignored."""
    classes, smoothing = 1, float(options.get("label_smoothing", 0.0))
    weight: Tensor | None = options.get("weight")
    num_classes = outputs.shape[classes]
    w = torch.ones(num_classes, dtype=outputs.dtype, device=outputs.device) if weight is None else weight
    if targets.is_floating_point():
        probabilities = (targets * (1 - smoothing) + smoothing / num_classes).movedim(classes, -1)
        return torch.matmul(probabilities, w)
    kept = targets != options.get("ignore_index", -100)
    own = w[torch.where(kept, targets, 0).long()]
    return torch.where(kept, (1 - smoothing) * own + smoothing * w.mean(), 0.0)


def _softmax_columns(outputs: Tensor, row_weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    p = outputs.softmax(1).movedim(1, -1)  # (batch, *positions, K)
    num_classes = p.shape[-1]
    p = p.reshape(p.shape[0], -1, num_classes)
    weight = row_weights.reshape(p.shape[:2])
    tail = p.flip(-1).cumsum(-1).flip(-1)  # tail_j = Σ_{k>=j} p_k
    rest = tail[..., 1:]  # q_j = Σ_{k>j} p_k
    scale = (weight[..., None] * p[..., :-1] * rest / tail[..., :-1]).nan_to_num(0.0).clamp_min(0).sqrt()
    signs = torch.ones(p.shape[0], dtype=p.dtype, device=p.device)
    shape = (outputs.shape[0], *outputs.shape[2:], num_classes)
    for position in range(p.shape[1]):
        for j in range(num_classes - 1):
            column = torch.zeros_like(p)
            s = scale[:, position, j]
            column[:, position, j] = s
            ratio = (p[:, position, j + 1 :] / rest[:, position, j, None]).nan_to_num(0.0, 0.0, 0.0)
            column[:, position, j + 1 :] = -s[:, None] * ratio
            yield column.reshape(shape).movedim(-1, 1), signs


def _diagonal_columns(diagonal: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    root = diagonal.reshape(len(diagonal), -1).sqrt()
    signs = torch.ones(root.shape[0], dtype=root.dtype, device=root.device)
    for k in range(root.shape[1]):
        column = torch.zeros_like(root)
        column[:, k] = root[:, k]
        yield column.reshape(diagonal.shape), signs


def _logistic_curvature(outputs: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the second derivative of the logistic loss, the weight of the term times σ(o) σ(−o)."""
    return logistic_weights(outputs, targets, options) * (outputs.sigmoid() * (-outputs).sigmoid())


def logistic_weights(outputs: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the weight of every term of the logistic loss: weight · (pos_weight · y + 1 − y)."""
    weights = torch.ones_like(outputs)
    if options.get("pos_weight") is not None:
        weights = options["pos_weight"] * targets + 1 - targets
    return weights if options.get("weight") is None else weights * options["weight"]


def _autograd_product(evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Differentiate the batch's loss twice in its outputs; the graph is shared by all products."""
    variable = outputs.detach().requires_grad_()
    total = evaluator.total_of(variable, evaluation)
    (gradient,) = torch.autograd.grad(total, variable, create_graph=True, materialize_grads=True)

    def product(u: Tensor) -> Tensor:
        if not gradient.requires_grad:
            return torch.zeros_like(u)
        (result,) = torch.autograd.grad(gradient, variable, u, retain_graph=True, materialize_grads=True)
        return result

    return product


def _autograd_columns(product: Callable[[Tensor], Tensor], outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Form Λ of each example from one product per output, and split it by its eigenvectors."""
    batch, width = outputs.shape[0], outputs[0].numel()
    dense = torch.stack([product(_unit(outputs, k)).reshape(batch, width) for k in range(width)], dim=2)  # (batch, width, width)
    # One product with independent signs per example reveals a Λ that couples examples.
    generator = torch.Generator(outputs.device).manual_seed(0)
    signs = 2 * torch.empty_like(outputs).bernoulli_(generator=generator) - 1
    expected = torch.einsum("bij,bj->bi", dense, signs.reshape(batch, width))
    if (product(signs).reshape(batch, width) - expected).norm() > 1e-3 * expected.norm():
        raise ValueError("The loss couples examples: its Hessian in the outputs has no factor within one example.")
    values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
    columns = vectors * values.abs().sqrt()[:, None, :]
    return ((columns[:, :, c].reshape(outputs.shape), values[:, c].sign()) for c in range(width))


def _unit(outputs: Tensor, k: int) -> Tensor:
    unit = torch.zeros_like(outputs).reshape(len(outputs), -1)
    unit[:, k] = 1.0
    return unit.reshape(outputs.shape)
