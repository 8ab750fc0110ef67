from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatminima.estimators import Estimate, SpectralDensity, eigenpairs, spectral_density
from flatminima.estimators.eigenpairs import Eigenpairs
from flatminima.operators import as_operator
from tests.estimators.spectra import decaying, diag, indefinite, rng, rotated
from tests.estimators.test_coverage import coverage

DTYPES = [torch.float32, torch.float64]
SPECTRA = {
    "repeated": torch.tensor([2.0, 2, 2, 5, 5, 5]),
    "with zeros": torch.cat([torch.zeros(20), torch.linspace(1, 2, 10)]),
    "indefinite": indefinite(40),
    "decaying": decaying(40),
    "outlier": torch.cat([torch.tensor([1000.0]), torch.linspace(0, 1, 39)]),
    "one": torch.tensor([-7.0]),
    "two": torch.tensor([-1.0, 3.0]),
    "zero": torch.zeros(8),
}


def moments(values: Tensor) -> Tensor:
    return torch.stack([(values.double() ** j).mean() for j in range(1, 5)])


def estimated(density: SpectralDensity) -> Tensor:
    return torch.stack([density.moment(j).value for j in range(1, 5)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_steps", [6, 20, None])
def test_one_rademacher_probe_of_a_diagonal_matrix_finds_every_eigenvalue(dtype: torch.dtype, num_steps: int | None) -> None:
    A = diag(*range(1, 7), dtype=dtype)
    density = spectral_density(A, num_probes=1, num_steps=num_steps or 6, method="slq" if num_steps else "auto", generator=rng(0))
    tol = 200 * torch.finfo(dtype).eps
    assert torch.allclose(density.nodes, torch.arange(1.0, 7.0).double(), atol=tol)
    assert torch.allclose(density.weights, torch.full((6,), 1 / 6).double(), atol=tol)
    assert float(density.moment(1)) == pytest.approx(3.5, abs=tol)
    assert float(density.moment(2)) == pytest.approx(91 / 6, abs=10 * tol)
    assert float(density.mass(2, 4)) == pytest.approx(0.5, abs=tol) or num_steps  # nodes may be beside 2 and 4 by rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("method", ["auto", "slq"])
def test_the_mass_is_one_and_the_nodes_ascend(spectrum: str, dtype: torch.dtype, method: str) -> None:
    A = as_operator(rotated(SPECTRA[spectrum]).to(dtype))
    density = spectral_density(A, num_probes=4, method=method, generator=rng(1))
    assert float(density.weights.sum()) == pytest.approx(1, abs=1e-14)
    assert (density.weights >= 0).all()
    assert (density.nodes.diff() >= 0).all()
    low, high = float(SPECTRA[spectrum].min()), float(SPECTRA[spectrum].max())
    assert low - 5 * density.noise_floor <= density.nodes[0]
    assert density.nodes[-1] <= high + max(density.noise_floor, 1e-6 * abs(high))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_all_eigenvalues_are_found_where_that_is_cheap(spectrum: str) -> None:
    values = SPECTRA[spectrum].double()
    density = spectral_density(as_operator(rotated(values)))
    assert density.method == "exact"
    assert density.num_products == values.numel()
    assert torch.allclose(density.nodes, values.sort().values, atol=1e-12 * float(values.abs().max()))
    assert torch.allclose(estimated(density), moments(values), rtol=1e-10)
    assert float(density.moment(2).stderr) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_repeated_spectrum_ends_a_probe_after_as_many_steps_as_it_has_values(dtype: torch.dtype) -> None:
    A = as_operator(rotated([2.0, 2, 2, 5, 5, 5] * 5).to(dtype))
    density = spectral_density(A, num_probes=3, method="slq", generator=rng(0))
    assert (density.num_steps, density.num_products, len(density.nodes)) == (2, 6, 6)
    assert torch.allclose(density.nodes, torch.tensor([2.0, 2, 2, 5, 5, 5]).double(), atol=100 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "stop", [{"num_probes": 6}, {"num_probes": 6, "num_steps": 40}, {"rtol": 0.1}, {"num_probes": 3, "deflate": 5}]
)
def test_a_positive_semidefinite_matrix_has_no_negative_mass(dtype: torch.dtype, stop: dict[str, float]) -> None:
    B = torch.randn(300, 40, generator=rng(3), dtype=torch.float64) * torch.logspace(0, -3, 40, dtype=torch.float64)
    A = as_operator((B @ B.T).to(dtype))
    density = spectral_density(A, method="slq", generator=rng(0), **stop)
    assert float(density.negative_mass()) == 0
    assert float(density.mass(high=-density.noise_floor)) == 0
    assert 0.8 < float(density.mass(0, 0.01 * float(density.nodes[-1]))) < 1  # 260 of 300 are 0
    assert density.noise_floor == pytest.approx(
        20 * torch.finfo(dtype).eps * float(torch.linalg.matrix_norm(B, 2)) ** 2, rel=0.01
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 40), st.integers(1, 4), st.integers(3, 12), st.integers(0, 10**6))
def test_four_moments_of_the_rule_are_those_of_the_probes(n: int, num_probes: int, num_steps: int, seed: int) -> None:
    M = rotated(torch.randn(n, generator=rng(seed), dtype=torch.float64), seed)
    density = spectral_density(
        as_operator(M), num_probes=num_probes, num_steps=num_steps, method="slq", probes="gaussian", generator=rng(seed)
    )
    V = torch.stack([torch.randn(n, generator=g, dtype=torch.float64) for g in [rng(seed)] for _ in range(num_probes)])
    V = V / V.norm(dim=1, keepdim=True)
    for j in range(5):
        forms = (V @ torch.linalg.matrix_power(M, j) * V).sum(1)
        scale = float(torch.linalg.matrix_norm(M, 2)) ** j
        assert float(density.moment(j)) == pytest.approx(float(forms.mean()), abs=1e-11 * scale)
        if num_probes > 1:
            assert float(density.moment(j).stderr) == pytest.approx(float(forms.std()) / num_probes**0.5, abs=1e-11 * scale)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 40), st.floats(-3, 3).filter(lambda c: abs(c) > 0.01), st.floats(-5, 5), st.integers(0, 10**6))
