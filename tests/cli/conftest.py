from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatminima.cli import main
from flatminima.trust import Audit

_SETUP = """
import torch
from torch import nn

import flatminima as fm


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def objective():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=generator), torch.arange(12) % 2
    return fm.Objective(network(), nn.functional.cross_entropy, [(x[:8], y[:8]), (x[8:], y[8:])])
"""


@dataclass
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if name not in before and str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def setup(workplace: Path) -> Path:
    """A module ``mysetup`` with a tiny network in the current folder."""
    (workplace / "mysetup.py").write_text(_SETUP, encoding="utf-8")
    return workplace


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page where only the numbers are looked at; drawing takes a second."""
    monkeypatch.setattr(Audit, "to_html", lambda _audit, path: path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command line in this process."""

    def run(*arguments: str) -> Result:
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else -1
        return Result(status, *capfd.readouterr())

    return run
