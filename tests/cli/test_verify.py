"""``flatminima verify``: the table, the forecast, and an exit status that a script can use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Result

_CUT = """

class Cut(nn.Module):
    def forward(self, x):
        return x * x.detach()


def cut():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Cut(), nn.Linear(4, 2))
    return fm.Objective(model, nn.functional.cross_entropy, (torch.randn(5, 3), torch.arange(5) % 2))
"""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_what_was_compared_is_printed_after_the_memory_it_takes(run: Callable[..., Result], setup: Path) -> None:
    result = run("verify", "mysetup:objective")
    assert (result.status, result.err) == (0, "")
    memory, table = result.out.split("\n\n")
    assert [line.split(":")[0] for line in memory.splitlines()] == ["Hessian", "GaussNewton"]
    assert "A product takes" in memory
    assert "Hv and [g(θ+hv) − g(θ−hv)]/2h" in table
    assert table.endswith("All checks agree (26 parameters, 12 examples, float64).\n")


def test_a_check_that_fails_is_status_1(run: Callable[..., Result], setup: Path) -> None:
    with (setup / "mysetup.py").open("a", encoding="utf-8") as file:
        file.write(_CUT)
    result = run("verify", "mysetup:cut")
    assert result.status == 1
    assert "Not verified: gradient" in result.out


def test_json_holds_the_checks_alone(run: Callable[..., Result], setup: Path) -> None:
    result = run("verify", "mysetup:objective", "--json", "--num-examples", "7")
    data = json.loads(result.out)
    assert (data["ok"], data["num_examples"]) == (True, 7)


def test_the_seed_repeats_every_digit(run: Callable[..., Result], setup: Path) -> None:
    one, same, other = (run("verify", "mysetup:objective", "--json", "--seed", seed).out for seed in ("1", "1", "2"))
    assert one == same != other


def test_a_missing_target_is_status_2(run: Callable[..., Result], setup: Path) -> None:
    result = run("verify", "mysetup:objektive")
    assert (result.status, result.out) == (2, "")
    assert "Did you mean 'objective'?" in result.err


@pytest.mark.usefixtures("no_page")
def test_an_audit_tells_the_memory_it_takes_where_that_is_much(
    run: Callable[..., Result], setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("audit", "mysetup:objective", "--measures", "squared-norm", "--num-moves", "1")
    assert run(*arguments).err == ""
    monkeypatch.setattr("flatminima.cli.audit._MUCH", 1)
    assert "A product takes" in run(*arguments).err
    assert run(*arguments, "--quiet").err == ""


@pytest.mark.usefixtures("no_page")
def test_an_audit_notes_a_derivative_that_is_not_that_of_the_loss(run: Callable[..., Result], setup: Path) -> None:
    with (setup / "mysetup.py").open("a", encoding="utf-8") as file:
        file.write(_CUT)
    arguments = ("--measures", "squared-norm", "--num-moves", "1")
    assert "The derivative is not that of the loss" in run("audit", "mysetup:cut", *arguments).out
    assert "The derivative is not that of the loss" not in run("audit", "mysetup:objective", *arguments).out
