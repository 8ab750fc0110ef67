"""``flatminima audit`` from end to end, on a network that takes no time."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flatminima
from flatminima.trust import Audit
from tests.cli.conftest import Result

_FEW = ("--measures", "squared-norm,fisher-rao,radial-curvature", "--num-moves", "2")


def _one_line(result: Result) -> str:
    assert "Traceback" not in result.err
    (line,) = result.err.splitlines()
    assert line.startswith("flatminima: ")
    return line


def test_an_audit_prints_the_table_and_writes_both_files(run: Callable[..., Result], setup: Path) -> None:
    result = run("audit", "mysetup:objective", "--out", "deep/report", *_FEW)
    assert (result.status, result.err) == (0, "")
    audit = Audit.from_json(setup / "deep" / "report" / "report.json")
    assert audit.complete
    assert audit.target == "mysetup:objective"
    threads = str(audit.settings["threads"])  # chosen by a trial, and stated so that the command repeats every digit
    assert audit.command == " ".join(["flatminima audit mysetup:objective --out deep/report", *_FEW, "--threads", threads])
    assert [row.key for row in audit.rows] == ["squared-norm", "fisher-rao", "radial-curvature"]
    assert {len(attack.folds) for row in audit.rows for attack in row.attacks} == {2}
    assert (setup / "deep" / "report" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in (setup / "deep" / "report").iterdir()) == ["report.html", "report.json"]
    for words in (
        "mysetup:objective: 26 parameters, 12 examples",
        "Minimum?",
        "along node",
        "2 of 3 numbers survive.",
        "Written:",
    ):
        assert words in result.out
    assert {"survives", "moves"} <= {row.verdict for row in audit.rows}


@pytest.mark.usefixtures("no_page")
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(run: Callable[..., Result], setup: Path) -> None:
    folds = []
    for seed in ("1", "1", "2"):
        assert run("audit", "mysetup:objective", "--seed", seed, "--quiet", *_FEW).status == 0
        audit = Audit.from_json("flatminima-report/report.json")
        folds.append([attack.folds for row in audit.rows for attack in row.attacks])
    assert folds[0] == folds[1]
    assert folds[0] != folds[2]


@pytest.mark.usefixtures("no_page")
def test_the_command_in_the_report_repeats_every_digit(run: Callable[..., Result], setup: Path) -> None:
    assert run("audit", "mysetup:objective", "--seed", "5", "--quiet", *_FEW).status == 0
    first = Audit.from_json("flatminima-report/report.json")
    program, *arguments = shlex.split(first.command)
    assert program == "flatminima"
    Path("flatminima-report/report.json").unlink()
    assert run(*arguments).status == 0
    again = Audit.from_json("flatminima-report/report.json")
    assert [reading.value for reading in again.readings()] == [reading.value for reading in first.readings()]
    assert again.settings == first.settings
    assert (again.minimum, again.spectrum) == (first.minimum, first.spectrum)


def test_quiet_prints_nothing(run: Callable[..., Result], setup: Path) -> None:
    result = run("audit", "mysetup:objective", "--quiet", *_FEW)
    assert (result.status, result.out, result.err) == (0, "", "")
    assert Path("flatminima-report/report.html").is_file()


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize(("name", "dtype"), [("float64", "float64"), ("float32", "float32"), ("model", "float32")])
def test_the_precision_is_the_one_that_was_asked_for(run: Callable[..., Result], setup: Path, name: str, dtype: str) -> None:
    assert run("audit", "mysetup:objective", "--dtype", name, "--quiet", *_FEW).status == 0
    assert Audit.from_json("flatminima-report/report.json").settings["dtype"] == dtype


@pytest.mark.usefixtures("no_page")
def test_threads_and_examples_are_passed_on(run: Callable[..., Result], setup: Path) -> None:
    threads = torch.get_num_threads()
    try:
        assert run("audit", "mysetup:objective", "--threads", "1", "--num-examples", "7", "--quiet", *_FEW).status == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert Audit.from_json("flatminima-report/report.json").num_examples == 7


@pytest.mark.usefixtures("no_page")
def test_a_checkpoint_is_what_is_audited(run: Callable[..., Result], setup: Path) -> None:
    state = {
        "module.0.weight": torch.ones(4, 3), "module.0.bias": torch.zeros(4), "module.2.weight": torch.ones(2, 4),
        "module.2.bias": torch.zeros(2),
    }  # fmt: skip
    torch.save({"state_dict": state}, "model.pt")
    assert run("audit", "mysetup:objective", "--checkpoint", "model.pt", "--quiet", *_FEW).status == 0
    audit = Audit.from_json("flatminima-report/report.json")
    assert audit.target == "mysetup:objective with model.pt"
    assert audit.rows[0].base.value == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits-mpl"], "Did you mean 'digits-mlp'?"),
        (["mysetup:objective", "--measures", "hessian-trase"], "Did you mean 'hessian-trace'?"),
        (["mysetup:objective", "--checkpoint", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["mysetup:objective", "--checkpoint", ""], "--checkpoint must name a file"),
        (["mysetup:objective", "--checkpoint", "/dev/null"], "/dev/null is no regular file"),
        (["mysetup:objective", "--checkpoint", "broken.pt"], "is not a whole checkpoint"),
        (["mysetup:objective", "--checkpoint", "other.pt"], "missing: 0.weight, 0.bias, 2.weight, 2.bias; unexpected: w"),
        (["digits-mlp", "--scale", "11"], "`scale` must be at most 10"),
        (["mysetup:objective", "--num-examples", "99"], "must be at most 12"),
        (["mysetup:objective", "--out", "mysetup.py"], "is a file. Name a folder."),
        (["mysetup:objective", "--out", "dangling"], "dangling is a link to nothing"),
        (["mysetup:objective", "--out", "dangling/deeper"], "dangling is a link to nothing"),
        (["mysetup:objective", "--out", "mysetup.py/report"], "is a file. Name a folder."),
        (["mysetup:nothing"], "has no function 'nothing'"),
        (["mnist-cnn", "--data", "nowhere.npz"], "nowhere.npz"),
        (["bad:nan_loss"], "The loss of batch 1"),
        (["bad:frozen"], "at least one trainable parameter"),
        (["bad:no_data"], "at least one example"),
        (["bad:wrong_shape"], "do not fit batch 0"),
        (["bad:raises"], "ZeroDivisionError: division by zero (bad.py, line"),
        (["bad:closure"], "Objective(model, loss(outputs, targets), data)"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_leaves_no_folder(
    run: Callable[..., Result], setup: Path, arguments: list[str], words: str
) -> None:
    (setup / "bad.py").write_text(_BAD, encoding="utf-8")
    (setup / "broken.pt").write_bytes(b"broken")
    (setup / "dangling").symlink_to("nowhere")
    torch.save({"w": torch.zeros(1)}, "other.pt")
    before = sorted(setup.iterdir())
    result = run("audit", *arguments)
    assert result.status == 2
    assert words in _one_line(result)
    assert result.out == ""
    assert sorted(setup.iterdir()) == before


_BAD = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import flatminima as fm

x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])

def nan_loss():
    return fm.Objective(nn.Linear(3, 2), cross_entropy, [(x, y), (x * torch.nan, y)])

def frozen():
    return fm.Objective(nn.Linear(3, 2).requires_grad_(False), cross_entropy, (x, y))

def no_data():
    return fm.Objective(nn.Linear(3, 2), cross_entropy, [])

def wrong_shape():
    return fm.Objective(nn.Linear(5, 2), cross_entropy, (x, y))

def raises():
    return 1 / 0

def closure():
    w = torch.ones(2, requires_grad=True)
    return fm.Objective.from_closure(lambda: (w * w).sum(), [w])
"""


