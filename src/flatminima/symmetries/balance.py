r"""Balancing: the smallest sum of nonnegative weights over all rescalings of the units.

With :math:`c_{ij} \ge 0` the total weight of the entries that unit i produces and unit j is read through, and
:math:`c_{i0}, c_{0j}` where there is no second unit, the sum to minimise is

.. math:: f(u) = \sum_{ij} c_{ij}\, e^{2 (u_i - u_j)}, \qquad u_0 = 0,

which is the balancing of the matrix c: convex, and at the minimum every unit's row sum equals its column sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flatminima._errors import NotSupported
from flatminima.symmetries.units import IntArray

__all__ = ["Balanced", "balance", "unit_rows"]

FloatArray = npt.NDArray[np.float64]
#: A sweep that leaves more than this part of the imbalance is followed by a Newton step.
_SLOW = 0.2


@dataclass(frozen=True)
class Balanced:
    """A minimiser of f.

    Attributes:
        u: Log-scales, shape ``(variables,)``; 0 where there is no minimiser.
        infimum: Infimum of f. Entries between units without a minimiser can be made as small as one likes and count as 0.
        attained: f at ``u``.
        gradient: Largest abs(row sum − column sum) / (row sum + column sum) over the units with a minimiser.
        sweeps: Number of sweeps over all units.
        has_minimum: Which units have a minimiser, shape ``(variables,)``.
    """

    u: FloatArray
    infimum: float
    attained: float
    gradient: float
    sweeps: int
    has_minimum: npt.NDArray[np.bool_]


def balance(rows: IntArray, columns: IntArray, weights: FloatArray, layers: IntArray, tol: float, max_sweeps: int) -> Balanced:
    """Minimise f by sweeps over the layers, each unit in closed form, and Newton steps where sweeps are slow.

    A unit has a minimiser if and only if its weights lie on cycles of the directed graph of c (with unit 0): otherwise moving
    it one way makes them vanish.

    Args:
        rows: Unit i of every weight, numbered from 0; −1 for none. Shape ``(weights,)``.
        columns: Unit j of every weight, likewise.
        weights: c, nonnegative, shape ``(weights,)``.
        layers: Layer of every unit, shape ``(variables,)``; units of a layer are treated at once.
        tol: Largest gradient (see ``Balanced``) to stop at.
        max_sweeps: Largest number of sweeps.
    """
    size = len(layers)
    matrix = _matrix(rows, columns, weights, size)
    cyclic, has_minimum = _cyclic_part(matrix)
    constant = float(weights[rows == columns].sum())
    problem = _Problem(cyclic, layers)
    x = np.ones(size + 1)  # x = exp(2 u), the ground last
    gradient, sweeps = problem.gradient(x), 0
    while gradient > tol and sweeps < max_sweeps:
        before = gradient
        x = problem.swept(x)
        sweeps += 1
        gradient = problem.gradient(x)
        if tol < gradient and gradient > _SLOW * before:
            x = problem.newton(x)
            gradient = problem.gradient(x)
    infimum, attained = (constant + float(x @ (m @ (1 / x))) for m in (cyclic, matrix))
    return Balanced(0.5 * np.log(x[:-1]), infimum, attained, gradient, sweeps, has_minimum)


def unit_rows(
    rows: IntArray, columns: IntArray, weights: FloatArray, layers: IntArray, chosen: npt.NDArray[np.bool_]
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Find u with row sums Σ_j c_ij exp(2 (u_i − u_j)) = 1: one pass for a chain, few where layers feed back.

    Args:
        rows: See `balance`.
        columns: See `balance`.
        weights: See `balance`.
        layers: See `balance`.
        chosen: Units to normalise, shape ``(variables,)``; the others stay.

    Returns:
        u ``(variables,)``, and which units have a row to normalise.

    Raises:
        NotSupported: If there is no such u.
    """
    size = len(layers)
    problem = _Problem(_matrix(rows, columns, weights, size, keep_diagonal=True), layers)
    has_row = problem.row_sums(np.ones(size + 1))[:-1] > 0
    x = np.ones(size + 1)
    for _ in range(1000):
        before = x.copy()
        for layer, by_row, _ in problem.layers:
            total = by_row @ (1 / x)
            x[layer] = np.divide(1.0, total, out=np.ones_like(total), where=(total > 0) & chosen[layer])
        if np.allclose(x, before, rtol=1e-14, atol=0):
            return 0.5 * np.log(x[:-1]), has_row
    raise NotSupported(
        "Rows of norm 1 do not exist for this network: a unit feeds back on itself too strongly. Use form='min-norm'."
    )


