"""An estimate that is interrupted goes on where it was, to the same answer bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import CheckpointError, NonFiniteLoss
from flatminima.estimators import Estimate, block_traces, checkpoint, closed_form, diagonal, frobenius_norm, trace
from flatminima.objective import Objective
from flatminima.operators import Hessian, LinearOperator, as_operator
from tests.estimators.spectra import decaying, indefinite, rng, rotated

MATRIX = rotated(indefinite(150))

SPIKED = rotated([90.0, 70, 50, 30, 20, 10, 8, 6, 4, 3, 2, 1, *torch.linspace(-0.2, 0.3, 288).tolist()])


class Counting(LinearOperator):
    """A matrix that counts its columns and gives up before the given one."""

    def __init__(self, inner: LinearOperator, end: float = torch.inf) -> None:
        self.inner, self.end, self.count = inner, end, 0

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def blocks(self) -> Mapping[str, slice]:
        return self.inner.blocks

    def _matmat(self, V: Tensor) -> Tensor:
        if self.count + V.shape[1] > self.end:
            raise KeyboardInterrupt
        self.count += V.shape[1]
        return self.inner @ V


def matrix() -> LinearOperator:
    return as_operator(MATRIX, blocks={"a": slice(0, 50), "b": slice(50, 150)})


def spiked() -> LinearOperator:
    return as_operator(SPIKED)


def network() -> LinearOperator:
    """A Hessian whose residual has a diagonal, so that the pilot's layers go on."""
    g = rng(0)
    x, y = torch.randn(20, 8, generator=g, dtype=torch.float64), torch.randint(0, 3, (20,), generator=g)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
    return Hessian(Objective(model, F.cross_entropy, (x, y)))


def _joint(estimates: dict[str, Estimate]) -> Estimate:
    parts = list(estimates.values())
    return Estimate(
        torch.stack([e.value for e in parts]), torch.stack([e.stderr for e in parts]), num_products=parts[0].num_products
    )


RUNS: dict[str, tuple[Callable[[], LinearOperator], Callable[..., Estimate]]] = {
    "trace, fixed": (matrix, lambda A, **o: trace(A, method="hutchinson", num_products=150, **o)),
    "trace, to a tolerance": (matrix, lambda A, **o: trace(A, method="hutchinson", rtol=0.04, **o)),
    "trace, exact": (matrix, lambda A, **o: trace(A, method="exact", **o)),
    "trace, from probes to exact": (matrix, lambda A, **o: trace(A, rtol=1e-4, **o)),
    "block traces": (matrix, lambda A, **o: _joint(block_traces(A, method="hutchinson", num_products=130, **o))),
    "diagonal": (matrix, lambda A, **o: diagonal(A, method="hutchinson", num_products=130, **o)),
    "Frobenius norm": (matrix, lambda A, **o: frobenius_norm(A, method="hutchinson", num_products=130, probes="gaussian", **o)),
    "trace, from a low-rank part on": (spiked, lambda A, **o: trace(A, rtol=0.002, max_products=140, **o)),
    "Hutch++": (spiked, lambda A, **o: trace(A, method="hutch++", num_products=100, **o)),
    "XTrace, fixed": (spiked, lambda A, **o: trace(A, method="xtrace", num_products=100, **o)),
    "XTrace, to a tolerance": (spiked, lambda A, **o: trace(A, method="xtrace", rtol=0.001, **o)),
    "Frobenius norm, from a low-rank part on": (spiked, lambda A, **o: frobenius_norm(A, rtol=0.0005, **o)),
    "control variate": (network, lambda A, **o: trace(A, rtol=0.01, max_products=60, **o)),
    "control variate, then a low-rank part": (network, lambda A, **o: trace(A, rtol=0.01, max_products=140, **o)),
}


