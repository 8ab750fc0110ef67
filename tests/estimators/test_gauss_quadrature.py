"""Rules from Lanczos steps: how far they are exact, and where their nodes lie."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flatminima.estimators import spectral_density
from flatminima.estimators.gauss_quadrature import JacobiMatrix
from flatminima.estimators.lanczos import lanczos
from flatminima.operators import as_operator
from tests.estimators.spectra import rng

SPECTRA = {
    "positive": torch.cat([torch.linspace(0.1, 2, 30), torch.tensor([10.0, 40.0])]).double(),
    "semi-definite": torch.cat([torch.zeros(20), torch.linspace(0.5, 3, 15)]).double(),
    "indefinite": torch.cat([torch.linspace(-2, 3, 30), torch.tensor([-8.0, 20.0])]).double(),
}


def jacobi_of(values: Tensor, start: Tensor, num_steps: int) -> JacobiMatrix:
    T = lanczos(as_operator(torch.diag(values)), start, num_steps + 1)
    return JacobiMatrix(T.alphas[:num_steps].tolist(), T.betas[:num_steps].tolist())


@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("spectrum", "lowest"),
    [*((name, bound) for name in SPECTRA for bound in (None, -math.inf)), ("positive", -1e-9), ("semi-definite", -1e-9)],
)
def test_the_gauss_rule_is_exact_to_degree_2m_minus_1_and_the_closed_one_to_2m(
    spectrum: str, num_steps: int, lowest: float | None
) -> None:
    values = SPECTRA[spectrum]
    start = torch.randn(len(values), dtype=torch.float64, generator=rng(num_steps))
    weights = (start / start.norm()).square()
    rule = jacobi_of(values, start, num_steps).rule(lowest=lowest)
    assert float(rule.weights.sum()) == pytest.approx(1)
    exact_to = 2 * num_steps - (lowest is None)
    for degree in range(exact_to + 1):
        truth = weights @ values**degree
        assert float(rule.weights @ rule.nodes**degree) == pytest.approx(float(truth), rel=1e-9, abs=1e-9)
    beyond = exact_to + 1
    if num_steps <= 2:  # later the largest eigenvalue, which is found by then, is all that counts
        assert float(rule.weights @ rule.nodes**beyond) != pytest.approx(float(weights @ values**beyond), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 8])
def test_nodes_of_a_closed_rule_stay_where_eigenvalues_may_be(seed: int, num_steps: int) -> None:
    start = torch.randn(35, dtype=torch.float64, generator=rng(seed))
    floor = 1e-10
    rule = jacobi_of(SPECTRA["semi-definite"], start, num_steps).rule(lowest=-floor / 2)
    assert float(rule.nodes.min()) >= -floor
    values = SPECTRA["indefinite"]
    jacobi = jacobi_of(values, torch.randn(32, dtype=torch.float64, generator=rng(seed)), num_steps)
    nodes = jacobi.rule(lowest=-math.inf).nodes
    spread = float(values.max() - values.min())
    assert float(nodes.min()) >= float(values.min()) - spread
    assert float(nodes.max()) <= float(values.max()) + spread


def test_a_rule_of_an_invariant_space_has_nothing_to_close() -> None:
    jacobi = JacobiMatrix([2.0, 3.0], [1.0], is_exact=True)
    assert torch.equal(jacobi.rule(lowest=-math.inf).nodes, jacobi.rule().nodes)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_mass_lies_below_zero_for_a_semi_definite_matrix_after_any_number_of_steps(num_steps: int, dtype: torch.dtype) -> None:
    values = torch.cat([torch.zeros(150), torch.rand(48, generator=rng(0)), torch.tensor([30.0, 50.0])])
    A = as_operator(torch.diag(values).to(dtype))
    density = spectral_density(A, num_probes=30, num_steps=num_steps, method="slq", generator=rng(1))
    assert float(density.negative_mass()) == 0
    assert float(density.nodes.min()) >= 0
