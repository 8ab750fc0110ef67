"""EmpiricalFisher: the second moment of the gradients at the observed labels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_one_of
from flatminima._errors import NotSupported
from flatminima.objective import Evaluation, Objective
from flatminima.objective.evaluators import ModelEvaluator
from flatminima.objective.losses import ELEMENTWISE
from flatminima.operators.middle_factor import MiddleFactor, MiddleFactors, of_columns
from flatminima.operators.output_hessian import is_softmax
from flatminima.operators.sandwich import Sandwich

__all__ = ["EmpiricalFisher"]


@final
class EmpiricalFisher(Sandwich):
    r"""The second moment E of gradients at the observed labels, shape ``(n, n)``; not centred, and no Fisher information.

    .. math:: E = \frac1T \sum_b \nabla_\theta \text{total}_b \, \nabla_\theta \text{total}_b^\top

    over the examples b (rows of the outputs), or over the single loss terms b: tokens of a sequence, entries of a squared error.
    T is the objective's number of terms, and total_b the part of the loss's sum that b brings, its weight included. For y = w x,
    L = (wx − y)² = r² and x = 2 it is 16 r², where the Hessian is 8: it vanishes where every example is fitted, and is no
    approximation of the curvature (Kunstner et al. 2019). Positive semi-definite. The objective's l2 term is included once, as
    λ I like in the Hessian, and not in the gradients.

    Args:
        objective: The loss, of the form ``loss(outputs, targets)``, standard or custom. The point θ is read now.
        per: "example" or "term"; the terms of a custom loss are not known.

    Raises:
        NotSupported: If the objective does not know the model's outputs, or terms are wanted of a custom loss; at the first
            product, if the loss is no sum over examples (a contrastive one).

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 0.75)
        >>> objective = Objective(model, torch.nn.functional.mse_loss, (torch.full((1, 1), 2.0), torch.ones(1, 1)))
        >>> (EmpiricalFisher(objective) @ torch.ones(1)).item()  # r = 0.5
        4.0
    """

    label = "empirical Fisher"

    def __init__(self, objective: Objective, *, per: str = "example") -> None:
        super().__init__(objective)
        self.per = check_one_of("per", per, ("example", "term"))
        if per == "term" and objective.loss.name == "custom":
            raise NotSupported("`per` must be 'example' for a custom loss (its terms are not known). Got 'term'.")
        self._checked: set[int] = set()

    def middle_factors(self) -> MiddleFactors:
        batches = count()

        def middle_factor(evaluation: Evaluation, outputs: Tensor) -> MiddleFactor:
            s, index = _gradient(self.evaluator, evaluation, outputs), next(batches)
            if self.evaluator.loss.name == "custom" and index not in self._checked:
                _refuse_coupling(self.evaluator, evaluation, outputs, s)
                self._checked.add(index)
            return _of_terms(self.evaluator, s) if self.per == "term" else of_columns(lambda: iter([s]), 1)

        return middle_factor


def _gradient(evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor) -> Tensor:
    """Return ∂total/∂outputs at given outputs."""
    variable = outputs.detach().requires_grad_()
    total = evaluator.total_of(variable, evaluation)
    if not total.requires_grad:
        return torch.zeros_like(variable, requires_grad=False)
    (gradient,) = torch.autograd.grad(total, variable, materialize_grads=True)
    return gradient


def _of_terms(evaluator: ModelEvaluator, s: Tensor) -> MiddleFactor:
    """Return Λ = Σ_terms s s^T from the gradient s, which falls apart into the terms'."""
    if is_softmax(evaluator.loss):  # one term per position: (batch, K, *positions)
        pieces = s.flatten(2) if s.ndim > 2 else s.unsqueeze(2)
    elif evaluator.loss.name in ELEMENTWISE:  # one per entry
        pieces = s.flatten(1).unsqueeze(1) if s.ndim > 1 else s[:, None, None]
    else:
        return of_columns(lambda: iter([s]), 1)

    def columns() -> Iterator[tuple[Tensor, Tensor]]:
        for t in range(pieces.shape[2]):
            column = torch.zeros_like(pieces)
            column[:, :, t] = pieces[:, :, t]
            yield column.reshape(s.shape), s.new_ones(len(s))

    def product(u: Tensor) -> Tensor:
        return (pieces * (pieces * u.reshape(pieces.shape)).sum(1, keepdim=True)).reshape(s.shape)

    return MiddleFactor(product, columns, pieces.shape[2])


def _refuse_coupling(evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor, s: Tensor) -> None:
    """Refuse a loss whose gradient in one row changes when other rows do: it is no sum over examples.

    Rows are changed whose number has a one at some binary place, place by place, so that any two rows are told apart once. New
    values are mixtures of the others', which stay in the domain of a loss of probabilities.
    """
    generator = torch.Generator(outputs.device).manual_seed(0)
    noise = torch.empty_like(outputs).uniform_(0, 0.05, generator=generator)
    other = 0.9 * outputs.roll(1, 0) + noise
    number = torch.arange(len(outputs), device=outputs.device)
    limit = 1e2 * torch.finfo(s.dtype).eps * s.abs().max()
    for place in range((len(outputs) - 1).bit_length()):
        changed = (number >> place) % 2 == 1
        moved = _gradient(evaluator, evaluation, torch.where(changed.reshape(-1, *[1] * (outputs.ndim - 1)), other, outputs))
        if not (moved - s)[~changed].abs().max() <= limit:  # not so for nan
            raise NotSupported(
                "The empirical Fisher needs a loss that is a sum over examples. Got one that couples examples: the gradient in "
                "one row of the outputs changes with other rows."
            )
