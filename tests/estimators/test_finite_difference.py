from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima.estimators import frobenius_norm
from flatminima.objective import Objective
from flatminima.operators import Hessian, as_operator
from tests.estimators.spectra import rng

D64 = torch.float64


def network(activation: type[nn.Module], width: int = 20, num_examples: int = 100) -> Hessian:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(6, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 3)]
        model = nn.Sequential(*layers).double()
        x, y = torch.randn(num_examples, 6, dtype=D64), torch.randint(0, 3, (num_examples,))
    return Hessian(Objective(model, F.cross_entropy, (x, y)))


def norm_of(M: Tensor) -> float:
    return float(torch.linalg.matrix_norm(M))


def test_finite_differences_agree_on_a_smooth_network() -> None:
    H = network(nn.Tanh)
    estimate = frobenius_norm(H, method="finite-difference", generator=rng(0))
    products = frobenius_norm(H, method="hutchinson", num_products=100, generator=rng(0))
    assert (estimate.method, estimate.num_samples, estimate.num_gradients) == ("finite-difference", 100, 200)
    assert float(estimate) == pytest.approx(float(products), rel=1e-6)  # the same probes
    assert abs(float(estimate) - norm_of(H.to_dense())) < 4 * float(estimate.stderr)


def test_finite_differences_overestimate_on_a_piecewise_linear_network_and_say_so() -> None:
    H = network(nn.ReLU, 40, 300)
    with pytest.warns(RuntimeWarning, match=r"are not products with the Hessian here: the 3 longest are \d.* crosses kinks"):
        estimate = frobenius_norm(H, method="finite-difference", generator=rng(0))
    assert float(estimate) > 3 * norm_of(H.to_dense())
    assert estimate.num_products == 3


def test_finite_differences_are_for_hessians_only() -> None:
    with pytest.raises(TypeError, match=r"`A` must be a Hessian for method='finite-difference'.*Got Dense"):
        frobenius_norm(as_operator(torch.eye(3)), method="finite-difference")
    with pytest.raises(ValueError, match="`epsilon` must be None"):
        frobenius_norm(as_operator(torch.eye(3)), epsilon=1e-3)
    with pytest.raises(ValueError, match="`epsilon` must be a finite number above 0"):
        frobenius_norm(network(nn.Tanh), method="finite-difference", epsilon=0.0)
