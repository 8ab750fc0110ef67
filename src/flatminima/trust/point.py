"""Is this a minimum at all? The slope, and both ends of the Hessian's spectrum."""

from __future__ import annotations

import torch

from flatminima.estimators import eigenpairs
from flatminima.objective import Objective
from flatminima.operators import Hessian
from flatminima.trust.result import MinimumCheck, Spectrum
from flatminima.trust.verdict import minimum_verdict

__all__ = ["check_minimum", "zero_rows"]

_EIGENVALUES = 5
_RTOL, _MAX_PRODUCTS = 1e-3, 200


def check_minimum(objective: Objective, generator: torch.Generator) -> tuple[MinimumCheck, Spectrum, list[str]]:
    """Return what the point is, both ends of the Hessian's spectrum, and remarks."""
    loss, gradient = objective.value_and_gradient()
    H = Hessian(objective)
    k = min(_EIGENVALUES, max(1, H.size // 2))
    pairs = eigenpairs(H, k=k, which="BE", rtol=_RTOL, max_products=_MAX_PRODUCTS, generator=generator)
    values, residuals = pairs.values.tolist(), pairs.residuals.tolist()
    size = max(abs(v) for v in values)
    noise = max(residuals[-1], 10 * torch.finfo(objective.dtype).eps * H.size**0.5 * size)
    slope = float(gradient.norm())
    check = MinimumCheck(
        loss=float(loss),
        gradient_norm=slope,
        smallest_eigenvalue=values[-1],
        smallest_residual=residuals[-1],
        largest_eigenvalue=values[0],
        noise=noise,
        verdict=minimum_verdict(float(loss), slope, values[-1], values[0], noise),
        num_products=pairs.num_products,
    )
    notes = []
    if max(residuals[0], residuals[-1]) > _RTOL * size:
        notes.append(f"The outermost eigenvalues had not converged after {_MAX_PRODUCTS} products; see their residuals.")
    return check, Spectrum(tuple(values[:k]), tuple(values[k:]), tuple(residuals)), notes


def zero_rows(objective: Objective, generator: torch.Generator) -> list[str]:
    """Return the names of the parameters whose rows of the Hessian are zero. Takes one product."""
    probe = torch.randn(objective.space.size, generator=generator, device=objective.device)
    product = Hessian(objective) @ probe.to(objective.dtype)
    return [name for name, where in objective.space.slices.items() if not bool(product[where].any())]
