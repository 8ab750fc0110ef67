"""Every operator and closed form against a dense float64 reference, on every model of the list."""

from __future__ import annotations

import pytest
import torch

from flatminima.estimators.gauss_newton_diagonal import gauss_newton_squares
from flatminima.objective import Objective
from flatminima.operators import GaussNewton, Hessian
from tests.conformance.cases import CASES, IDS, Case
from tests.conformance.oracles import dense_gauss_newton, dense_hessian, flat_parameters, loss_function

cases = pytest.mark.parametrize("case", CASES, ids=IDS)


@cases
def test_value_and_gradient_are_those_of_one_big_batch(case: Case) -> None:
    model, (x, y) = case.model(), case.data()
    theta = flat_parameters(model).requires_grad_()
    expected = loss_function(model, case.loss, x, y)(theta)
    value, gradient = Objective(model, case.loss, case.batches()).value_and_gradient()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, theta)[0], rtol=1e-9, atol=1e-12)


@cases
def test_hessian_products_equal_the_dense_hessian(case: Case) -> None:
    model, (x, y) = case.model(), case.data()
    expected = dense_hessian(model, case.loss, x, y)
    torch.testing.assert_close(Hessian(Objective(model, case.loss, case.batches())).to_dense(), expected, rtol=1e-8, atol=1e-11)


@cases
def test_gauss_newton_products_equal_the_dense_matrix(case: Case) -> None:
    model, (x, y) = case.model(), case.data()
    expected = dense_gauss_newton(model, case.loss, x, y)
    found = GaussNewton(Objective(model, case.loss, case.batches())).to_dense()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)


@cases
def test_exact_diagonal_and_block_traces_equal_the_dense_matrix(case: Case) -> None:
    model, (x, y) = case.model(), case.data()
    expected = dense_gauss_newton(model, case.loss, x, y).diagonal()
    G = GaussNewton(Objective(model, case.loss, case.batches()))
    squares, _ = gauss_newton_squares(G, diagonal=True)
    torch.testing.assert_close(torch.cat([s.reshape(-1) for s in squares.values()]), expected, rtol=1e-8, atol=1e-12)
    traces, _ = gauss_newton_squares(G, diagonal=False)
    for name, where in G.blocks.items():
        torch.testing.assert_close(traces[name], expected[where].sum(), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if c.piecewise_linear], ids=lambda c: c.name)
def test_gauss_newton_and_hessian_share_their_layer_blocks_in_piecewise_linear_networks(case: Case) -> None:
    objective = Objective(case.model(), case.loss, case.batches())
    R = (Hessian(objective) - GaussNewton(objective)).to_dense()
    for name in objective.space.names:
        layer = [objective.space.slices[n] for n in objective.space.names if n.rpartition(".")[0] == name.rpartition(".")[0]]
        rows = torch.cat([torch.arange(s.start, s.stop) for s in layer])
        assert R[rows][:, rows].abs().max() < 1e-12
