r"""XTrace: every probe is both part of the low-rank part and, left out of it, a sample of the rest.

With Y = A Ω for m Gaussian probes and Q₍ᵢ₎ an orthonormal basis of Y without column i, the m numbers

.. math:: \hat t_i = \operatorname{tr}(Q_{(i)}^\top A\, Q_{(i)}) + \omega_i^\top P_{(i)} A\, P_{(i)}\, \omega_i \cdot
    \frac{n - m + 1}{\lVert P_{(i)} \omega_i \rVert^2}, \qquad P_{(i)} = I - Q_{(i)} Q_{(i)}^\top,

are unbiased, and so is their mean. Nothing is computed m times: Q₍ᵢ₎Q₍ᵢ₎ᵀ = Q (I − sᵢ sᵢᵀ) Qᵀ, where Y = Q R and sᵢ is column i
of R⁻ᵀ, normalised. The factor makes the test vectors uniform on a sphere, so that a multiple of I has no variance.

The standard error. Epperly, Tropp & Webber take that of m independent numbers, s²/m. But t̂ᵢ and t̂ⱼ share all but two probes and
are correlated: measured, such 95 % intervals cover 80 to 95 %. The covariance can be read off the same products. Let t̂ᵢ₍ⱼ₎ be t̂ᵢ
with probe j left out as well. Given all probes but i, both have mean tr A, and t̂ᵢ₍ⱼ₎ does not know ωⱼ; hence
Cov(t̂ᵢ, t̂ⱼ) = E(t̂ᵢ − t̂ᵢ₍ⱼ₎)(t̂ⱼ − t̂ⱼ₍ᵢ₎), which needs no knowledge of tr A. Since E s² = Var t̂ᵢ − Cov(t̂ᵢ, t̂ⱼ),

.. math:: \operatorname{Var}\Big(\tfrac1m \sum_i \hat t_i\Big) = \mathbb E\Big[\frac{s^2}{m} +
    \frac{1}{m(m-1)} \sum_{i \ne j} (\hat t_i - \hat t_{i(j)})(\hat t_j - \hat t_{j(i)})\Big],

without bias. The second term is dropped where it comes out negative.

Source: Epperly, Tropp & Webber (2024), *XTrace: making the most of every sample in stochastic trace estimation*, SIAM J. Matrix
Anal. Appl. 45. Their formulas in R⁻ᵀ are followed, with R's small singular values raised to rounding, so that a matrix of rank
below m is exact.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from flatminima.estimators.estimate import Estimate
from flatminima.estimators.low_rank_part import MAX_BYTES, ROUNDING, fitting_rank
from flatminima.estimators.quantity import Quantity, by_unit_vectors
from flatminima.estimators.sampling import Plan, check_finite, draw_probes
from flatminima.estimators.stopping import MIN_SAMPLES, largest_relative_error
from flatminima.operators.base import LinearOperator

__all__ = ["by_xtrace", "leave_one_out"]

_LEAST_PROBES = 3
_FIRST_LOOK = 24
_AT_ONCE = 16
_STEP = 4
_TINY = 1e-12


def by_xtrace(A: LinearOperator, trace: Quantity, plan: Plan) -> Estimate:
    """Return the trace, in float64, with m probes for 2 m products; m grows until the standard error meets the tolerance.

    Holds two vectors a probe: where they do not fit into ``MAX_BYTES`` the growth ends, and the estimate has not converged. Where
    n products suffice to be exact, and m has come to n / 2, they are made instead.

    Args:
        A: Operator.
        trace: The trace as a quantity.
        plan: When to stop.

    Raises:
        ValueError: If there is no room for three probes.
    """
    if A.size <= min(plan.budget, max(2 * _FIRST_LOOK, plan.num_products or 0)):
        return by_unit_vectors(A, trace, plan)
    most = min(plan.budget // 2, fitting_rank(A), A.size // 2)
    if most < _LEAST_PROBES or most < (plan.num_products or 0) // 2:
        raise ValueError(
            "`method` must not be 'xtrace' here (a probe takes 2 products and memory for 2 vectors of at least float32; at least "
            f"{_LEAST_PROBES} probes, {MAX_BYTES / 2**30:g} GiB in all). Got {plan.budget} products with {A!r}. "
            "Use method='hutchinson'."
        )
    state, sketch = plan.checkpoint.load("xtrace"), _Sketch.nothing(A)
    look = most if plan.num_products is not None else min(_FIRST_LOOK, most)
    if state is not None:
        sketch, look = _Sketch(**state.tensors), state.numbers["look"]
    while True:
        if sketch.num_probes < look:
            sketch = sketch.extended(A, min(_AT_ONCE, look - sketch.num_probes), plan)
            plan.checkpoint.keep("xtrace", vars(sketch), {"look": look})
            plan.progress(2 * sketch.num_probes, plan.num_products, trace.name)
        count = sketch.num_probes
        is_late = count >= _LEAST_PROBES and time.monotonic() > plan.deadline
        if count < look and not is_late:
            continue
        mean, stderr = leave_one_out(sketch.R, sketch.H, sketch.W, sketch.squares, A.size)
        error = largest_relative_error(mean, stderr, A.dtype)
        rtol = plan.rtol if 2 * count >= MIN_SAMPLES else plan.rtol / 2
        converged = count >= look and (plan.num_products is not None or error <= rtol)
        if converged or count >= most or is_late:
            break
        # the error falls with every probe, at least like that of independent samples
        look = min(most, 2 * count, max(count + _STEP, math.ceil(count * (error / rtol) ** 2)))
    if not converged and not is_late and count == A.size // 2 and 2 * count + A.size <= plan.budget:
        return by_unit_vectors(A, trace, plan, spent=2 * count)
    rounding = ROUNDING * torch.finfo(A.dtype).eps * sketch.H.diagonal().abs().sum()
    stderr = (stderr.square() + rounding.square()).sqrt()
    return Estimate(
        mean, stderr, method="xtrace", num_samples=count, num_products=2 * count, converged=converged, details={"rank": count}
    )


@final
@dataclass(frozen=True, eq=False)
class _Sketch:
    """Probes Ω and an orthonormal Q, both ``(n, m)``, with R = Qᵀ A Ω, H = Qᵀ A Q and W = Qᵀ Ω ``(m, m)`` and ‖ωᵢ‖² ``(m,)``."""

    omega: Tensor
    Q: Tensor
    R: Tensor
    H: Tensor
    W: Tensor
    squares: Tensor

    @classmethod
    def nothing(cls, A: LinearOperator) -> _Sketch:
        empty = torch.zeros(A.size, 0, dtype=A.dtype, device=A.device)
        small = torch.zeros(0, 0, dtype=torch.float64, device=A.device)
        return cls(empty, empty, small, small, small, small[0:0].reshape(0))

    @property
    def num_probes(self) -> int:
        """Number m."""
        return self.Q.shape[1]

    def extended(self, A: LinearOperator, width: int, plan: Plan) -> _Sketch:
        """Return the sketch with further probes, for two products each; all earlier products keep their use."""
        new = draw_probes(A, width, replace(plan, probes="gaussian"))
        Y = check_finite(A @ new)
        above = torch.zeros(self.num_probes, width, dtype=torch.float64, device=A.device)
        for _ in range(2):  # classical Gram–Schmidt, twice
            part = self.Q.T @ Y
            Y, above = Y - self.Q @ part, above + part.double()
        U, corner = torch.linalg.qr(Y)
        # directions that were rounding are orthonormal among themselves, but not yet to Q
        U, again = torch.linalg.qr(U - self.Q @ (self.Q.T @ U))
        AU = check_finite(A @ U)
        omega, Q = torch.cat([self.omega, new], 1), torch.cat([self.Q, U], 1)
        beside = _inner(self.Q, AU)
        below = torch.zeros_like(above.T)
        R = _bordered(self.R, above, below, again.double() @ corner.double())
        H = _bordered(self.H, beside, beside.T, _symmetric(_inner(U, AU)))
        W = _bordered(self.W, _inner(self.Q, new), _inner(U, self.omega), _inner(U, new))
        lengths = torch.linalg.vector_norm(new, dim=0, dtype=torch.float64)
        return _Sketch(omega, Q, R, H, W, torch.cat([self.squares, lengths**2]))


def leave_one_out(R: Tensor, H: Tensor, W: Tensor, squares: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the mean of the m leave-one-out estimates and its standard error, both ``()``.

    Pairs of indices ``[j, i]`` below are: the probe that is left out besides, and the test vector. In the basis Q, leaving out
    i takes the direction sᵢ away, and leaving out j as well takes u = (sⱼ − (sⱼ·sᵢ) sᵢ) / ‖…‖ away.

    Args:
        R: Qᵀ A Ω, upper triangular, ``(m, m)``.
        H: Qᵀ A Q, ``(m, m)``.
        W: Qᵀ Ω, ``(m, m)``.
        squares: ‖ωᵢ‖², ``(m,)``.
        n: Number of rows of A.
    """
    m = R.shape[0]
    S = _left_out_directions(R)
    cosines, SH, SW, SR = S.T @ S, S.T @ H, S.T @ W, S.T @ R
    SHS, SHW, HW = SH @ S, SH @ W, H @ W
    h, w, r, hw = (X.diagonal() for X in (SHS, SW, SR, SHW))  # of sᵢ with itself, ωᵢ, A ωᵢ and H ωᵢ
    # x = Qᵀω without sᵢ: xᵀHx, x·r and ‖x‖²
    inner, cross, length = (W * HW).sum(0) - 2 * w * hw + w**2 * h, (W * R).sum(0) - w * r, (W**2).sum(0) - w**2
    total = (W * R).sum(0)
    alone = H.trace() - h + (total - 2 * cross + inner) * _factor(n - m + 1, squares - length)
    sine = (1 - cosines.square()).clamp_min(_TINY).sqrt()
    u_w, u_r, u_hw, u_hs = ((X - cosines * x) / sine for X, x in ((SW, w), (SR, r), (SHW, hw), (SHS, h)))
    u_hu = (h[:, None] - 2 * cosines * SHS + cosines**2 * h) / sine**2
    inner = inner + u_w**2 * u_hu - 2 * u_w * u_hw + 2 * w * u_w * u_hs
    pairs = H.trace() - h - u_hu + (total - 2 * (cross - u_w * u_r) + inner) * _factor(n - m + 2, squares - length + u_w**2)
    shift = (alone - pairs).fill_diagonal_(0)
    covariance = (shift * shift.T).sum() / (m * (m - 1))
    return alone.mean(), (alone.var() / m + covariance.clamp_min(0)).sqrt()


def _left_out_directions(R: Tensor) -> Tensor:
    """Return the columns of R⁻ᵀ, normalised; singular values that are rounding are raised to it."""
    U, sizes, V = torch.linalg.svd(R)
    floor = torch.finfo(R.dtype).eps * sizes.max()
    S = U @ (V / torch.where(sizes > floor, sizes, floor).clamp_min(torch.finfo(R.dtype).tiny)[:, None])
    directions: Tensor = S / torch.linalg.vector_norm(S, dim=0)
    return directions


def _factor(freedom: int, squares: Tensor) -> Tensor:
    """Return the expected squared length over the actual one; 0 where the test vector has no room outside Q."""
    return torch.where(squares > 0, max(freedom, 0) / squares, 0.0)


def _inner(X: Tensor, Y: Tensor) -> Tensor:
    """Return Xᵀ Y in float64."""
    return (X.T @ Y).double()


def _symmetric(X: Tensor) -> Tensor:
    return (X + X.T) / 2


def _bordered(old: Tensor, right: Tensor, below: Tensor, corner: Tensor) -> Tensor:
    return torch.cat([torch.cat([old, right], 1), torch.cat([below, corner], 1)], 0)