def test_a_folder_that_cannot_be_written_to_is_told_before_the_work(
    run: Callable[..., Result], setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)  # root may write almost anywhere
    assert "cannot be written to (Permission denied)" in _one_line(run("audit", "mysetup:objective"))


def test_an_error_that_was_not_foreseen_is_one_line_and_status_1(
    run: Callable[..., Result], setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object, **_options: object) -> None:
        raise LookupError("a\nlong\nstory")

    monkeypatch.setattr(flatminima.trust, "audit", fails)
    result = run("audit", "mysetup:objective")
    assert result.status == 1
    assert _one_line(result) == "flatminima: unexpected LookupError: a long story Run with --debug for the traceback."
    with pytest.raises(LookupError, match="story"):
        run("audit", "mysetup:objective", "--debug")
    with pytest.raises(LookupError, match="story"):
        run("--debug", "audit", "mysetup:objective")


@pytest.mark.usefixtures("no_page")
def test_warnings_are_one_line_each(run: Callable[..., Result], setup: Path) -> None:
    text = (setup / "mysetup.py").read_text(encoding="utf-8")
    warning = "import warnings\ndef warns():\n    warnings.simplefilter('always')\n    warnings.warn('look\\nout')\n"
    warning += "    return objective()\n"
    (setup / "mysetup.py").write_text(text + warning, encoding="utf-8")
    result = run("audit", "mysetup:warns", "--quiet", *_FEW)
    assert result.status == 0
    assert _one_line(result) == "flatminima: warning: look out"


