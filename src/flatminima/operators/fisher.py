"""Fisher: the information about the parameters in labels that the model itself would give."""

from __future__ import annotations

from itertools import count
from typing import final

import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_generator
from flatminima.objective import Evaluation, Objective
from flatminima.operators.likelihood import check_likelihood, sampled_scores
from flatminima.operators.middle_factor import MiddleFactor, MiddleFactors
from flatminima.operators.output_hessian import loss_hessian
from flatminima.operators.sandwich import Sandwich

__all__ = ["Fisher"]


@final
class Fisher(Sandwich):
    r"""The Fisher information F of the model's own distribution of labels, shape ``(n, n)``, exact or from drawn labels.

    .. math:: F = \frac1T \sum_b \mathbb E_{y \sim p(\cdot \mid x_b)} \big[ g_b(y)\, g_b(y)^\top \big], \qquad
              \hat F = \frac1T \sum_b \frac1S \sum_{s=1}^S g_b(y_{bs})\, g_b(y_{bs})^\top, \qquad
              g_b(y) = -\nabla_\theta \log p(y \mid x_b, \theta),

    over the examples b, with T the objective's number of terms. The loss says which distribution it is: softmax cross-entropy and
    nll_loss a categorical one, the logistic loss a Bernoulli one, the squared error (o − y)² a normal one with variance ½. A term
    of weight w (a class's weight, 0 where ignored) counts as w observations; observed labels matter for nothing else.

    The exact F has a closed form and equals the Gauss–Newton matrix for these losses (Martens 2020, sec. 9.2): F = 8 for
    y = w x, L = (wx − y)² and x = 2. The estimate is unbiased, and of rank at most S times the number of examples; its exact
    trace takes S backward passes. Positive semi-definite. The objective's l2 term is included, as in the Hessian.

    Args:
        objective: The loss, of the form ``loss(outputs, targets)``. The point θ is read now.
        num_samples: Number S of labels drawn for each example; None is the exact expectation.
        generator: Source of the labels. They are the same at every product: a seed is drawn now, and labels anew from it at
            every pass, so that they take no memory.

    Raises:
        NotSupported: If the loss states no distribution of labels, or the objective does not know the model's outputs.
        ValueError: If ``num_samples < 1``.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> objective = Objective(model, torch.nn.functional.mse_loss, (torch.full((1, 1), 2.0), torch.zeros(1, 1)))
        >>> (Fisher(objective) @ torch.ones(1)).item()
        8.0
    """

    label = "Fisher"

    def __init__(self, objective: Objective, *, num_samples: int | None = None, generator: torch.Generator | None = None) -> None:
        self.num_samples = None if num_samples is None else check_at_least("num_samples", num_samples, 1)
        super().__init__(objective)
        check_likelihood(objective.loss)
        check_generator(generator)
        self._seed = 0
        if num_samples is not None:
            where = torch.device("cpu") if generator is None else generator.device
            self._seed = int(torch.randint(2**62, (), generator=generator, device=where))

    @property
    def splits(self) -> bool:
        return self.num_samples is None  # labels are drawn batch by batch

    def middle_factors(self) -> MiddleFactors:
        batches = count()

        def middle_factor(evaluation: Evaluation, outputs: Tensor) -> MiddleFactor:
            if self.num_samples is None:
                return loss_hessian(self.evaluator, evaluation, outputs)
            generator = torch.Generator(outputs.device).manual_seed(self._seed + next(batches))
            return sampled_scores(self.evaluator, evaluation, outputs, self.num_samples, generator)

        return middle_factor
