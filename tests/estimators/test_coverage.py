"""The stated 95 % intervals cover the truth in 93–97 % of 1,000 seeded runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatminima.estimators import Estimate, block_traces, diagonal, frobenius_norm, trace
from flatminima.operators import as_operator
from tests.estimators.spectra import decaying, indefinite, rng, rotated

NUM_RUNS = 1000
SPECTRA = {"indefinite": indefinite(), "decaying": decaying()}


def coverage(run: Callable[[torch.Generator], Estimate], truth: Tensor, num_runs: int = NUM_RUNS) -> tuple[Tensor, float]:
    """Return the share of runs whose interval holds the truth, by entry, and the mean number of samples."""
    hits, samples = torch.zeros_like(truth), 0
    for seed in range(num_runs):
        estimate = run(rng(seed))
        low, high = estimate.interval(0.95)
        hits += ((low <= truth) & (truth <= high)).double()
        samples += estimate.num_samples
    return hits / num_runs, samples / num_runs


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("stop", [{"num_products": 48}, {"rtol": 0.022}])
def test_trace_covers_the_truth_at_its_stated_level(spectrum: str, probes: str, stop: dict[str, float]) -> None:
    M = rotated(SPECTRA[spectrum])
    A = as_operator(M)
    level, samples = coverage(lambda g: trace(A, method="hutchinson", probes=probes, generator=g, **stop), M.trace())
    assert 0.93 <= level <= 0.97
    assert samples > 80 or "num_products" in stop  # so that the rule did decide when to stop


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
@pytest.mark.parametrize("stop", [{"num_products": 48}, {"rtol": 0.05}])
def test_block_traces_cover_the_truth_at_their_stated_level(probes: str, stop: dict[str, float]) -> None:
    M = rotated(indefinite())
    blocks = {"a": slice(0, 10), "b": slice(10, 40), "c": slice(40, 60)}
    A = as_operator(M, blocks=blocks)
    truth = torch.stack([M.diagonal()[rows].sum() for rows in blocks.values()])

    def run(generator: torch.Generator) -> Estimate:
        parts = list(block_traces(A, method="hutchinson", probes=probes, generator=generator, **stop).values())
        value, stderr, skewness = (torch.stack([getattr(e, name) for e in parts]) for name in ("value", "stderr", "skewness"))
        return Estimate(value, stderr, num_samples=parts[0].num_samples, skewness=skewness)

    level, samples = coverage(run, truth)
    assert ((level >= 0.93) & (level <= 0.97)).all()
    assert samples > 64 or "num_products" in stop


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("stop", [{"num_products": 48}, {"rtol": 0.011}])
def test_frobenius_norm_covers_the_truth_at_its_stated_level(spectrum: str, probes: str, stop: dict[str, float]) -> None:
    M = rotated(SPECTRA[spectrum])
    A = as_operator(M)
    truth = torch.linalg.matrix_norm(M)
    if "rtol" in stop and spectrum == "decaying":
        stop = {"rtol": 0.025}
    level, samples = coverage(lambda g: frobenius_norm(A, method="hutchinson", probes=probes, generator=g, **stop), truth)
    assert 0.93 <= level <= 0.97
    assert samples > 80 or "num_products" in stop


DOMINATED = {
    # half of the trace in one of 200 eigenvalues, as at the end of a training: a sample is then as skewed as a χ² with one
    # degree of freedom, and Student's t alone covers 91 % with 30 products
    "one": torch.cat([torch.full((1,), 200.0), torch.linspace(0.5, 1.5, 199)]),
    # no skewness to speak of, but samples of 30 look skewed by chance: Hall's transform alone covers 92 %
    "opposite": torch.cat([torch.tensor([1.0, -0.9]), torch.zeros(148)]),
}


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
@pytest.mark.parametrize("num_products", [10, 30, 100])
@pytest.mark.parametrize("spectrum", DOMINATED)
def test_trace_covers_the_truth_where_few_eigenvalues_dominate(spectrum: str, num_products: int, probes: str) -> None:
    M = rotated(DOMINATED[spectrum].double())
    A = as_operator(M)
    level, _ = coverage(lambda g: trace(A, method="hutchinson", probes=probes, num_products=num_products, generator=g), M.trace())
    assert 0.93 <= level <= 0.97


@pytest.mark.parametrize("stop", [{"num_products": 16}, {"rtol": 0.12}])
def test_diagonal_entries_cover_the_truth_at_their_stated_level(stop: dict[str, float]) -> None:
    # every one of the entries has to lie within the band, so one entry's share must be known better than by 1,000 runs:
    # with 3,000 the band is 5 standard deviations wide to each side
    M = rotated(indefinite(30))
    A = as_operator(M)
    level, samples = coverage(lambda g: diagonal(A, method="hutchinson", generator=g, **stop), M.diagonal(), 3 * NUM_RUNS)
    assert 0.945 <= level.mean() <= 0.965
    assert ((level >= 0.93) & (level <= 0.97)).all()
    assert samples > 64 or "num_products" in stop


LOW_RANK = {
    "dominated": torch.cat([torch.full((1,), 200.0), torch.linspace(0.5, 1.5, 149)]),
    "trained": torch.cat([torch.tensor([50.0, 30, 20, 12, 8, 5, 3, 2, 1]), torch.linspace(-0.05, 0.15, 141)]),
    "decaying": torch.arange(1, 151) ** -2.0,
    "flat": torch.linspace(0.5, 1.5, 150),
    "indefinite": torch.linspace(-1, 2, 150),
}


@pytest.mark.parametrize("spectrum", LOW_RANK)
@pytest.mark.parametrize(("method", "stop"), [("hutch++", {"num_products": 60}), ("xtrace", {"num_products": 60})])
def test_low_rank_methods_cover_the_truth_at_their_stated_level(method: str, stop: dict[str, float], spectrum: str) -> None:
    M = rotated(LOW_RANK[spectrum].double())
    A = as_operator(M)
    level, _ = coverage(lambda g: trace(A, method=method, generator=g, **stop), M.trace())
    assert 0.93 <= level <= 0.97


@pytest.mark.parametrize("spectrum", ["dominated", "trained", "decaying"])
@pytest.mark.parametrize("estimator", [trace, frobenius_norm])
def test_the_choice_by_forecast_keeps_the_stated_level(estimator: Callable[..., Estimate], spectrum: str) -> None:
    M = rotated(LOW_RANK[spectrum].double())
    A, methods = as_operator(M), set()

    def run(generator: torch.Generator) -> Estimate:
        estimate = estimator(A, rtol=0.02, max_products=149, generator=generator)  # no room for n products: never exact
        methods.add(estimate.method)
        return estimate

    level, _ = coverage(run, M.trace() if estimator is trace else torch.linalg.matrix_norm(M))
    assert "hutch++" in methods
    assert 0.93 <= level <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("spectrum", ["dominated", "trained", "decaying", "indefinite"])
@pytest.mark.parametrize("rtol", [0.02, 0.005])
def test_xtrace_under_a_tolerance_covers_the_truth_at_its_stated_level(rtol: float, spectrum: str) -> None:
    M = rotated(LOW_RANK[spectrum].double())
    A = as_operator(M)

    def run(generator: torch.Generator) -> Estimate:
        estimate = trace(A, method="xtrace", rtol=rtol, max_products=149, generator=generator)
        assert estimate.num_samples is not None  # no room for n products: never exact
        return estimate

    level, _ = coverage(run, M.trace())
    assert 0.93 <= level <= 0.97
