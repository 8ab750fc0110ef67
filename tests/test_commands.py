"""What README.md promises of `make` and `pip`, checked without running them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_FIRST_SCREEN = 40


def _dry_run(target: str) -> str:
    """Return the commands that ``make target`` would run in a fresh clone."""
    make = shutil.which("make")
    assert make is not None
    # VENV moves the set-up to a folder that does not exist, as in a fresh clone; the outer make's flags must not leak in.
    command = [make, "--dry-run", "--no-print-directory", "VENV=.no-such-folder", target]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.replace(".no-such-folder", ".venv")


def _commands(document: Path) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [command for line in lines if (command := shlex.split(line, comments=True))]


def _documents() -> list[Path]:
    return [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("command", ["make demo", "make test", "pip install ."])
def test_the_first_screen_of_the_readme_shows(command: str) -> None:
    first_screen = (_ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:_FIRST_SCREEN]
    assert any(line.startswith(command) for line in first_screen)


@pytest.mark.parametrize("document", _documents(), ids=lambda path: str(path.relative_to(_ROOT)))
def test_every_make_command_of_a_document_has_a_target(document: Path) -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    for program, *arguments in _commands(document):
        assert program in ("make", "pip", "flatminima", "python"), f"no test runs {program}"
        if program == "make":
            (target,) = arguments
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_demo_installs_and_audits_the_digits() -> None:
    lines = _dry_run("demo").splitlines()
    assert lines[-1] == ".venv/bin/flatminima audit digits-mlp --out report"
    assert any("-m venv .venv" in line for line in lines)
    assert any("pip install" in line and "--constraint constraints.txt" in line for line in lines)


@pytest.mark.parametrize("check", ["ruff check", "ruff format --check", "mypy", "lint-imports", "pytest"])
def test_test_runs_every_check(check: str) -> None:
    assert f".venv/bin/{check}" in _dry_run("test")


def test_test_leaves_out_only_what_is_marked_slow() -> None:
    (pytest_line,) = (line for line in _dry_run("test").splitlines() if "/pytest" in line)
    (full_line,) = (line for line in _dry_run("test-all").splitlines() if "/pytest" in line)
    assert full_line == f'{pytest_line} -m "slow or not slow" --hypothesis-profile=default'
    assert " -m " not in pytest_line


def test_what_runs_before_a_change_lands_is_make_test() -> None:
    script = (_ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in script
    assert script[-1] == "make test"


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = (_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    project = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.findall(r'^  "([a-z0-9-]+)(?:[>=]+[0-9.]+)?",', project, flags=re.MULTILINE)
    assert len(required) > 10
    assert pinned.issuperset(required)
