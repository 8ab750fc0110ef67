"""Every operator and closed form against a dense float64 reference, on every model of the list."""

from __future__ import annotations

import pytest
import torch

from flatminima.estimators.gauss_newton_diagonal import gauss_newton_squares
from flatminima.objective import Objective
from flatminima.operators import EmpiricalFisher, Fisher, GaussNewton, Hessian, LinearOperator
from tests.conformance.cases import CASES, IDS, Case
from tests.conformance.oracles import (
    dense_empirical_fisher,
    dense_gauss_newton,
    dense_hessian,
    flat_parameters,
    loss_function,
)

cases = pytest.mark.parametrize("case", CASES, ids=IDS)
_LIKELIHOODS = ("cross_entropy", "mse", "bce_with_logits")


def _drawn(objective: Objective) -> Fisher:
    return Fisher(objective, num_samples=2, generator=torch.Generator().manual_seed(0))


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


@cases
def test_the_empirical_fisher_is_the_second_moment_of_the_rows_gradients(case: Case) -> None:
    model, (x, y) = case.model(), case.data()
    objective = Objective(model, case.loss, case.batches())
    expected = dense_empirical_fisher(model, case.loss, x, y, objective.scale)
    torch.testing.assert_close(EmpiricalFisher(objective).to_dense(), expected, rtol=1e-8, atol=1e-11)


@cases
def test_second_moments_are_symmetric_and_psd_with_exact_diagonals_and_traces(case: Case) -> None:
    objective = Objective(case.model(), case.loss, case.batches())
    matrices: list[EmpiricalFisher | Fisher] = [EmpiricalFisher(objective)]
    if objective.loss.name != "custom" and objective.num_terms > objective.num_examples:
        matrices.append(EmpiricalFisher(objective, per="term"))
    if objective.loss.name in _LIKELIHOODS:
        matrices.append(_drawn(objective))
    for A in matrices:
        dense = A.to_dense()
        torch.testing.assert_close(dense, dense.T, rtol=1e-9, atol=1e-12)
        assert torch.linalg.eigvalsh(dense)[0] > -1e-10 * (1 + dense.diagonal().max())
        squares, _ = gauss_newton_squares(A, diagonal=True)
        found = torch.cat([s.reshape(-1) for s in squares.values()])
        torch.testing.assert_close(found, dense.diagonal(), rtol=1e-8, atol=1e-12)
        traces, _ = gauss_newton_squares(A, diagonal=False)
        for name, where in A.blocks.items():
            torch.testing.assert_close(traces[name], dense.diagonal()[where].sum(), rtol=1e-8, atol=1e-12)


@cases
def test_l2_is_added_once_to_every_operator(case: Case) -> None:
    plain, with_l2 = (Objective(case.model(), case.loss, case.batches(), l2=l2) for l2 in (0.0, 0.1))
    operators = [Hessian, GaussNewton, EmpiricalFisher]
    if plain.loss.name in _LIKELIHOODS:
        operators += [Fisher, _drawn]
    v = torch.linspace(-1, 1, plain.space.size, dtype=torch.float64)
    for operator in operators:
        A: LinearOperator = operator(with_l2)
        torch.testing.assert_close(A @ v, operator(plain) @ v + 0.1 * v, rtol=1e-9, atol=1e-12)


@cases
def test_batches_of_any_size_give_the_same_second_moments(case: Case) -> None:
    x, y = case.data()
    whole, parts = (Objective(case.model(), case.loss, data) for data in ((x, y), case.batches()))
    v = torch.linspace(-1, 1, whole.space.size, dtype=torch.float64)
    torch.testing.assert_close(EmpiricalFisher(parts) @ v, EmpiricalFisher(whole) @ v, rtol=1e-9, atol=1e-12)
    if whole.loss.name in _LIKELIHOODS:
        torch.testing.assert_close(Fisher(parts) @ v, Fisher(whole) @ v, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(Fisher(parts) @ v, GaussNewton(whole) @ v, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if c.piecewise_linear], ids=lambda c: c.name)
def test_gauss_newton_and_hessian_share_their_layer_blocks_in_piecewise_linear_networks(case: Case) -> None:
    objective = Objective(case.model(), case.loss, case.batches())
    R = (Hessian(objective) - GaussNewton(objective)).to_dense()
    for name in objective.space.names:
        layer = [objective.space.slices[n] for n in objective.space.names if n.rpartition(".")[0] == name.rpartition(".")[0]]
        rows = torch.cat([torch.arange(s.start, s.stop) for s in layer])
        assert R[rows][:, rows].abs().max() < 1e-12
