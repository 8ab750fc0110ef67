"""The minimum over an orbit of rescalings of a sum that scales with the parameters: a trace, a squared norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatminima._checks import check_at_least, check_positive, check_shape
from flatminima.symmetries.balance import FloatArray, balance, unit_rows
from flatminima.symmetries.rescaling import Rescaling, RescalingMove
from flatminima.symmetries.units import IntArray

__all__ = ["OrbitMinimum", "minimize_over_rescalings", "unit_norm_move"]


@dataclass(frozen=True)
class OrbitMinimum:
    """The smallest sum over an orbit, and the move that leads there.

    Attributes:
        value: Infimum over the orbit, the same wherever on the orbit one starts. Where every unit has a minimiser it is attained.
        attained: Value at ``move``. It exceeds ``value`` only if some unit has no minimiser and weights on one side.
        move: The minimising move; units without a minimiser stay as they are.
        log_scales: Its log-scales, shape ``(dimension,)`` in float64.
        gradient: Certificate: largest relative imbalance abs(in − out) / (in + out) of a unit at the minimum.
        sweeps: Sweeps over all units.
        converged: Whether ``gradient`` is at most the tolerance.
        dead_units: Labels of the units without a minimiser: c is zero for all of a unit's row, or for all that reads it (a zero
            weight, or a second derivative that is zero on these data).
    """

    value: float
    attained: float
    move: RescalingMove
    log_scales: Tensor
    gradient: float
    sweeps: int
    converged: bool
    dead_units: tuple[str, ...]


def minimize_over_rescalings(
    symmetry: Rescaling, weights: Mapping[str, Tensor], *, sign: int, tol: float = 1e-12, max_sweeps: int = 1000
) -> OrbitMinimum:
    r"""Minimise a weighted sum over all log-scales u of a rescaling.

    .. math:: f(u) = \sum_p c_p \exp\big(2\,\mathrm{sign}\, a_p^\top u\big), \qquad \theta_p \to \theta_p\, e^{a_p^\top u}.

    sign = +1 with :math:`c = \theta^2` is the squared norm along the orbit; sign = −1 with c the diagonal of a Gauss-Newton
    matrix (or any second derivative) is its trace. Convex; per unit :math:`s^2 = \sqrt{\mathrm{in}/\mathrm{out}}`. Without
    biases and with one log-scale for each of the D − 1 hidden layers the minimum is :math:`D (\prod_d \mathrm{Tr}_d)^{1/D}`.
    Biases enter with exactly the exponents with which the symmetry acts on them. A sweep costs two passes over the weights.

    Args:
        symmetry: A symmetry of kind "layer" or "node".
        weights: c by parameter name, in the parameters' shapes, nonnegative; parameters left out weigh 0, parameters that do
            not scale (and names that the symmetry does not know) count as they are.
        sign: +1 or −1.
        tol: Largest relative imbalance of a unit to stop at.
        max_sweeps: Largest number of sweeps.

    Raises:
        ValueError: If ``sign`` is neither, a weight is negative or not finite, or a shape does not fit.
        TypeError: If ``symmetry`` is no rescaling.

    Example:
        >>> from torch import nn
        >>> from flatminima.symmetries import find_symmetries
        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> layer = find_symmetries(net, torch.ones(2, 1)).of_kind("layer")[0]
        >>> weights = {"0.weight": torch.tensor([[4.0]]), "2.weight": torch.tensor([[9.0]])}
        >>> minimize_over_rescalings(layer, weights, sign=-1).value  # 2 (4 · 9)^(1/2)
        12.0
    """
    if not isinstance(symmetry, Rescaling) or symmetry.statistics:
        raise TypeError(f"`symmetry` must be a rescaling of kind 'layer' or 'node'. Got {symmetry!r}.")
    if sign not in (1, -1):
        raise ValueError(f"`sign` must be +1 (squared parameters) or -1 (second derivatives). Got {sign!r}.")
    check_positive("tol", tol)
    check_at_least("max_sweeps", max_sweeps, 1)
    rows, columns, values = _entries(symmetry, weights)
    if sign == -1:
        rows, columns = columns, rows
    found = balance(rows, columns, values, symmetry.layers.numpy(), tol, max_sweeps)
    u = torch.from_numpy(found.u)
    dead = tuple(label for label, alive in zip(symmetry.labels, found.has_minimum, strict=True) if not alive)
    return OrbitMinimum(
        value=found.infimum,
        attained=found.attained,
        move=symmetry.move(u),
        log_scales=u,
        gradient=found.gradient,
        sweeps=found.sweeps,
        converged=found.gradient <= tol,
        dead_units=dead,
    )


def unit_norm_move(
    symmetry: Rescaling, state: Mapping[str, Tensor], only: Collection[str] | None = None
) -> tuple[RescalingMove, tuple[str, ...]]:
    """Return the move after which the row and bias of every unit have norm 1, and the units whose row is zero.

    Args:
        symmetry: A rescaling of kind "node" or "norm-scale".
        state: Its parameters.
        only: Labels of the units to normalise; all by default.

    Raises:
        NotSupported: If no such move exists (a unit that feeds back on itself).
    """
    chosen = np.array([only is None or label in only for label in symmetry.labels])
    rows, columns, values = _entries(symmetry, {name: state[name].detach().double().square() for name in symmetry.parameters})
    produces = rows >= 0
    u, has_row = unit_rows(rows[produces], columns[produces], values[produces], symmetry.layers.numpy(), chosen)
    dead = tuple(label for label, alive in zip(symmetry.labels, has_row, strict=True) if not alive)
    return symmetry.move(torch.from_numpy(u)), dead


def _entries(symmetry: Rescaling, weights: Mapping[str, Tensor]) -> tuple[IntArray, IntArray, FloatArray]:
    """Return, for entries that follow the same units: the unit of exponent +1, the unit of exponent −1, the sum of weights."""
    all_rows: list[IntArray] = []
    all_columns: list[IntArray] = []
    all_values: list[FloatArray] = []
    for name, weight in weights.items():
        if name in symmetry.layout.shapes:
            check_shape(f"weights[{name!r}]", weight, tuple(symmetry.layout.shapes[name]))
        c = weight.detach().double().cpu()
        if not bool((c >= 0).all()) or not bool(torch.isfinite(c).all()):
            raise ValueError(
                f"`weights` must be nonnegative and finite (the sum is unbounded below otherwise). Got {float(c.min()):g} "
                f"as the smallest of {name!r}. Use the diagonal of a positive semidefinite matrix, such as Gauss-Newton."
            )
        numbers = {+1: torch.full([1] * c.ndim, -1), -1: torch.full([1] * c.ndim, -1)}
        for role in symmetry.roles.get(name, ()):
            numbers[role.exponent] = role.variables
        constant = [a for a in range(c.ndim) if all(n.shape[a] == 1 for n in numbers.values())]
        c = c.sum(dim=constant, keepdim=True) if constant else c
        for found, number in ((all_rows, numbers[+1]), (all_columns, numbers[-1])):
            found.append(number.expand(c.shape).reshape(-1).numpy())
        all_values.append(c.reshape(-1).numpy())
    if not all_values:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, np.zeros(0)
    return _merged(np.concatenate(all_rows), np.concatenate(all_columns), np.concatenate(all_values), symmetry.dimension)


def _merged(rows: IntArray, columns: IntArray, values: FloatArray, dimension: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Add up the weights of equal pairs of units where there are few pairs (few layers, many weights)."""
    size = dimension + 1
    if size**2 > len(values):
        return rows, columns, values
    sums = np.bincount((rows % size) * size + columns % size, weights=values, minlength=size**2).astype(np.float64)
    pairs = np.flatnonzero(sums)
    i, j = np.divmod(pairs, size)
    i[i == dimension], j[j == dimension] = -1, -1
    return i.astype(np.int64), j.astype(np.int64), sums[pairs]
