"""The Gauss–Newton matrix of a classifier, split by what its examples' classes explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from flatminima._checks import check_at_least
from flatminima._errors import NotSupported
from flatminima.objective import Evaluation, Objective
from flatminima.operators.base import LinearOperator
from flatminima.operators.gauss_newton import GaussNewton
from flatminima.operators.low_rank import LowRank
from flatminima.operators.middle_factor import MiddleFactor, MiddleFactors
from flatminima.operators.output_hessian import check_outputs, is_softmax, loss_hessian, row_weights
from flatminima.operators.sandwich import Sandwich

__all__ = ["ClassSplit", "by_class", "class_split"]


class ClassSplit(NamedTuple):
    """Four matrices that add up to G; see ``class_split``.

    Attributes:
        between: Second moment of the class means, of rank at most C: the outliers of the spectrum.
        cross: Covariance of the cross-class means around their class's, of rank at most C(C − 2).
        within: What the examples add around their cross-class means: the bulk.
        own: Second moment of the means of gradients at the class's own label, of rank at most C.
    """

    between: LinearOperator
    cross: LinearOperator
    within: LinearOperator
    own: LinearOperator


def class_split(objective: Objective, *, max_bytes: int = 2**31) -> ClassSplit:
    r"""Split G into between-class, cross-class, within and own-label parts, which add up to G.

    With the gradient of example i of class c at label c', and the weight with which it stands in G,

    .. math:: g_{icc'} = J_i^\top (p_i - e_{c'}), \quad w_{icc'} = \tfrac1T\, p_{ic'}, \quad
              G = \sum_{i,c,c'} w_{icc'}\, g_{icc'} g_{icc'}^\top,

    and the weighted means :math:`g_{cc'}` over i (weight :math:`w_{cc'} = \sum_i w_{icc'}`) and :math:`g_c` of those over
    c' ≠ c (weight :math:`w_c = \sum_{c' \ne c} w_{cc'}`):

    .. math::
        \text{between} &= \sum_c w_c\, g_c g_c^\top, &
        \text{cross} &= \sum_{c' \ne c} w_{cc'} (g_{cc'} - g_c)(g_{cc'} - g_c)^\top, \\
        \text{within} &= \sum_{i,c,c'} w_{icc'} (g_{icc'} - g_{cc'})(g_{icc'} - g_{cc'})^\top, &
        \text{own} &= \sum_c w_{cc}\, g_{cc} g_{cc}^\top.

    All four are positive semi-definite. The first, second and fourth are held by their mean vectors; *within* is G less these, by
    products, and an objective's l2 term belongs to it. Class weights and ignored targets enter w as they do the loss.

    Args:
        objective: Softmax cross-entropy, or nll_loss, with targets that are class numbers. The point θ is read now.
        max_bytes: Most memory for the C² mean vectors of n numbers, which are formed by at most C² backward passes per batch.

    Raises:
        NotSupported: If the loss has no classes, or targets are probabilities.
        ValueError: If the mean vectors would not fit.

    References:
        Papyan (2019), Measurements of three-level hierarchical structure in the outliers in the spectrum of deepnet Hessians;
        Papyan (2020), Traces of class/cross-class structure pervade deep learning spectra, eq. 6.4.
    """
    G, max_bytes = GaussNewton(objective), check_at_least("max_bytes", max_bytes, 1)
    _check_classes(objective)
    num_classes: list[int] = []

    def sums(evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> Tensor:
        outputs = check_outputs(objective.loss, evaluation.outputs)
        num_classes[:] = [outputs.shape[1]]
        _check_memory(outputs.shape[1], G, max_bytes)
        return _weighted_sums(G, evaluation, outputs, leaves)

    rows = objective.integrate(sums, G.theta)  # (C², n + 1): Σ w g, and Σ w
    C = num_classes[0]
    total, w = rows[:, :-1].reshape(C, C, -1), rows[:, -1].reshape(C, C)
    is_own = torch.eye(C, dtype=torch.bool, device=w.device)
    off, w_off = total.masked_fill(is_own[..., None], 0), w.masked_fill(is_own, 0)
    class_mean = _mean(off.sum(1), w_off.sum(1))
    cross_mean = _mean(total, w)
    parts = (
        w_off.sum(1).sqrt()[:, None] * class_mean,
        (w_off.sqrt()[..., None] * (cross_mean - class_mean[:, None])).reshape(C * C, -1)[~is_own.flatten()],
        w[is_own].sqrt()[:, None] * cross_mean[is_own],
    )
    between, cross, own = (LowRank(part.T.contiguous(), G.blocks) for part in parts)
    return ClassSplit(between, cross, G - between - cross - own, own)


def by_class(objective: Objective) -> dict[int, LinearOperator]:
    r"""Return the part of G that the examples of each class bring, by class; these add up to G.

    .. math:: G_c = \frac1T \sum_{b:\, y_b = c} J_b^\top \Lambda_b J_b

    with the T of all data. Positive semi-definite. An l2 term λ is shared out evenly, λ/C each.

    Args:
        objective: Softmax cross-entropy, or nll_loss, with targets that are class numbers. The point θ is read now.

    Raises:
        NotSupported: If the loss has no classes, or targets are probabilities.
    """
    _check_classes(objective)
    seen: set[int] = set()

    def classes(evaluation: Evaluation, _leaves: Mapping[str, Tensor]) -> Tensor:
        outputs = check_outputs(objective.loss, evaluation.outputs)
        _check_numbers(evaluation)
        weights = row_weights(outputs, evaluation.targets, _options(objective, outputs))
        seen.update(int(c) for c in evaluation.targets[weights > 0].unique())
        return torch.zeros(())

    objective.integrate(classes, gradients=False)
    return {c: _ClassGaussNewton(objective, c, len(seen)) for c in sorted(seen)}


@final
class _ClassGaussNewton(Sandwich):
    """The Gauss–Newton matrix of the examples of one class."""

    label = "Gauss-Newton"

    def __init__(self, objective: Objective, number: int, num_classes: int) -> None:
        super().__init__(objective)
        self.number, self.l2 = number, objective.l2 / num_classes

    def middle_factors(self) -> MiddleFactors:
        def middle_factor(evaluation: Evaluation, outputs: Tensor) -> MiddleFactor:
            whole = loss_hessian(self.evaluator, evaluation, outputs)
            mask = (evaluation.targets == self.number).unsqueeze(1).to(outputs.dtype)
            return MiddleFactor(
                product=lambda u: mask * whole.product(u),
                columns=lambda: ((mask * column, signs) for column, signs in whole.columns()),
                num_columns=whole.num_columns if bool(mask.any()) else 0,
            )

        return middle_factor


def _weighted_sums(G: GaussNewton, evaluation: Evaluation, outputs: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
    """Return Σ_i w g_icc' and Σ_i w of one batch, ``(C², n + 1)``, without the factor 1/T."""
    _check_numbers(evaluation)
    parameters, p, targets = list(leaves.values()), outputs.detach().softmax(1), evaluation.targets
    weights = row_weights(p, targets, _options(G.objective, outputs))
    loss_hessian(G.evaluator, evaluation, outputs.detach())  # refuses outputs that are no log-probabilities
    C = p.shape[1]
    result = torch.zeros(C, C, G.size + 1, dtype=G.dtype, device=G.device)
    for c in targets[weights > 0].unique().tolist():
        mask = weights * (targets == c)
        for k in range(C):
            w = mask * p[:, k]
            column = p.clone()
            column[:, k] -= 1
            if outputs.requires_grad:
                gradients = torch.autograd.grad(
                    outputs, parameters, w.unsqueeze(1) * column, retain_graph=True, materialize_grads=True
                )
                result[c, k, :-1] = G.space.flatten(gradients, G.dtype)
            result[c, k, -1] = w.sum()
    return result.reshape(C * C, -1)


def _mean(total: Tensor, weight: Tensor) -> Tensor:
    """Return total / weight, and 0 where there is nothing."""
    return torch.where(weight > 0, 1 / weight, 0.0)[..., None] * total


def _options(objective: Objective, outputs: Tensor) -> dict[str, object]:
    return objective.model_evaluator("The loss").loss_options(outputs)


def _check_classes(objective: Objective) -> None:
    GaussNewton(objective)  # refuses closures and losses that call the model
    if not is_softmax(objective.loss):
        raise NotSupported(f"A split by classes needs a loss of classes: cross_entropy or nll_loss. Got {objective.loss.name}.")


def _check_numbers(evaluation: Evaluation) -> None:
    if evaluation.targets.is_floating_point():
        raise NotSupported("A split by classes needs targets that are class numbers. Got class probabilities.")


def _check_memory(num_classes: int, G: GaussNewton, max_bytes: int) -> None:
    needed = 3 * num_classes**2 * (G.size + 1) * G.dtype.itemsize  # a batch's sums, those of all, and the parts
    if needed > max_bytes:
        raise ValueError(
            f"`max_bytes` must be at least {needed} (the mean vectors of {num_classes}² pairs of classes). Got {max_bytes}. "
            "Split a block of parameters: Objective(..., params=...)."
        )
