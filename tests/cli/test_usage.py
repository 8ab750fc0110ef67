"""The command line before anything heavy happens."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import flatminima
from flatminima import problems
from flatminima.cli import entry
from tests.cli.conftest import Result

_COMMAND = Path(sys.executable).parent / "flatminima"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["adit", "x"], "Did you mean 'audit'?"),
        (["audit"], "required: TARGET"),
        (["audit", "x", "--mesures", "a"], "Did you mean '--measures'?"),
        (["audit", "x", "--num-moves", "0"], "must be a whole number of at least 1. Got '0'"),
        (["audit", "x", "--num-examples", "many"], "must be a whole number of at least 1. Got 'many'"),
        (["audit", "x", "--scale", "inf"], "must be a finite number above 0. Got 'inf'"),
        (["audit", "x", "--scale", "nan"], "must be a finite number above 0. Got 'nan'"),
        (["audit", "x", "--seed", "-1"], "must be a whole number from 0 to"),
        (["audit", "x", "--threads", "100000000"], "must be at most 1,024"),
        (["audit", "x", "--dtype", "float16"], "choose from"),
        (["audit", "x", "--measures", " , "], "at least one measure"),
        (["measures", "--jsn"], "Did you mean '--json'?"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(run: Callable[..., Result], arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.status == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("flatminima: ")
    assert words in line
    assert "--help`." in line


def test_help_names_every_built_in_target_and_says_that_code_runs(run: Callable[..., Result]) -> None:
    result = run("audit", "--help")
    assert result.status == 0
    assert all(name in result.out for name in problems.names())
    assert "RUNS THAT CODE" in result.out


def test_version_is_printed(run: Callable[..., Result]) -> None:
    result = run("--version")
    assert (result.status, result.out) == (0, f"flatminima {flatminima.__version__}\n")


def test_help_answers_within_half_a_second() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([_COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_a_terminal_that_knows_no_unicode_gets_the_list_all_the_same() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([_COMMAND, "measures"], env=env, capture_output=True, check=True)
    assert b"hessian-trace" in done.stdout


def test_a_number_stays_that_number_where_its_signs_cannot_be_encoded() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    entry._print_anything(stream)
    stream.write("(−2.82 ± 0.77)×10⁻⁵ ✓")
    stream.seek(0)
    assert stream.read() == "(-2.82 +/- 0.77)x10^-5 ok"


@pytest.mark.skipif(os.name == "nt", reason="closes a stream by the shell")
def test_a_closed_stdout_is_no_failure() -> None:
    done = subprocess.run(f"{_COMMAND} measures >&-", shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "flatminima", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("flatminima ")


def test_a_reader_that_stops_reading_causes_no_traceback() -> None:
    done = subprocess.run(f"{_COMMAND} measures | head -n 1", shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_measures_are_listed_with_formula_source_cost_and_invariances(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = run("measures")
    assert result.status == 0
    for name in flatminima.measures.available():
        declared = flatminima.measures.get(name).declaration()
        assert all(declared[part] in result.out for part in ("formula", "source", "cost"))
        row = next(line for line in result.out.splitlines() if re.match(rf"\s*{re.escape(name)}\s", line))
        assert re.findall(r"\b(yes|no)\b", row)[-5:] == ["yes" if v else "no" for v in declared["invariances"].values()]


def test_a_narrow_terminal_gets_the_measures_as_a_list(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    result = run("measures")
    for name in flatminima.measures.available():
        assert f"{name}\n" in result.out
    assert "unchanged by: permutation, softmax shift" in result.out
    assert max(len(line.rstrip()) for line in result.out.splitlines()) <= 60