@pytest.fixture(params=[True, False], ids=["generator", "global generator"])
def seeded(request: pytest.FixtureRequest) -> Iterator[Callable[[], dict[str, torch.Generator]]]:
    """Give the argument that makes a run repeat: a generator, or nothing where torch's global one is seeded."""
    before = torch.get_rng_state()
    yield lambda: {"generator": rng(3)} if request.param else (torch.manual_seed(3), {})[1]
    torch.set_rng_state(before)


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_estimate_is_the_uninterrupted_one_bit_for_bit(
    run: str, tmp_path: Path, seeded: Callable[[], dict[str, torch.Generator]], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = closed_form.control_variate
    monkeypatch.setattr(closed_form, "control_variate", lambda A: split(A.inner))
    build, estimate = RUNS[run]
    whole = Counting(build())
    expected = estimate(whole, **seeded())
    assert (expected.num_gradients > 0) == (build is network)
    file = tmp_path / "state"
    for share in (0.05, 0.3, 0.55, 0.95):
        first, second = Counting(build(), int(share * whole.count) + 1), Counting(build())
        generator = seeded()
        with pytest.raises(KeyboardInterrupt):
            estimate(first, **generator, resume=file)
        found = estimate(second, **generator, resume=file)  # the same generator, moved by the first call
        assert torch.equal(found.value, expected.value)
        assert torch.equal(found.stderr, expected.stderr)
        assert (found.method, found.num_products, found.num_samples) == (
            expected.method,
            expected.num_products,
            expected.num_samples,
        )
        again = 16 + (40 if build is network else 0)  # the block that was interrupted; the pilot
        assert first.count + second.count <= whole.count + 2 + again
        assert not list(tmp_path.iterdir())


def test_it_can_be_interrupted_again_and_again(tmp_path: Path) -> None:
    file, count = tmp_path / "state", 0
    expected = trace(matrix(), method="hutchinson", num_products=160, generator=rng(1))
    while True:
        A = Counting(matrix(), 40)
        try:
            found = trace(A, method="hutchinson", num_products=160, generator=rng(1), resume=file)
            break
        except KeyboardInterrupt:
            count += 1
    assert count == 4
    assert torch.equal(found.value, expected.value)


SCRIPT = """
import os, signal, sys, torch
from flatminima.estimators import checkpoint, trace
from tests.estimators.test_checkpoint import matrix
from tests.estimators.spectra import rng
checkpoint.SECONDS_BETWEEN_WRITES, checkpoint.SHARE_OF_TIME = 0.0, 1e9
def progress(done, total, message):
    if done >= 96:
        os.kill(os.getpid(), signal.SIGKILL)
trace(matrix(), method="hutchinson", num_products=160, generator=rng(1), resume=sys.argv[1], progress=progress)
"""


def test_a_killed_process_loses_nothing_but_the_last_seconds(tmp_path: Path) -> None:
    file = tmp_path / "state"
    killed = subprocess.run([sys.executable, "-c", SCRIPT, str(file)], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL
    A = Counting(matrix())
    found = trace(A, method="hutchinson", num_products=160, generator=rng(1), resume=file)
    assert torch.equal(found.value, trace(matrix(), method="hutchinson", num_products=160, generator=rng(1)).value)
    assert A.count == 64 + 1
    assert not list(tmp_path.iterdir())


def _left(file: Path) -> bytes:
    with pytest.raises(KeyboardInterrupt):
        trace(Counting(matrix(), 70), method="hutchinson", num_products=100, generator=rng(1), resume=file)
    return file.read_bytes()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda o: trace(matrix(), method="hutchinson", num_products=101, generator=rng(1), **o),
            "num_products is 100 there and 101",
        ),
        (lambda o: trace(matrix(), method="hutchinson", num_products=100, generator=rng(2), **o), "seed is 1 there and 2 here"),
        (lambda o: trace(matrix(), method="hutchinson", num_products=100, **o), "seed is 1 there and None here"),
        (
            lambda o: frobenius_norm(matrix(), method="hutchinson", num_products=100, generator=rng(1), **o),
            "estimator is 'trace'",
        ),
        (
            lambda o: trace(1.001 * matrix(), method="hutchinson", num_products=100, generator=rng(1), **o),
            "gives another product",
        ),
        (lambda o: trace(as_operator(torch.eye(9)), method="hutchinson", num_products=100, generator=rng(1), **o), "size|dtype"),
    ],
)
def test_the_file_of_another_run_is_refused_and_left_alone(
    tmp_path: Path, other: Callable[[dict[str, Path]], Estimate], message: str
) -> None:
    file = tmp_path / "state"
    left = _left(file)
    with pytest.raises(ValueError, match=rf"`resume` must be a new file or one that this run has left.*{message}"):
        other({"resume": file})
    assert file.read_bytes() == left


def test_rounding_does_not_make_another_operator(tmp_path: Path) -> None:
    file = tmp_path / "state"
    _left(file)
    near = as_operator(matrix().to_dense() * (1 + 1e-13))
    assert trace(near, method="hutchinson", num_products=100, generator=rng(1), resume=file).num_products == 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b[:-9] + b"\x55" * 9,
        lambda b: b"no" * 99,
        lambda b: b.replace(b"64", b"65", 1),
    ],
)
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "state"
    damaged = damage(_left(file))
    file.write_bytes(damaged)
    with pytest.raises(
        CheckpointError, match=r"is no state of an estimate, or is damaged.*Give another name, or remove the file"
    ):
        trace(matrix(), method="hutchinson", num_products=100, generator=rng(1), resume=file)
    assert file.read_bytes() == damaged


def test_a_file_that_cannot_be_written_is_an_error_before_the_work(tmp_path: Path) -> None:
    A = Counting(matrix())
    with pytest.raises(ValueError, match="`resume` must be a file that can be written"):
        trace(A, method="hutchinson", resume=tmp_path / "missing" / "state")
    assert A.count == 1
    with pytest.raises(TypeError, match=r"`resume` must be a file's name or None. Got int"):
        trace(A, resume=3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:A product of Dense is infinite:RuntimeWarning")
def test_an_error_before_any_sample_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss):
        trace(as_operator(torch.full((80, 80), torch.nan)), method="hutchinson", resume=tmp_path / "state")
    assert not list(tmp_path.iterdir())


def test_writes_are_seconds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = checkpoint.Checkpoint._write
    monkeypatch.setattr(checkpoint.Checkpoint, "_write", lambda self: (written.append(1), write(self))[1])
    trace(as_operator(rotated(decaying(100))), method="hutchinson", num_products=500, generator=rng(0), resume=tmp_path / "state")
    assert len(written) == 1
