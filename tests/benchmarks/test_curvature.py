"""The benchmark of curvature: its networks are those it names, its reference is right, and a wrong result is not hidden."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from benchmarks.checks import Reference, moments_of_probes, numbers, wrong_eigenvalues
from benchmarks.networks import NETWORKS, Problem, problem
from benchmarks.table import OURS, Cell, Entry, ratios
from benchmarks.timing import in_turn, summary
from benchmarks.works import COLUMNS, WORKS, Found
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn import functional

from benchmarks import memory, ours, peers

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def small() -> Problem:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    for p in model.parameters():
        torch.nn.init.normal_(p, generator=generator)
    x = torch.randn(9, 3, generator=generator)
    return Problem("small", model, x, torch.arange(9) % 3, "nine points")


def _dense_hessian(given: Problem) -> torch.Tensor:
    names = dict(given.model.named_parameters())
    shapes = {name: p.shape for name, p in names.items()}

    def loss(theta: torch.Tensor) -> torch.Tensor:
        parts = theta.split([shape.numel() for shape in shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        model = given.model.double()
        return functional.cross_entropy(functional_call(model, values, (given.inputs.double(),)), given.targets)

    return hessian(loss, torch.cat([p.detach().double().reshape(-1) for p in names.values()]))


@pytest.mark.parametrize(("key", "size"), [("lenet", 61_706), ("mlp", 669_706)])
def test_networks_have_their_stated_size(key: str, size: int) -> None:
    assert problem(key).size == size


@pytest.mark.parametrize(("key", "least", "most"), [("resnet8", 77_000, 79_000), ("gpt", 400_000, 500_000)])
def test_networks_have_about_their_stated_size(key: str, least: int, most: int) -> None:
    given = problem(key)
    assert least <= given.size <= most
    assert not (key == "resnet8" and given.model.training)


def test_every_network_repeats() -> None:
    for key in NETWORKS:
        first, second = problem(key), problem(key)
        assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
        assert torch.equal(first.inputs, second.inputs)


def test_the_reference_is_the_hessian(small: Problem) -> None:
    V = small.vectors(2)
    product = small.hessian_reference(V)
    torch.testing.assert_close(product, _dense_hessian(small) @ V.double())


def test_our_works_pass_and_a_wrong_result_does_not(small: Problem) -> None:
    reference, made = Reference(small), ours.factories(small.own())
    for key in ("hessian", "hessian8", "ggn", "ggn8", "run", "ggn-trace", "ggn-diagonal"):
        result = made[key]()()
        assert reference.complaint(WORKS[key], result) == ""
        assert reference.complaint(WORKS[key], 3 * result).startswith("wrong by")


def test_moments_of_probes_have_the_moments_of_the_spectrum_as_their_mean(small: Problem) -> None:
    H = _dense_hessian(small)
    rows = torch.tensor(moments_of_probes(small.own(), 4000)) if small.model.float() else None
    assert rows is not None
    for j in range(1, 5):
        truth = float(torch.linalg.matrix_power(H, j).trace()) / len(H)
        error = float(rows[:, j - 1].std()) / 4000**0.5
        assert abs(float(rows[:, j - 1].mean()) - truth) < 5 * error


def test_copies_of_an_eigenvalue_are_called_wrong(small: Problem) -> None:
    H = _dense_hessian(small)
    small.model.float()
    values, vectors = torch.linalg.eigh(H)
    told = numbers(small, Found(values[-10:].float(), vectors[:, -10:].float()))
    assert told["residual"] < 1e-5
    assert wrong_eigenvalues(told["values"], told["ritz"]) == ""
    copies = [told["values"][0], *told["values"][:-1]]
    assert wrong_eigenvalues(copies, told["ritz"]).startswith("wrong:")


def test_one_failure_does_not_stop_the_others() -> None:
    def fails() -> None:
        raise RuntimeError("no such layer")

    timed = in_turn({"a": lambda: fails, "b": lambda: lambda: 1}, clock=time.perf_counter, most_rounds=3, budget=60.0)
    assert timed["a"].failure == "RuntimeError: no such layer"
    assert timed["b"].result == 1
    assert len(timed["b"].seconds) == 3


def test_the_summary_is_the_median_and_the_outer_deciles() -> None:
    assert summary([float(i) for i in range(11)]) == (5.0, 1.0, 9.0)


def test_ratios_are_to_the_fastest_peer_whose_result_is_right() -> None:
    cell = Cell("LeNet-5", WORKS["run"], gradient=1.0)
    cell.entries[OURS] = Entry(times=(40.0, 40.0, 40.0), peak=2 * 2**20)
    cell.entries["wrong"] = Entry(times=(1.0, 1.0, 1.0), peak=1, fault="wrong by 3.0e-01")
    cell.entries["right"] = Entry(times=(80.0, 80.0, 80.0), peak=2**20)
    assert cell.summary() == "2.00 g; 0.50 ✓ ≤ 0.8 right; memory 2.00 over 1"
    assert cell.summary() in ratios([cell], {"LeNet-5": "data"})
    assert "wrong by 3.0e-01" in "\n".join(cell.lines())


def test_the_peak_of_memory_is_seen() -> None:
    meter = memory.PeakMeter()
    block = torch.ones(16 * 2**20)
    assert meter.bytes() >= 0.9 * block.numel() * block.element_size()


def test_what_is_compared_is_pinned() -> None:
    pins = (_ROOT / "benchmarks" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert {f"{name}=={release}" for name, release in peers.PEERS.values()} <= set(pins)
    assert all(re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in pins)


def test_a_peer_that_is_not_installed_is_named_with_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "curvlinops", ("no-such-distribution", "1.0"))
    assert "no-such-distribution 1.0 is not installed" in str(peers.load("curvlinops"))


def test_products_are_of_as_many_columns_as_the_title_says() -> None:
    assert WORKS["hessian8"].columns == WORKS["ggn8"].columns == COLUMNS == 8
