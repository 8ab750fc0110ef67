"""Each measure against a closed form, a dense matrix, or a brute-force minimum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima import measures as fm
from flatminima.measures.ascent import maximize_in_ball
from flatminima.measures.normalized_sharpness import least_sharpness
from flatminima.objective import Objective
from flatminima.operators import GaussNewton, Hessian

D64 = torch.float64
CURVATURES, MINIMISER = torch.tensor([4.0, 1.0, 0.25, 2.0], dtype=D64), torch.tensor([0.5, -2.0, 3.0, 0.1], dtype=D64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def valley(level: float = 0.0) -> Objective:
    """½ Σ h (w − c)² + level, at its minimum."""
    w = MINIMISER.clone().requires_grad_()
    return Objective.from_closure(lambda: level + 0.5 * (CURVATURES * (w - MINIMISER).square()).sum(), [w])


def network(*, bias: bool = True, widths: tuple[int, ...] = (4, 5, 4, 3), seed: int = 0) -> Objective:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out, bias=bias), nn.ReLU()]
        model = nn.Sequential(*layers[:-1]).double()
    g = generator(1)
    x, y = torch.randn(40, widths[0], generator=g, dtype=D64), torch.randint(0, widths[-1], (40,), generator=g)
    return Objective(model, F.cross_entropy, [(x[:30], y[:30]), (x[30:], y[30:])])


def test_spectral_measures_equal_the_dense_hessian() -> None:
    objective = network()
    H = Hessian(objective).to_dense()
    eigenvalues = torch.linalg.eigvalsh(H)
    assert float(fm.LargestEigenvalue()(objective, generator=generator())) == pytest.approx(eigenvalues[-1].item(), rel=1e-8)
    trace = fm.HessianTrace()(objective, generator=generator())
    assert float(trace) == pytest.approx(H.trace().item(), rel=1e-8)
    assert float(trace.stderr) <= 1e-8 * float(trace)
    frobenius = fm.FrobeniusNorm(rtol=0.02)(objective, generator=generator())
    assert abs(float(frobenius) - H.norm().item()) <= 4 * float(frobenius.stderr) + 1e-9


def test_largest_eigenvalue_is_the_largest_not_the_one_of_largest_magnitude() -> None:
    w = torch.zeros(3, dtype=D64, requires_grad=True)
    saddle = Objective.from_closure(lambda: 0.5 * (torch.tensor([3.0, -5.0, 1.0], dtype=D64) * w.square()).sum(), [w])
    assert float(fm.LargestEigenvalue()(saddle, generator=generator())) == pytest.approx(3.0)


@pytest.mark.parametrize("level", [0.0, 1.5])
def test_epsilon_sharpness_of_a_quadratic_is_its_second_order_value(level: float) -> None:
    estimate = fm.EpsilonSharpness(radius=0.1)(valley(level), generator=generator())
    expected = 4.0 * 0.1**2 / 2 / (1 + level)
    assert float(estimate) == pytest.approx(expected, rel=1e-6)
    assert estimate.details["second_order"] == pytest.approx(expected, rel=1e-6)
    assert estimate.details["first_order"] == pytest.approx(0.0, abs=1e-12)
    assert estimate.converged


def test_epsilon_sharpness_of_a_slope_is_its_first_order_value() -> None:
    w = torch.zeros(3, dtype=D64, requires_grad=True)
    slope = torch.tensor([3.0, 0.0, 4.0], dtype=D64)
    estimate = fm.EpsilonSharpness(radius=0.1)(Objective.from_closure(lambda: slope @ w, [w]), generator=generator())
    assert float(estimate) == pytest.approx(0.5)
    assert estimate.details["first_order"] == pytest.approx(0.5)


def test_adaptive_worst_case_of_a_quadratic_scales_each_curvature_by_its_weight() -> None:
    estimate = fm.AdaptiveWorstSharpness(rho=0.2)(valley(), generator=generator())
    expected = 0.2**2 / 2 * (CURVATURES * MINIMISER.square()).max().item()
    assert float(estimate) == pytest.approx(expected, rel=1e-6)
    assert estimate.details["second_order"] == pytest.approx(expected, rel=1e-6)


def test_adaptive_average_of_a_quadratic_is_covered_by_its_interval() -> None:
    expected = 0.2**2 / 2 * (CURVATURES * MINIMISER.square()).sum().item()
    inside = 0
    for seed in range(200):
        estimate = fm.AdaptiveAverageSharpness(rho=0.2, num_pairs=100)(valley(), generator=generator(seed))
        low, high = estimate.interval(0.95)
        inside += bool(low <= expected <= high)
    assert 180 <= inside <= 199
    assert estimate.details["second_order"] == pytest.approx(expected, rel=1e-6)


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_ascent_reaches_the_trust_region_maximum_of_a_quadratic(seed: int) -> None:
    g = generator(seed)
    A = torch.randn(6, 6, generator=g, dtype=D64)
    H, b = A @ A.T, torch.randn(6, generator=g, dtype=D64)
    radius = 0.7
    values, vectors = torch.linalg.eigh(H)
    found = maximize_in_ball(
        lambda z: (b @ z + 0.5 * z @ H @ z, b + H @ z),
        (b, vectors[:, -1], -vectors[:, -1]),
        radius,
        num_steps=5000,
        rtol=1e-10,
    )
    assert found.converged
    # The maximiser solves (μI − H) z = b with ‖z‖ = radius and μ ≥ λ_max.
    low, high = values[-1].item() + 1e-12, values[-1].item() + b.norm().item() / radius + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        norm = torch.linalg.solve(middle * torch.eye(6, dtype=D64) - H, b).norm().item()
        low, high = (middle, high) if norm > radius else (low, middle)
    z = torch.linalg.solve(high * torch.eye(6, dtype=D64) - H, b)
    assert found.value.item() == pytest.approx((b @ z + 0.5 * z @ H @ z).item(), rel=1e-7)
    assert found.point.norm().item() <= radius * (1 + 1e-12)


def test_an_ascent_that_starts_on_a_plateau_says_zero_and_converged() -> None:
    flat = maximize_in_ball(lambda z: (0 * z.sum(), 0 * z), (torch.zeros(2), torch.ones(2)), 1.0)
    assert flat.value == 0
    assert flat.converged
    assert maximize_in_ball(lambda z: (z.sum(), z), (torch.zeros(2),), 1.0).value == 0


def layer_traces(objective: Objective) -> list[float]:
    H = Hessian(objective).to_dense().diagonal()
    return [float(H[where].sum()) for name, where in objective.space.slices.items() if name.endswith("weight")]


def test_minimum_sharpness_without_biases_is_the_papers_closed_form() -> None:
    objective = network(bias=False)
    traces = layer_traces(objective)
    expected = len(traces) * math.prod(traces) ** (1 / len(traces))
    estimate = fm.MinimumSharpness()(objective)
    assert float(estimate) == pytest.approx(expected, rel=1e-10)
    assert float(fm.MinimumSharpness(biases=False)(network())) == pytest.approx(
        3 * math.prod(layer_traces(network())) ** (1 / 3), rel=1e-10
    )
    assert estimate.details["trace"] == pytest.approx(sum(traces), rel=1e-10)


def rescaled_trace(objective: Objective, log_scales: np.ndarray, per_unit: bool) -> float:
    """Tr H of the really rescaled network, biases cumulatively, from a dense Hessian."""
    theta = objective.theta.clone()
    parts = objective.space.unflatten(theta)
    layers = [m for m in objective.model if isinstance(m, nn.Linear)]
    widths = [layer.out_features for layer in layers[:-1]]
    scales = np.exp(log_scales)
    units = np.split(scales, np.cumsum(widths)[:-1]) if per_unit else [np.full(w, s) for w, s in zip(widths, scales, strict=True)]
    for index, s in enumerate(units):
        s_tensor = torch.tensor(s, dtype=D64)
        parts[f"{2 * index}.weight"].mul_(s_tensor[:, None])
        parts[f"{2 * index}.bias"].mul_(s_tensor)
        parts[f"{2 * index + 2}.weight"].div_(s_tensor)
    moved = objective.at(theta)
    assert abs(float(moved.value() - objective.value())) < 1e-12
    return float(Hessian(moved).to_dense().trace())


@pytest.mark.parametrize(("measure", "per_unit"), [(fm.MinimumSharpness(), False), (fm.NodewiseMinimumSharpness(), True)])
def test_minimum_sharpness_is_the_least_trace_over_really_rescaled_networks(measure: fm.Measure, per_unit: bool) -> None:
    objective = network(widths=(3, 4, 3, 3))
    dimension = 7 if per_unit else 2
    value = float(measure(objective))
    search = minimize(
        lambda u: rescaled_trace(objective, u, per_unit),
        np.zeros(dimension),
        method="BFGS",
        options={"gtol": 1e-7, "maxiter": 60},
    )
    assert value == pytest.approx(search.fun, rel=1e-5)
    random_points = [rescaled_trace(objective, np.random.default_rng(s).normal(size=dimension), per_unit) for s in range(5)]
    assert all(value <= point * (1 + 1e-10) for point in random_points)


def test_a_tanh_network_is_its_own_minimum() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    g = generator(0)
    objective = Objective(
        model, F.cross_entropy, (torch.randn(9, 3, generator=g, dtype=D64), torch.randint(0, 3, (9,), generator=g))
    )
    estimate = fm.MinimumSharpness()(objective)
    assert float(estimate) == pytest.approx(GaussNewton(objective).to_dense().trace().item())
    assert "no rescaling" in estimate.method


def test_normalised_sharpness_of_one_weight_is_twice_the_root() -> None:
    value, converged = least_sharpness(torch.tensor([[3.0]], dtype=D64), torch.tensor([[5.0]], dtype=D64))
    assert value == pytest.approx(2 * math.sqrt(15.0))
    assert converged


@given(seed=st.integers(0, 1000), rows=st.integers(1, 4), columns=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_normalised_sharpness_is_a_minimum_between_its_bounds_and_free_of_scales(seed: int, rows: int, columns: int) -> None:
    g = generator(seed)
    H, V = (torch.rand(rows, columns, generator=g, dtype=D64) + 0.01 for _ in range(2))
    value, converged = least_sharpness(H, V)
    assert converged
    assert 2 * (H * V).sqrt().sum() <= value * (1 + 1e-9)
    assert value <= 2 * (H.sum() * V.sum()).sqrt() * (1 + 1e-9)

    def at(u: np.ndarray) -> float:
        s, t = torch.tensor(np.exp(u[:rows])), torch.tensor(np.exp(u[rows:]))
        product = s[:, None] * t
        return float((H * product + V / product).sum())

    assert value == pytest.approx(minimize(at, np.zeros(rows + columns)).fun, rel=1e-6)
    s, t = (torch.randn(n, generator=g, dtype=D64).exp() for n in (rows, columns))
    scaled = s[:, None] * t
    assert least_sharpness(H / scaled, V * scaled)[0] == pytest.approx(value, rel=1e-9)


def test_normalised_sharpness_passes_over_dead_rows_and_columns() -> None:
    H = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=D64)
    V = torch.tensor([[4.0, 2.0], [3.0, 1.0]], dtype=D64)
    assert least_sharpness(H, V)[0] == pytest.approx(4.0)
    assert least_sharpness(0 * H, V) == (0.0, True)


def test_normalised_sharpness_sums_kernels_over_space_and_splits_groups() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    g = generator(0)
    objective = Objective(
        model, F.cross_entropy, (torch.randn(20, 4, 4, generator=g, dtype=D64), torch.randint(0, 3, (20,), generator=g))
    )
    G = objective.space.unflatten(GaussNewton(objective).to_dense().diagonal())
    W = {name: p.detach() for name, p in model.named_parameters()}
    expected = least_sharpness(G["3.weight"], W["3.weight"].square())[0]
    for rows in (slice(0, 2), slice(2, 4)):
        expected += least_sharpness(G["0.weight"][rows].sum(2), W["0.weight"][rows].square().sum(2))[0]
    assert float(fm.NormalizedSharpness(centre=False)(objective)) == pytest.approx(expected, rel=1e-9)


def test_fisher_rao_norm_has_its_closed_form_without_biases() -> None:
    objective = network(bias=False)
    with torch.no_grad():
        outputs = torch.cat([objective.model(x) for x in (_inputs(objective))])
    p = outputs.softmax(1)
    variance = (p * outputs.square()).sum(1) - (p * outputs).sum(1).square()
    assert float(fm.FisherRao()(objective)) == pytest.approx(9 * variance.mean().item(), rel=1e-10)


def _inputs(objective: Objective) -> list[Tensor]:
    return [batch[0] for batch in objective.model_evaluator("").prepared()]


def test_radial_curvature_is_the_quadratic_form_in_the_parameters() -> None:
    objective = network()
    theta = objective.theta
    expected = (theta @ Hessian(objective).to_dense() @ theta).item()
    assert float(fm.RadialCurvature()(objective)) == pytest.approx(expected, rel=1e-10)


def test_an_l2_term_is_no_part_of_the_invariant_measures() -> None:
    plain = network()
    decayed = Objective(plain.model, F.cross_entropy, plain.model_evaluator("").batches.data, l2=0.1)
    for measure in (fm.FisherRao(), fm.MinimumSharpness(), fm.NodewiseMinimumSharpness(), fm.NormalizedSharpness()):
        assert float(measure(decayed)) == pytest.approx(float(measure(plain)), rel=1e-9)


def test_squared_norm_counts_weights_and_no_biases() -> None:
    objective = network()
    expected = sum(m.weight.square().sum().item() for m in objective.model if isinstance(m, nn.Linear))
    assert float(fm.SquaredNorm()(objective)) == pytest.approx(expected)


@pytest.mark.parametrize("name", fm.available())
def test_every_measure_repeats_exactly_under_a_seed_and_leaves_the_global_generator(name: str) -> None:
    objective, measure = network(), fm.get(name)
    state = torch.get_rng_state()
    first, second = (measure(objective, generator=generator(5)) for _ in range(2))
    assert torch.equal(first.value, second.value)
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.value.requires_grad
    assert measure == type(measure)()
    assert set(measure.declaration()) == {"key", "title", "formula", "source", "meaning", "cost", "invariances"}


def test_an_unknown_measure_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"no measure 'hesian-trace'. Did you mean 'hessian-trace'\?"):
        fm.get("hesian-trace")
    with pytest.raises(TypeError, match=r"must be a flatminima.Objective"):
        fm.FisherRao()(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fm.EpsilonSharpness(radius=-1.0), "`radius` must be a finite number above 0"),
        (lambda: fm.AdaptiveAverageSharpness(num_pairs=1), "`num_pairs` must be at least 2"),
        (lambda: fm.AdaptiveWorstSharpness(rho=float("nan")), "`rho` must be"),
    ],
)
def test_impossible_settings_are_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=message):
        build()
