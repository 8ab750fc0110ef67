"""The gradient as training sees it: what a plain ``loss.backward()`` leaves in the parameters' ``.grad``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatminima.objective.evaluators import ModelEvaluator
from flatminima.objective.objective import Objective
from flatminima.objective.session import copied

__all__ = ["gradient_by_backward", "rounding_of"]


def gradient_by_backward(objective: Objective) -> Tensor:
    """Return ∇L ``(n,)`` by ``backward()`` on a copy of the model; of a closure, in its own tensors, which are put back.

    Nothing stands in for the parameters, so that checkpoints that compute again, and gradients that are set rather than
    returned, count as they do in training. Hooks on gradients do not run.
    """
    evaluator, space, theta = objective._evaluator, objective.space, objective.theta
    filled: Mapping[str, Tensor | None]
    if isinstance(evaluator, ModelEvaluator):
        model = copied(evaluator.model)
        evaluator = evaluator.replaced(model=model.to(evaluator.dtype) if evaluator.dtype else model)
        own = evaluator.current()
        for name, part in space.unflatten(theta).items():
            own[name].data.copy_(part)
            own[name].grad = None
        with evaluator.session():
            for batch in evaluator.prepared():
                evaluator.evaluate_unchanged(batch).total.backward()
        filled = {name: own[name].grad for name in space.names}
    else:
        with evaluator.session():
            leaves = evaluator.leaves(theta)
            for evaluation in evaluator.evaluations(leaves):
                evaluation.total.backward()
            filled = {name: None if leaf.grad is None else leaf.grad.clone() for name, leaf in leaves.items()}
    parts = [
        torch.zeros(shape.numel(), dtype=theta.dtype, device=theta.device)
        if (gradient := filled[name]) is None
        else gradient.to_dense().reshape(-1).to(theta)
        for name, shape in space.shapes.items()
    ]
    return objective.scale * torch.cat(parts) + objective.l2 * theta


def rounding_of(objective: Objective) -> float:
    """Return the relative rounding of the type that the loss is computed in, which may be shorter than that of its results."""
    return max(torch.finfo(leaf.dtype).eps for leaf in objective._leaf_types())
