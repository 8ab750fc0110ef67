"""Likelihoods: the distribution of labels that a loss is the negative logarithm of, and scores at labels drawn from it.

Softmax cross-entropy and nll_loss state a categorical distribution p = softmax(o), the logistic loss a Bernoulli distribution
with probability σ(o), and torch's squared error (o − y)² a normal distribution with mean o and variance ½ in every entry. A term
that the loss gives a weight w (of its target's class, or 0 where ignored) counts as w observations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective import Evaluation
from flatminima.objective.evaluators import ModelEvaluator
from flatminima.objective.losses import Loss
from flatminima.operators.middle_factor import MiddleFactor, of_columns
from flatminima.operators.output_hessian import check_log_probabilities, is_softmax, logistic_weights, row_weights

__all__ = ["check_likelihood", "sampled_scores"]


def check_likelihood(loss: Loss) -> None:
    """Refuse a loss that is not known as the negative logarithm of a distribution of labels.

    Raises:
        NotSupported: If it is none of cross_entropy, nll_loss, binary_cross_entropy_with_logits and mse_loss.
    """
    if not is_softmax(loss) and loss.name not in ("bce_with_logits", "mse"):
        raise NotSupported(
            "The Fisher information needs a loss that is the negative log-likelihood of labels (cross_entropy, nll_loss, "
            f"binary_cross_entropy_with_logits or mse_loss). Got {loss.name.replace('custom', 'a custom loss')}. "
            "Use GaussNewton or EmpiricalFisher, which need no distribution."
        )


def sampled_scores(
    evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor, num_samples: int, generator: torch.Generator
) -> MiddleFactor:
    r"""Return Λ = (1/S) Σ_s Σ_b s_bs s_bsᵀ of the scores s_bs = −∂ log p(y_bs | o_b)/∂o_b at labels drawn for each row.

    Args:
        evaluator: Tells the loss and its settings.
        evaluation: The batch's evaluation; of its targets only the weights count.
        outputs: The outputs, detached.
        num_samples: S.
        generator: Source of the labels, on the outputs' device.
    """
    loss, targets, options = evaluator.loss, evaluation.targets, evaluator.loss_options(outputs)
    if is_softmax(loss):
        check_log_probabilities(loss, outputs)
        weights = row_weights(outputs, targets, options)
        p = outputs.softmax(1)
        flat = p.movedim(1, -1).reshape(-1, p.shape[1])
        drawn = torch.multinomial(flat, num_samples, replacement=True, generator=generator).reshape(*weights.shape, -1)
        scale = (weights / num_samples).sqrt().unsqueeze(1)

        def categorical() -> Iterator[Tensor]:
            for s in range(num_samples):
                labels = drawn[..., s].unsqueeze(1)
                yield scale * p.scatter_add(1, labels, -torch.ones_like(labels, dtype=p.dtype))

        return of_columns(categorical, num_samples)
    shape = (num_samples, *outputs.shape)
    if loss.name == "mse":
        noise = torch.empty(shape, dtype=outputs.dtype, device=outputs.device).normal_(generator=generator)
        # The score is 2(o − y), and o − y is normal with variance ½.
        return of_columns(lambda: iter(noise * (2 / num_samples) ** 0.5), num_samples)
    p = outputs.sigmoid()
    ones = torch.bernoulli(p.expand(shape), generator=generator)
    scale = (logistic_weights(outputs, targets, options) / num_samples).sqrt()
    return of_columns(lambda: (scale * (p - y) for y in ones), num_samples)
