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

__all__ = ["check_equivalent", "random_equivalent", "relative_difference"]


def check_equivalent(a: nn.Module, b: nn.Module, inputs: object, *, rtol: float = 1e-10, shift_invariant: bool = False) -> float:
    """Check that two networks have the same outputs, in eval mode and float64, on copies.

    Args:
        a: One network.
        b: The other.
        inputs: Tensor, tuple of positional inputs or dict of keyword inputs.
        rtol: Largest relative difference that passes. Networks whose parameters are float32 differ by their rounding: allow 1e-5.
        shift_invariant: Compare ``log_softmax`` of the outputs over the classes (axis 1, or 0 of a vector) instead.

    Returns:
        max abs(out_a − out_b) / max abs(out_a), over all outputs.

    Raises:
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
    difference = relative_difference(first, second, shift_invariant=shift_invariant)
    if not difference <= rtol:
        raise NotEquivalent(
            f"`a` and `b` must have the same outputs to {rtol:g} relative. Got a difference of {difference:.3g}. "
            "The move between them is not a symmetry of this network on these inputs, or the parameters' dtype is too coarse."
        )
    return difference


def relative_difference(first: list[Tensor], second: list[Tensor], *, shift_invariant: bool = False) -> float:
    """Return the largest difference over all outputs, relative to the largest entry of the first; NaN where one is not finite."""
    if [t.shape for t in first] != [t.shape for t in second]:
        return float("inf")
    worst = 0.0
    for x, y in zip(first, second, strict=True):
        if shift_invariant:
            x, y = (t.log_softmax(dim=1 if t.ndim > 1 else 0) for t in (x, y))
        if not x.numel():
            continue
        gap, size = float((x - y).abs().max()), float(x.abs().max())
        ratio = gap / size if size > 0 else (0.0 if gap == 0 else float("inf"))
        worst = max(worst, ratio) if ratio == ratio else float("nan")
        if worst != worst:
            break
    return worst


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
