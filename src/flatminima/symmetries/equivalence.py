"""Are two networks the same function? And: another network that is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flatminima._checks import check_generator, check_positive
from flatminima._errors import NotEquivalent
from flatminima.objective.session import copied
from flatminima.params import clean_name
from flatminima.symmetries.inputs import Call, double_copy, kept_rng, outputs
from flatminima.symmetries.move import Composition, unwrapped
from flatminima.symmetries.symmetry import Symmetry

__all__ = ["check_equivalent", "check_not_empty", "random_equivalent", "relative_difference"]

#: Entries smaller than this part of the median entry count as that large: rounding errors are those of what cancelled.
_CANCELLED = 1e-4


def check_equivalent(a: nn.Module, b: nn.Module, inputs: object, *, rtol: float = 1e-10, shift_invariant: bool = False) -> float:
    """Check that two networks have the same outputs, in eval mode and float64, on copies.

    Args:
        a: One network.
        b: The other.
        inputs: Tensor, tuple of positional inputs or dict of keyword inputs.
        rtol: Largest relative difference that passes. Networks whose parameters are float32 differ by their rounding: allow 1e-5.
        shift_invariant: Compare up to one number that is added to all classes (axis 1, or 0 of a vector) of an example: equal
            ``log_softmax``.

    Returns:
        The largest of max abs(out_a − out_b) / max abs(out_a) over all entries of the outputs, each maximum over the examples.

    Raises:
        ValueError: If there are no examples.
        NotEquivalent: If it is larger than ``rtol``, or not a number.
        TypeError: If ``inputs`` has another form, or a model returns no tensor.

    Example:
        >>> layer = torch.nn.Linear(2, 3)
        >>> check_equivalent(layer, layer, torch.ones(1, 2))
        0.0
    """
    check_positive("rtol", rtol, allow_zero=True)
    call = Call.of(inputs, "inputs")
    with kept_rng(a):
        first, second = outputs(double_copy(a), call), outputs(double_copy(b), call)
    check_not_empty(first, "inputs")
    difference = relative_difference(first, second, shift_invariant=shift_invariant)
    if not difference <= rtol:
        raise NotEquivalent(
            f"`a` and `b` must have the same outputs to {rtol:g} relative. Got a difference of {difference:.3g}. "
            "The move between them is not a symmetry of this network on these inputs, or the parameters' dtype is too coarse."
        )
    return difference


def relative_difference(first: list[Tensor], second: list[Tensor], *, shift_invariant: bool = False) -> float:
    """Return the largest difference over all entries of the outputs, relative to that entry's size; NaN where one is not finite.

    The size of an entry is its largest absolute value over the examples (axis 0), so that one large class hides no other; where
    cancellation leaves next to nothing, it is a small part of what is usual among the entries.
    """
    if [t.shape for t in first] != [t.shape for t in second]:
        return float("inf")
    worst = 0.0
    for x, y in zip(first, second, strict=True):
        if not x.numel():
            continue
        gap, size = y - x, x.abs()
        if shift_invariant:
            size = torch.maximum(size, y.abs())  # both enter the gap's rounding
            gap = _without_shift(gap, size, axis=1 if x.ndim > 1 else 0)
        if x.ndim > 1:
            gap, size = gap.abs().amax(0), size.amax(0)
        size = size.clamp(min=_CANCELLED * float(size.median()))
        ratio = torch.where(gap == 0, 0.0, gap.abs() / size).max()  # NaN stays NaN, and any gap is large beside zero
        if bool(ratio.isnan()):
            return float("nan")
        worst = max(worst, float(ratio))
    return worst


def _without_shift(gap: Tensor, size: Tensor, *, axis: int) -> Tensor:
    """Subtract from every example's gap that of its class of the smallest size, where the shift is least rounded."""
    return gap - gap.gather(axis, size.argmin(dim=axis, keepdim=True))


def check_not_empty(found: list[Tensor], name: str) -> None:
    """Raise ValueError if outputs hold no number: a comparison of nothing says nothing."""
    if not any(t.numel() for t in found):
        raise ValueError(
            f"`{name}` must hold at least one example (without outputs there is nothing to compare). "
            f"Got outputs of shape {', '.join(str(tuple(t.shape)) for t in found)}."
        )


def random_equivalent(
    model: nn.Module,
    symmetries: Symmetry | Iterable[Symmetry],
    *,
    generator: torch.Generator | None = None,
    scale: float = 1.0,
) -> nn.Module:
    """Return a copy of the model at another point with the same function: one random move of each symmetry, composed.

    Args:
        model: The network in which the symmetries were found, at any point. It is not changed.
        symmetries: One or several symmetries.
        generator: Source of randomness; None is torch's global generator.
        scale: Standard deviation of the log of each factor.

    Raises:
        ValueError: If ``model`` is another network, or ``scale`` is negative.

    Example:
        >>> from flatminima.symmetries import find_symmetries
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).double()
        >>> symmetries = find_symmetries(net, torch.randn(3, 2, dtype=torch.float64))
        >>> moved = random_equivalent(net, symmetries, scale=2.0)
        >>> check_equivalent(net, moved, torch.randn(3, 2)) < 1e-10
        True
    """
    check_generator(generator)
    check_positive("scale", scale, allow_zero=True)
    chosen = [symmetries] if isinstance(symmetries, Symmetry) else list(symmetries)
    for symmetry in chosen:
        if not isinstance(symmetry, Symmetry):
            raise TypeError(f"`symmetries` must hold results of find_symmetries. Got {type(symmetry).__name__}.")
    if not chosen:
        return copied(unwrapped(model))
    watched = {name for s in chosen if s.kind in ("norm-scale", "softmax shift") for name in (*s.parameters, *s.buffers)}
    named: list[tuple[str, Tensor]] = [*unwrapped(model).named_parameters(), *unwrapped(model).named_buffers()]
    state = {clean_name(name): tensor.detach() for name, tensor in named if clean_name(name) in watched}
    moves = []
    for symmetry in chosen:
        moves.append(symmetry.random(generator, scale, state=state))
        state = moves[-1].apply_state(state)
    return Composition(moves).apply(model)
