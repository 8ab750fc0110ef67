"""Dividing a single kind of symmetry out of an objective, where a canonical form of all of them is not what is wanted."""

from __future__ import annotations

from flatminima.objective import Objective
from flatminima.params import clean_name
from flatminima.symmetries.canonical import unit_variance_move
from flatminima.symmetries.discovery import find_symmetries, model_at
from flatminima.symmetries.move import Composition
from flatminima.symmetries.rescaling import Rescaling
from flatminima.symmetries.softmax_shift import SoftmaxShift

__all__ = ["centre_classes", "normalize_statistics"]


def centre_classes(objective: Objective) -> Objective:
    """Return the objective with the last layer's mean over the classes subtracted, where that leaves the loss unchanged.

    That is so under softmax cross-entropy, under any loss of outputs ``(examples, classes)`` that does not see the shift, and
    for a model that ends in a softmax; see `find_symmetries`. The predictions stay. Other objectives are returned as they are.
    """
    if not objective.has_model:
        return objective
    shifts = [s for s in find_symmetries(objective) if isinstance(s, SoftmaxShift)]
    model = model_at(objective)
    state = dict(model.state_dict())
    return objective.with_model(Composition([s.centring(state) for s in shifts]).apply(model)) if shifts else objective


def normalize_statistics(objective: Objective) -> Objective:
    """Return the objective with every channel that a BatchNorm reads scaled to running variance + eps = 1.

    The function is the same. An objective without such channels is returned as it is.
    """
    if not objective.has_model:
        return objective
    scales = [s for s in find_symmetries(objective).of_kind("norm-scale") if isinstance(s, Rescaling)]
    if not scales:
        return objective
    model = model_at(objective)
    state = {clean_name(name): tensor.detach().double() for name, tensor in model.state_dict().items()}
    return objective.with_model(Composition([unit_variance_move(s, state) for s in scales]).apply(model))
