r"""The loss as a sum over terms, so that batches of unequal size or weight add up to one mean.

A training loop averages the batches' means. That is the mean over the data only when every batch has the same number of
terms, and for token losses or class weights it seldom has. Here each batch gives the *sum* of its terms and their number,

.. math:: L = \frac{\sum_b \text{total}_b}{\sum_b \text{num\_terms}_b},

where the number is what ``reduction="mean"`` divides by: elements, rows, targets that are not ignored, or their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Loss", "LossFunction"]

#: ``loss(outputs, targets)`` or, when its first parameter is called model, ``loss(model, batch)``; returns a scalar tensor.
LossFunction = Callable[..., Tensor]

# The standard losses of (outputs, targets): module class, functional form.
_STANDARD: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "cross_entropy": (nn.CrossEntropyLoss, functional.cross_entropy),
    "nll": (nn.NLLLoss, functional.nll_loss),
    "mse": (nn.MSELoss, functional.mse_loss),
    "bce_with_logits": (nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits),
    "bce": (nn.BCELoss, functional.binary_cross_entropy),
    "l1": (nn.L1Loss, functional.l1_loss),
    "smooth_l1": (nn.SmoothL1Loss, functional.smooth_l1_loss),
    "huber": (nn.HuberLoss, functional.huber_loss),
    "poisson_nll": (nn.PoissonNLLLoss, functional.poisson_nll_loss),
    "kl_div": (nn.KLDivLoss, functional.kl_div),
    "soft_margin": (nn.SoftMarginLoss, functional.soft_margin_loss),
    "hinge_embedding": (nn.HingeEmbeddingLoss, functional.hinge_embedding_loss),
    "multi_margin": (nn.MultiMarginLoss, functional.multi_margin_loss),
    "multilabel_margin": (nn.MultiLabelMarginLoss, functional.multilabel_margin_loss),
    "multilabel_soft_margin": (nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss),
}
_BY_CLASS = {module: name for name, (module, _) in _STANDARD.items()}
_BY_FUNCTION = {function: name for name, (_, function) in _STANDARD.items()}
# Losses whose ``weight`` is one factor per class (or broadcasts against one example), so that it fits every batch.
_CLASS_WEIGHTED = {"cross_entropy", "nll", "bce", "bce_with_logits", "multi_margin", "multilabel_soft_margin"}
# Losses that compare outputs and targets entry by entry: unequal shapes would broadcast in silence.
ELEMENTWISE = {"mse", "l1", "smooth_l1", "huber", "bce", "bce_with_logits", "poisson_nll", "kl_div", "soft_margin"}
_REDUCTIONS = ("mean", "sum", "batchmean")
# Losses that are never negative.
_NEVER_NEGATIVE = {"cross_entropy", "mse", "bce", "bce_with_logits", "l1", "smooth_l1", "huber"}
_LEGACY = ("size_average", "reduce")


@final
@dataclass(frozen=True)
class Loss:
    """A loss function with what is known of it.

    Attributes:
        function: What the user gave.
        name: The standard loss that it is ("cross_entropy", "mse", …), or "custom".
        options: The standard loss's settings (weight, ignore_index, label_smoothing, …).
        reduction: "mean" or "sum": whether the stated scalar is the mean over terms or their sum.
    """

    function: LossFunction
    name: str = "custom"
    options: Mapping[str, Any] = field(default_factory=dict)
    reduction: str = "mean"

    @classmethod
    def of(cls, function: LossFunction) -> Loss:
        """Recognise torch's standard losses: modules, functions, and ``functools.partial`` of the functions.

        Raises:
            TypeError: If ``function`` is not callable.
            ValueError: If it uses torch's long deprecated ``size_average`` or ``reduce``, or ``reduction="none"``.
        """
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"`loss` must be a callable such as torch.nn.functional.cross_entropy or nn.MSELoss(). Got {function!r}."
            )
        if isinstance(function, nn.Module):
            name, options = _BY_CLASS.get(type(function), "custom"), _module_options(function)
        else:
            inner: Any = function
            options = {}
            while isinstance(inner, partial) and not inner.args:
                inner, options = inner.func, {**inner.keywords, **options}
            name = _BY_FUNCTION.get(inner, "custom")
        if any(options.get(key) is not None for key in _LEGACY):
            raise ValueError("`loss` must not use size_average or reduce. Use reduction='mean' or 'sum'.")
        if name != "custom" and options.get("reduction", "mean") not in _REDUCTIONS:
            raise ValueError(
                f"`loss` must average or add up its terms (L is one number). Got reduction={options['reduction']!r}. "
                "Use reduction='mean' or 'sum'."
            )
        if name not in _CLASS_WEIGHTED and options.get("weight") is not None:
            name = "custom"  # one weight per entry of a particular batch: torch's own mean is all that is defined
        reduction = "sum" if options.get("reduction") == "sum" else "mean"
        return cls(function, name, options if name != "custom" else {}, reduction)

    @property
    def least(self) -> float:
        """What the loss cannot fall below: 0, or −∞ where that is not known."""
        return 0.0 if self.name in _NEVER_NEGATIVE else -math.inf

    def total(self, outputs: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Return the sum over a batch's terms as a scalar tensor, for a standard loss."""
        return self._reduced("sum", outputs, targets, options)

    def num_terms(self, outputs: Tensor, targets: Tensor, options: Mapping[str, Any]) -> float:
        """Return what ``reduction="mean"`` divides a batch's sum by, for a standard loss."""
        if self.name in ("cross_entropy", "nll"):
            return _class_terms(outputs, targets, options)
        if options.get("reduction") == "batchmean":
            return float(outputs.shape[0])
        return float(self._reduced("none", outputs, targets, options).numel())

    def _reduced(self, reduction: str, outputs: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Tensor:
        function = _STANDARD[self.name][1]
        return function(outputs, targets, **{**options, "reduction": reduction})


def _module_options(module: nn.Module) -> dict[str, Any]:
    """Return a standard loss module's settings under the names of the functional form's arguments."""
    names = (
        "weight", "pos_weight", "ignore_index", "label_smoothing", "reduction", "beta", "delta", "log_input", "full",
        "eps", "log_target", "margin", "p",
    )  # fmt: skip
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def _class_terms(outputs: Tensor, targets: Tensor, options: Mapping[str, Any]) -> float:
    """Count the targets that are not ignored, each with its class's weight."""
    if targets.is_floating_point():  # class probabilities: torch divides by the number of rows, whatever the weights
        return float(outputs.numel() / outputs.shape[1 if outputs.ndim > 1 else 0])
    kept = targets[targets != options.get("ignore_index", -100)]
    weight = options.get("weight")
    return float(kept.numel() if weight is None else weight[kept.long()].double().sum())
