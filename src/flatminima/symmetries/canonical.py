"""Canonical forms: one representative of all networks that are the same function."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from flatminima._checks import check_one_of
from flatminima._errors import NotSupported
from flatminima.objective import Objective
from flatminima.params import clean_name
from flatminima.symmetries.discovery import find_symmetries, model_at
from flatminima.symmetries.move import Composition, Move, unwrapped
from flatminima.symmetries.orbit import minimize_over_rescalings, unit_norm_move
from flatminima.symmetries.rescaling import Rescaling, RescalingMove
from flatminima.symmetries.softmax_shift import SoftmaxShift
from flatminima.symmetries.symmetry import Symmetries
from flatminima.symmetries.zero_rows import clearing_move

__all__ = ["FORMS", "CanonicalMove", "canonical_move", "canonicalize", "unit_variance_move"]

#: The canonical forms.
FORMS = ("min-norm", "unit-norm", "min-trace")


@dataclass(frozen=True)
class CanonicalMove:
    """The move to a canonical form.

    Attributes:
        form: One of ``FORMS``.
        move: Centring of the classes, then normalised statistics, then zeros for what reads a row of zeros, then the rescaling
            of the units.
        dead_units: Units for which the form has no representative: nothing comes in, nothing goes out, or (for "min-trace") the
            loss does not feel them on these data. Their row is brought to norm 1, if it is not zero.
        gradient: Certificate of the minimum: largest relative imbalance of a unit (0 for unit-norm, which is exact).
        converged: Whether it is at most 1e-12.
    """

    form: str
    move: Move
    dead_units: tuple[str, ...]
    gradient: float
    converged: bool


@overload
def canonicalize(
    model: nn.Module, form: str = ..., *, example_inputs: object = ..., loss: object = ..., symmetries: Symmetries | None = ...
) -> nn.Module: ...


@overload
def canonicalize(
    model: Objective, form: str = ..., *, example_inputs: object = ..., loss: object = ..., symmetries: Symmetries | None = ...
) -> Objective: ...


def canonicalize(
    model: nn.Module | Objective,
    form: str = "min-norm",
    *,
    example_inputs: object = None,
    loss: object = None,
    symmetries: Symmetries | None = None,
) -> nn.Module | Objective:
    r"""Return the representative of a network among all networks that its rescalings and shifts make of it.

    The function (the loss, where the classes are centred) is the same. Two networks that differ by rescalings and shifts have
    the same representative, so any measure evaluated there is invariant; doing it twice changes nothing. Forms:

    - "min-norm": least :math:`\sum_p \theta_p^2`; every unit's incoming and outgoing weights have the same norm.
    - "unit-norm": every hidden unit's row together with its bias has norm 1.
    - "min-trace": least trace of the Gauss-Newton matrix; needs an objective.

    If the loss is softmax cross-entropy, the last layer is centred over the classes first. Channels that a BatchNorm reads
    are brought to running variance 1 (variance + eps = 1; "unit-norm": rows of norm 1, or as near to it as a nonnegative variance
    allows), since no least norm or trace exists there. Permutations are not divided out: hidden units keep their order.

    Args:
        model: A network, or an objective: the result is of the same kind, and the argument is not changed.
        form: See above.
        example_inputs: Inputs for finding the symmetries; those of the objective by default.
        loss: The loss, for a network without an objective; see `find_symmetries`.
        symmetries: Symmetries found before, instead of finding them again.

    Raises:
        ValueError: If ``form`` is unknown, or needs an objective.
        TypeError: If neither example inputs nor symmetries are given.

    Warns:
        UserWarning: If the form has no representative for some units: nothing comes in or nothing goes out, or (for "min-trace")
            the loss does not feel them on these data. Their row is brought to norm 1 instead; one that is zero stays, and what
            reads it is set to zero, since it multiplies nothing.

    References:
        Stock et al. (2019), "Equi-normalization of Neural Networks", for "min-norm", here with biases.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
        >>> with torch.no_grad():
        ...     _ = net[0].weight.fill_(8.0), net[2].weight.fill_(0.5)
        >>> [round(p.item(), 12) for p in canonicalize(net, "min-norm", example_inputs=torch.ones(2, 1)).parameters()]
        [2.0, 2.0]
    """
    check_one_of("form", form, FORMS)
    found = find_symmetries(model, example_inputs, loss=loss) if symmetries is None else symmetries
    canonical = canonical_move(model, found, form)
    if canonical.dead_units:
        shown = ", ".join(canonical.dead_units[:5]) + (", …" if len(canonical.dead_units) > 5 else "")
        warnings.warn(
            f"{len(canonical.dead_units)} dead units have no {form} representative (rows of norm 1 instead, and zeros "
            f"for what reads a row of zeros): {shown}.",
            UserWarning,
            stacklevel=2,
        )
    if isinstance(model, Objective):
        return model.with_model(canonical.move.apply(model_at(model)))
    return canonical.move.apply(model)


def canonical_move(model: nn.Module | Objective, symmetries: Symmetries, form: str = "min-norm") -> CanonicalMove:
    """Return the move to a canonical form with its certificate and dead units; see `canonicalize`.

    Raises:
        ValueError: If ``form`` is unknown, or needs an objective.
    """
    check_one_of("form", form, FORMS)
    if form == "min-trace" and not isinstance(model, Objective):
        raise ValueError("`model` must be an Objective for form 'min-trace' (the trace is of a loss on data). Got a module.")
    network = model_at(model) if isinstance(model, Objective) else unwrapped(model)
    state = {clean_name(name): p.detach() for name, p in network.named_parameters()}
    state |= {clean_name(name): b.detach() for name, b in network.named_buffers()}
    state = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
    moves: list[Move] = []
    dead: tuple[str, ...] = ()
    gradient, converged = 0.0, True

    def add(move: Move) -> None:
        nonlocal state
        moves.append(move)
        state = move.apply_state(state)

    for shift in symmetries.of_kind("softmax shift"):
        if isinstance(shift, SoftmaxShift):
            add(shift.centring(state))
    norm = [s for s in symmetries.of_kind("norm-scale") if isinstance(s, Rescaling)]
    if form != "unit-norm":
        for symmetry in norm:
            add(unit_variance_move(symmetry, state))
    for symmetry in (s for s in symmetries.of_kind("node") if isinstance(s, Rescaling)):
        clearing = clearing_move(symmetry, state)
        if clearing is not None:
            add(clearing)
        if form == "unit-norm":
            move, dead = unit_norm_move(symmetry, state)
        else:
            if isinstance(model, Objective) and form == "min-trace":
                outside = [name for name in symmetry.parameters if name not in model.space.shapes]
                if outside:
                    raise NotSupported(
                        f"Form 'min-trace' needs all parameters that the rescaling touches. Got a selection without "
                        f"{', '.join(outside[:3])}. Use form='min-norm'."
                    )
                minimum = minimize_over_rescalings(symmetry, _gauss_newton_diagonal(model, Composition(moves)), sign=-1)
            else:
                squares = {name: state[name].square() for name in symmetry.roles}
                minimum = minimize_over_rescalings(symmetry, squares, sign=+1)
            dead, gradient, converged = minimum.dead_units, minimum.gradient, minimum.converged
            add(minimum.move)
            move, _ = unit_norm_move(symmetry, state, only=set(dead))
        add(move)
    if form == "unit-norm":
        for symmetry in norm:
            move, zero = unit_norm_move(symmetry, state)
            dead += zero
            add(symmetry.move(torch.maximum(move.log_scales, symmetry.lowest(state))))
    return CanonicalMove(form, Composition(moves), dead, gradient, converged)


def unit_variance_move(symmetry: Rescaling, state: Mapping[str, Tensor]) -> RescalingMove:
    """Return the move to var + eps = 1 in the first statistic of every channel, as far as all variances stay nonnegative."""
    wanted = torch.full((symmetry.dimension + 1,), torch.nan, dtype=torch.float64)
    for name, statistic in symmetry.statistics.items():
        target = -0.5 * torch.log(state[name].cpu() + statistic.eps)
        numbers = statistic.variables
        wanted[numbers] = torch.where(wanted[numbers].isnan(), target, wanted[numbers])
    return symmetry.move(torch.maximum(wanted[:-1], symmetry.lowest(state)))


def _gauss_newton_diagonal(objective: Objective, before: Move) -> dict[str, Tensor]:
    """Return the diagonal of the Gauss-Newton matrix at the moved objective, by parameter."""
    from flatminima.estimators import diagonal
    from flatminima.operators import GaussNewton

    moved = objective.with_model(before.apply(model_at(objective)))
    estimate = diagonal(GaussNewton(moved))
    # The l2 term is no part of the function: its diagonal does not scale with the parameters.
    return objective.space.unflatten((estimate.value - objective.l2).clamp(min=0))