_COUNTING = """
import os, signal
from pathlib import Path

import torch
import mysetup
import flatminima as fm

calls = 0
last = int(Path("stop-at").read_text())


def loss(outputs, targets):
    global calls
    calls += 1
    Path("calls").write_text(str(calls))
    if calls == last:
        os.kill(os.getpid(), signal.SIGINT)
    return torch.nn.functional.cross_entropy(outputs, targets)


def objective():
    made = mysetup.objective()
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    return fm.Objective(made.model, loss, (x, y))
"""


_TWO = ("audit", "counting:objective", "--measures", "radial-curvature,fisher-rao")


def test_ctrl_c_leaves_a_partial_report_and_status_130(run: Callable[..., Result], setup: Path) -> None:
    (setup / "counting.py").write_text(_COUNTING, encoding="utf-8")
    (setup / "stop-at").write_text("-1")
    assert run(*_TWO).status == 0
    whole = Audit.from_json("flatminima-report/report.json")

    (setup / "stop-at").write_text((setup / "calls").read_text())  # at the last call of the loss
    command = [Path(sys.executable).parent / "flatminima", *_TWO]
    done = subprocess.run(command, cwd=setup, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130
    assert done.stderr == "flatminima: interrupted; what was measured by then is in flatminima-report/report.html.\n"
    partial = Audit.from_json("flatminima-report/report.json")
    assert not partial.complete
    assert 0 < len(partial.rows) < len(whole.rows)
    assert partial.rows[0].base.value == whole.rows[0].base.value
    assert "Partial report" in (setup / "flatminima-report" / "report.html").read_text(encoding="utf-8")


def test_ctrl_c_before_anything_was_measured_writes_nothing(run: Callable[..., Result], setup: Path) -> None:
    (setup / "stopped.py").write_text("def objective():\n    raise KeyboardInterrupt\n", encoding="utf-8")
    result = run("audit", "stopped:objective")
    assert (result.status, result.out) == (130, "")
    assert _one_line(result) == "flatminima: interrupted before there was anything to report."
    assert not (setup / "flatminima-report").exists()


def test_the_report_holds_no_path_of_the_machine(run: Callable[..., Result], setup: Path) -> None:
    assert run("audit", "mysetup:objective", "--quiet", *_FEW).status == 0
    for name in ("report.json", "report.html"):
        assert str(setup) not in (setup / "flatminima-report" / name).read_text(encoding="utf-8")
    assert json.loads((setup / "flatminima-report" / "report.json").read_text(encoding="utf-8"))["schema"] == "flatminima.audit/1"