class _Problem:
    """The matrix c with unit 0 last, cut into the layers' rows and columns."""

    def __init__(self, matrix: Any, layers: IntArray) -> None:
        self.matrix = matrix
        self.transposed = matrix.T.tocsr()
        self.layers = []
        for layer in np.unique(layers):
            units = np.flatnonzero(layers == layer)
            self.layers.append((units, matrix[units], self.transposed[units]))
        # Units of one layer that weigh on each other: half steps, which are a majorisation (e^{a−b} ≤ (e^{2a} + e^{−2b}) / 2).
        self.power = [0.25 if by_row[:, units].nnz else 0.5 for units, by_row, _ in self.layers]

    def row_sums(self, x: FloatArray) -> FloatArray:
        return np.asarray(x * (self.matrix @ (1 / x)))

    def column_sums(self, x: FloatArray) -> FloatArray:
        return np.asarray((self.transposed @ x) / x)

    def total(self, x: FloatArray) -> float:
        return float(self.row_sums(x).sum())

    def gradient(self, x: FloatArray) -> float:
        """Return the largest relative imbalance of a unit."""
        r, c = self.row_sums(x)[:-1], self.column_sums(x)[:-1]
        total = r + c
        return float(np.divide(np.abs(r - c), total, out=np.zeros_like(total), where=total > 0).max(initial=0.0))

    def swept(self, x: FloatArray) -> FloatArray:
        """Return x after each unit in turn was put at its own minimum, x² = Σ_j c_ji x_j / Σ_j (c_ij / x_j)."""
        x = x.copy()
        for (units, by_row, by_column), power in zip(self.layers, self.power, strict=True):
            out, back = by_row @ (1 / x), by_column @ x
            alive = (out > 0) & (back > 0)
            ratio = np.divide(back, out, out=np.ones_like(out), where=alive)
            if power == 0.25:
                ratio = np.where(alive, ratio / x[units] ** 2, 1.0)
                x[units] *= ratio**power
            else:
                x[units] = np.where(alive, ratio**power, x[units])
        return x

    def newton(self, x: FloatArray) -> FloatArray:
        """Return x after one Newton step with a line search on the imbalance, or x itself if none helps."""
        from scipy.sparse.linalg import LinearOperator, cg

        inverse = 1 / x
        r, c = self.row_sums(x)[:-1], self.column_sums(x)[:-1]
        diagonal = r + c
        size = len(diagonal)

        def product(v: FloatArray) -> FloatArray:
            # The Hessian of f is 4 times this Laplacian; the ground keeps its place.
            padded = np.append(v.reshape(-1), 0.0)
            coupled = x * (self.matrix @ (inverse * padded)) + inverse * (self.transposed @ (x * padded))
            return np.asarray(diagonal * v.reshape(-1) - coupled[:-1])

        laplacian = LinearOperator((size, size), matvec=product, dtype=np.float64)
        scale = np.divide(1.0, diagonal, out=np.ones_like(diagonal), where=diagonal > 0)
        jacobi = LinearOperator((size, size), matvec=lambda v: scale * v.reshape(-1), dtype=np.float64)
        step, _ = cg(laplacian, -(r - c) / 2, rtol=1e-3, maxiter=min(10 * size, 400), M=jacobi)
        value, imbalance = self.total(x), self.gradient(x)
        for factor in (1.0, 0.5, 0.25, 0.125):
            with np.errstate(over="ignore", invalid="ignore"):
                tried = np.append(x[:-1] * np.exp(2 * factor * step), 1.0)
                total = self.total(tried)
                better = total < value * (1 - 1e-12) or self.gradient(tried) < 0.5 * imbalance
            if np.isfinite(total) and better:
                return tried
        return x


def _matrix(rows: IntArray, columns: IntArray, weights: FloatArray, size: int, *, keep_diagonal: bool = False) -> Any:
    from scipy.sparse import coo_matrix

    keep = (weights > 0) & ((rows != columns) | keep_diagonal)
    i, j = rows[keep] % (size + 1), columns[keep] % (size + 1)  # −1, the ground, becomes the last index
    matrix = coo_matrix((weights[keep], (i, j)), shape=(size + 1, size + 1)).tocsr()
    matrix.sum_duplicates()
    return matrix


def _cyclic_part(matrix: Any) -> tuple[Any, npt.NDArray[np.bool_]]:
    """Return the entries that lie on cycles, and which units have some."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    labels = connected_components(matrix, directed=True, connection="strong")[1]
    entries = matrix.tocoo()
    keep = labels[entries.row] == labels[entries.col]
    cyclic = coo_matrix((entries.data[keep], (entries.row[keep], entries.col[keep])), shape=matrix.shape).tocsr()
    return cyclic, labels[:-1] == labels[-1]