def test_scaling_and_shifting_the_matrix_scales_and_shifts_the_nodes(n: int, c: float, b: float, seed: int) -> None:
    M = rotated(torch.linspace(0.5, 2, n, dtype=torch.float64), seed)
    kwargs = {"num_probes": 2, "num_steps": 5, "method": "slq"}
    first = spectral_density(as_operator(M), generator=rng(seed), **kwargs)
    moved = spectral_density(as_operator(c * M + b * torch.eye(n, dtype=torch.float64)), generator=rng(seed), **kwargs)
    for j in (1, 2, 3):
        expected = first.mean(lambda nodes, j=j: (c * nodes + b) ** j)
        assert float(moved.moment(j)) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)
    assert float(moved.nodes[0]) == pytest.approx(float((c * first.nodes + b).min()), rel=1e-7, abs=1e-7)


def test_the_law_of_the_density_does_not_depend_on_the_basis() -> None:
    # Gaussian probes: the moments over 400 runs of two rotations of one spectrum have the same mean and spread
    values = indefinite(30)
    found = []
    for seed in (1, 2):
        A = as_operator(rotated(values, seed))
        runs = [
            estimated(
                spectral_density(A, num_probes=2, num_steps=3, method="slq", probes="gaussian", generator=rng(seed * 10**4 + i))
            )
            for i in range(400)
        ]
        found.append(torch.stack(runs))
    first, second = found
    error = ((first.var(0) + second.var(0)) / 400).sqrt()
    assert ((first.mean(0) - second.mean(0)).abs() < 4 * error).all()
    assert ((first.std(0) / second.std(0)).log().abs() < 4 / 400**0.5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_deflation_takes_the_variance_of_outliers_away(dtype: torch.dtype) -> None:
    n = 600
    values = torch.cat([torch.tensor([1000.0, -400, 90]), torch.randn(n - 3, generator=rng(0)).abs()]).double()
    M = rotated(values)
    A = as_operator(M.to(dtype))
    pairs = eigenpairs(A, k=3, which="LM", rtol=1e-4, generator=rng(1))
    plain = spectral_density(A, num_probes=8, generator=rng(2))
    deflated = spectral_density(A, num_probes=8, deflate=pairs, generator=rng(2))
    counted = spectral_density(A, num_probes=8, deflate=3, generator=rng(2))
    truth = moments(values)
    for density in (deflated, counted):
        assert (density.probe == -1).sum() == 3
        assert float(density.weights.sum()) == pytest.approx(1, abs=1e-14)
        assert float(density.mass(low=500)) == pytest.approx(1 / n)
        assert torch.allclose(estimated(density)[1:], truth[1:], rtol=1e-3)
        assert abs(float(density.moment(1)) - truth[0]) < 4 * float(density.moment(1).stderr)
        for j in (1, 2, 4):
            assert float(density.moment(j).stderr) < 0.1 * float(plain.moment(j).stderr)


@pytest.mark.parametrize("spectrum", ["dominated", "decaying", "bulk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_four_moments_within_one_percent(spectrum: str, dtype: torch.dtype) -> None:
    n = 1500
    bulk = 0.05 * torch.randn(n - 10, generator=rng(0), dtype=torch.float64).abs()
    values = {
        "dominated": torch.cat([torch.tensor([50.0, 20, 15, 12, 10, 8, 7, 5, 4, 3]).double(), bulk]),
        "decaying": decaying(n),
        "bulk": 1 + torch.linspace(-1, 1, n).double(),
    }[spectrum]
    A = as_operator(rotated(values).to(dtype))
    density = spectral_density(A, rtol=0.005, method="slq", max_products=3000, generator=rng(4))
    assert density.converged
    assert torch.allclose(estimated(density), moments(values), rtol=0.01)
    assert density.num_products < {"dominated": 600, "decaying": 1500, "bulk": 3000}[spectrum]


def test_many_products_give_way_to_all_eigenvalues() -> None:
    A = as_operator(rotated(indefinite(200)))
    density = spectral_density(A, rtol=1e-3, generator=rng(0))
    assert density.method == "exact"
    assert 200 < density.num_products < 350
    assert torch.allclose(estimated(density), moments(indefinite(200)), rtol=1e-9)


def test_limits_are_kept_and_said() -> None:
    A = as_operator(rotated(indefinite(300)))
    density = spectral_density(A, rtol=1e-4, method="slq", max_products=150, generator=rng(0))
    assert not density.converged
    assert 100 < density.num_products <= 150
    assert not density.moment(1).converged
    hurried = spectral_density(A, rtol=1e-4, method="slq", max_seconds=1e-9, generator=rng(0))
    assert not hurried.converged
    assert hurried.num_probes == 2
    assert hurried.num_steps == 4
    fixed = spectral_density(A, num_probes=5, num_steps=7, generator=rng(0), method="slq")
    assert (fixed.num_products, fixed.converged) == (35, True)


def test_mass_density_and_cumulative_share_agree_with_the_spectrum() -> None:
    values = torch.linspace(0, 1, 100, dtype=torch.float64)
    density = spectral_density(as_operator(rotated(values)), method="exact")
    assert float(density.mass(-1e-9, 0.5)) == pytest.approx(0.5)
    assert density.cumulative(torch.tensor([-0.1, 0.301, 2.0])).value.tolist() == pytest.approx([0, 0.3, 1])
    grid = torch.linspace(-2, 3, 2001, dtype=torch.float64)
    smooth = density.density(grid, width=0.1)
    assert float(torch.trapezoid(smooth.value, grid)) == pytest.approx(1, abs=1e-6)
    assert float(smooth.value[1000]) == pytest.approx(1, abs=0.02)
    assert (smooth.stderr == 0).all()
    sampled = spectral_density(as_operator(rotated(values)), num_probes=20, method="slq", generator=rng(0))
    part = sampled.mass(-1, 0.5)
    assert 0 < float(part.stderr) < 0.05
    assert abs(float(part) - 0.5) < 0.1
    assert sampled.density(grid[::100], width=0.3).stderr.shape == (21,)


def test_half_precision_matrices_are_measured_in_single() -> None:
    A = as_operator(rotated(torch.linspace(0.5, 2, 200)).bfloat16())
    same = as_operator(A.to_dense().float())
    half, single = (spectral_density(B, num_probes=4, num_steps=8, method="slq", generator=rng(0)) for B in (A, same))
    assert half.nodes.dtype == torch.float64
    assert torch.allclose(estimated(half), estimated(single), rtol=5e-3)


@pytest.mark.parametrize("order", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_moments_cover_the_truth_at_their_stated_level(order: int) -> None:
    values = decaying()
    A = as_operator(rotated(values))

    def run(generator: torch.Generator) -> Estimate:
        return spectral_density(A, num_probes=20, num_steps=3, method="slq", generator=generator).moment(order)

    level, _ = coverage(run, moments(values)[order - 1])
    assert 0.93 <= level <= 0.97


def test_the_bracket_of_the_density_holds_its_ends() -> None:
    density = spectral_density(as_operator(rotated(indefinite())), num_probes=30, method="slq", generator=rng(0))
    assert density.bracket().allows(largest=2.0, smallest=-1.0)
    assert not density.bracket().allows(largest=20.0)


def test_the_result_is_ready_for_json_and_one_probe_has_no_error() -> None:
    density = spectral_density(as_operator(rotated(indefinite())), num_probes=1, method="slq", generator=rng(0))
    assert len(json.loads(json.dumps(density.to_dict()))["nodes"]) == len(density.nodes)
    assert math.isnan(float(density.moment(1).stderr))
    assert density.moment(1).interval()[1] == math.inf


def test_large_bases_are_kept_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    A = as_operator(rotated(decaying(200)))
    whole = spectral_density(A, num_probes=2, num_steps=30, method="slq", generator=rng(0))
    monkeypatch.setattr("flatminima.estimators.probe_lanczos._BASIS_BYTES", 200 * 8 * 2 * 5)
    part = spectral_density(A, num_probes=2, num_steps=30, method="slq", generator=rng(0))
    assert torch.allclose(estimated(whole), estimated(part), rtol=1e-9)
    inverse = [float(d.mean(lambda nodes: 1 / (nodes + 0.1))) for d in (whole, part)]
    assert inverse[0] == pytest.approx(inverse[1], rel=1e-4)


class Interruption:
    """A progress that interrupts the work at a number of products."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, done: int, total: int | None, message: str) -> None:
        if done >= self.at:
            raise KeyboardInterrupt


RUNS = {
    "fixed": {"num_probes": 12, "num_steps": 9, "method": "slq"},
    "settling": {"num_probes": 12, "method": "slq"},
    "deflating": {"rtol": 0.02, "method": "slq"},
    "counted": {"num_probes": 10, "deflate": 4, "method": "slq"},
    "exact": {"method": "exact"},
    "giving way": {"rtol": 1e-3},
}


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize("run", RUNS)
def test_an_interrupted_run_goes_on_to_the_same_answer_bit_for_bit(run: str, own_generator: bool, tmp_path: Path) -> None:
    A = as_operator(rotated(torch.cat([torch.tensor([300.0, 200.0]), torch.randn(198, generator=rng(7)).abs()])).float())

    def density(**more: object) -> SpectralDensity:
        torch.manual_seed(5)
        return spectral_density(A, generator=rng(5) if own_generator else None, **RUNS[run], **more)

    whole = density()
    file = tmp_path / "state"
    for share in (0.1, 0.5, 0.8):
        with pytest.raises(KeyboardInterrupt):
            density(progress=Interruption(int(share * whole.num_products)), resume=file)
        assert file.exists()
    resumed = density(resume=file)
    assert not file.exists()
    for name in ("nodes", "weights", "probe"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name))
    assert resumed.num_products == whole.num_products


def test_bad_arguments_are_named() -> None:
    A = diag(1, 2, 3)
    with pytest.raises(ValueError, match="`num_probes` and `rtol` must not both"):
        spectral_density(A, num_probes=2, rtol=0.1)
    with pytest.raises(ValueError, match="`num_probes` must be at least 1"):
        spectral_density(A, num_probes=0)
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        spectral_density(A, num_steps=0)
    with pytest.raises(ValueError, match="`max_products` must be at least 8"):
        spectral_density(A, max_products=3)
    with pytest.raises(ValueError, match="`method` must be one of auto, exact, slq"):
        spectral_density(A, method="lanczos")
    with pytest.raises(ValueError, match="`deflate` must be at least 0"):
        spectral_density(A, deflate=-1)
    with pytest.raises(TypeError, match="`A` must be a LinearOperator"):
        spectral_density(torch.eye(3))
    with pytest.raises(ValueError, match=r"`deflate` must be eigenpairs of A .* Got vectors of shape \(2, 1\)"):
        spectral_density(A, deflate=eigenpairs(diag(1, 2)))
    pairs = eigenpairs(A)
    skewed = Eigenpairs(pairs.values, 2 * pairs.vectors, pairs.residuals, True, 1, 0.1)
    with pytest.raises(ValueError, match="`deflate` must have orthonormal vectors"):
        spectral_density(A, deflate=skewed)
    density = spectral_density(A)
    with pytest.raises(ValueError, match="`low` must be at most `high`"):
        density.mass(2, 1)
    with pytest.raises(ValueError, match=r"`grid` must be a tensor of shape \(g,\)"):
        density.density(torch.zeros(2, 2), 0.1)
    with pytest.raises(ValueError, match="`width` must be a finite number above 0"):
        density.density(torch.zeros(2), 0.0)
    with pytest.raises(ValueError, match="`order` must be at least 0"):
        density.moment(-1)
