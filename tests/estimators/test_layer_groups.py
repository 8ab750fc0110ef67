"""Probes of groups of layers: unbiased, honest about their error, and chosen where they are cheaper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatminima.estimators import block_traces, diagonal, trace
from flatminima.estimators.layer_probes import Couplings, roles
from flatminima.estimators.stopping import MIN_SAMPLES, Images, samples_to_stop, share_of_tolerance
from flatminima.operators import LinearOperator, as_operator
from tests.estimators.spectra import rng, rotated

METHOD = "hutchinson by groups of layers"
SIZE, COUNT = 150, 6
N = SIZE * COUNT
NAMES = ("in.weight", "a.0.up.weight", "a.0.down.weight", "a.1.up.weight", "a.1.down.weight", "head.weight")


def coupled(strength: float = 0.5, own: float = 0.02) -> tuple[LinearOperator, Tensor]:
    """Return a matrix whose layers are little by themselves, and coupled each "down" to its "up" and to the head."""
    M = torch.zeros(N, N, dtype=torch.float64)
    rows = [slice(i * SIZE, (i + 1) * SIZE) for i in range(COUNT)]
    generator = rng(7)
    for i, j in ((1, 2), (3, 4), (2, 5), (4, 5)):
        M[rows[i], rows[j]] = strength * torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)
    for some in rows:
        M[some, some] = own * torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)
    M = M + M.T + torch.diag(0.5 + torch.rand(N, dtype=torch.float64, generator=generator))
    return as_operator(M, blocks=dict(zip(NAMES, rows, strict=True))), M


def test_layers_at_the_same_place_of_repeated_blocks_are_one() -> None:
    A, _ = coupled()
    places = [[A.blocks[name].start // SIZE for name in layer] for layer in roles(A)]
    assert places == [[0], [1, 3], [2, 4], [5]]
    plain = as_operator(torch.eye(3), blocks={f"{i}.weight": slice(i, i + 1) for i in range(3)})
    assert len(roles(plain)) == 3  # the numbers of a plain sequence tell different layers apart


def test_coupled_layers_do_not_stand_in_one_group() -> None:
    A, M = coupled()
    layers = roles(A)

    def rows(layer: tuple[str, ...]) -> Tensor:
        return torch.cat([torch.arange(N)[A.blocks[name]] for name in layer])

    squares = torch.stack([torch.stack([M[b][:, rows(layer)].square().sum() for layer in layers]) for b in A.blocks.values()])
    found = Couplings(layers, tuple(A.blocks), squares).cheapest(lambda within, count: count * float(within.sum()))
    groups = [{NAMES.index(name) for name in group} for group in found.layers]
    assert len(groups) == 2
    assert next(group for group in groups if 2 in group) == {2, 4}
    of_groups = [M[rows(group)][:, rows(group)].square().sum() for group in found.layers]
    assert float(found.within.sum()) == pytest.approx(float(sum(of_groups)))


def test_groups_are_chosen_where_couplings_are_most_of_the_matrix_and_cost_less() -> None:
    A, M = coupled()
    grouped, plain = (trace(A, rtol=0.02, method=method, generator=rng(0)) for method in ("auto", "hutchinson"))
    assert grouped.method == METHOD
    assert grouped.converged
    assert grouped.num_products < 0.5 * plain.num_products
    assert float(grouped.stderr) <= 0.02 * float(grouped)
    low, high = grouped.interval(0.999)
    assert low <= M.trace() <= high


@pytest.mark.parametrize("stop", [{"rtol": 0.02}, {"num_products": 60}])
def test_intervals_of_grouped_traces_cover_the_truth_at_their_stated_level(stop: dict[str, float]) -> None:
    A, M = coupled()
    hits, runs = 0, 600
    for seed in range(runs):
        estimate = trace(A, generator=rng(seed), **stop)
        assert estimate.method == METHOD
        low, high = estimate.interval(0.95)
        hits += bool(low <= M.trace() <= high)
    assert 0.925 <= hits / runs <= 0.975


def test_grouped_diagonals_and_block_traces_are_unbiased() -> None:
    A, M = coupled()
    d = diagonal(A, num_products=400, generator=rng(1))
    assert d.method == METHOD
    z = (d.value - M.diagonal()) / d.stderr
    assert float(z.square().mean()) == pytest.approx(1.0, abs=0.2)
    parts = block_traces(A, num_products=200, generator=rng(2))
    assert {e.method for e in parts.values()} == {METHOD}
    for name, estimate in parts.items():
        low, high = estimate.interval(0.999)
        assert low <= M[A.blocks[name], A.blocks[name]].trace() <= high


def test_a_limit_of_time_leaves_the_measuring_out() -> None:
    A, M = coupled()
    estimate = trace(A, max_seconds=1e-9, generator=rng(0))
    assert estimate.method == "hutchinson"
    assert not estimate.converged
    assert estimate.num_products <= 16
    low, high = estimate.interval(0.999)
    assert low <= M.trace() <= high


def test_a_matrix_without_couplings_is_sampled_whole() -> None:
    blocks = [torch.randn(SIZE, SIZE, dtype=torch.float64, generator=rng(i)) for i in range(COUNT)]
    M = torch.block_diag(*[block + block.T for block in blocks]) + 20 * torch.eye(N, dtype=torch.float64)
    A = as_operator(M, blocks={f"{i}.weight": slice(i * SIZE, (i + 1) * SIZE) for i in range(COUNT)})
    assert trace(A, rtol=0.02, generator=rng(0)).method == "hutchinson"


def test_the_share_of_the_tolerance_is_the_lower_end_of_the_sample_deviation() -> None:
    for count in (8, 16, 40):
        x = torch.randn(20_000, count, dtype=torch.float64, generator=rng(count))
        share = float((x.std(1) >= share_of_tolerance(count)).double().mean())
        assert share == pytest.approx(0.95, abs=0.01)
    assert share_of_tolerance(16, kurtosis=12.0) < share_of_tolerance(16)
    assert share_of_tolerance(MIN_SAMPLES) == 1


@pytest.mark.parametrize(("needed", "first", "expected"), [(0.1, 12, 12), (1000.0, 12, 1000.0), (60.0, 12, MIN_SAMPLES)])
def test_the_forecast_of_samples_respects_first_look_and_need(needed: float, first: int, expected: float) -> None:
    assert samples_to_stop(needed, first) == expected


@pytest.mark.parametrize(("values", "kurtosis"), [([1.0], 12.0), ([1.0, -1.0], 6.0), ([1.0] * 4, 3.0), ([1.0] * 400, 0.03)])
def test_images_tell_the_kurtosis_of_quadratic_forms(values: list[float], kurtosis: float) -> None:
    M = torch.zeros(500, 500, dtype=torch.float64)
    M.diagonal()[: len(values)] = torch.tensor(values, dtype=torch.float64)
    found = []
    for seed in range(100):
        images = Images()
        for count in (5, 7):
            images.add(M @ torch.randn(500, count, dtype=torch.float64, generator=rng(20 * seed + count)))
        found.append(images.kurtosis())
    assert sum(found) / len(found) == pytest.approx(kurtosis, rel=0.1, abs=0.1)


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_one_large_eigenvalue_is_not_mistaken_for_a_small_error(scale: float) -> None:
    """Samples that happen to lie together end the sampling of a spread spectrum, not of one with a dominating eigenvalue."""
    flat = torch.full((400,), 1.0, dtype=torch.float64)
    flat[0] = 60.0 * scale
    A, truth, hits, runs = as_operator(rotated(flat)), float(flat.sum()), 0, 600
    for seed in range(runs):
        estimate = trace(A, method="hutchinson", rtol=0.04, generator=rng(seed))
        low, high = estimate.interval(0.95)
        hits += bool(low <= truth <= high)
    assert 0.92 <= hits / runs <= 0.975
