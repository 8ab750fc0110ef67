"""Forecasts of memory against what the process takes, and dense requests that cannot fit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import flatminima as fm
from flatminima.operators import engine, free_memory, memory

_GPT = """
import ctypes, gc, json, sys
import torch
from torch import nn
from torch.nn import functional as F
import flatminima as fm
from flatminima.operators.memory import _Counter

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.between, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, width, layers, length=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))


def rest():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")
    return status("VmRSS")


name, vocabulary, width, layers, examples = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model, x = GPT(vocabulary, width, layers), torch.randint(0, vocabulary, (examples, 129))
objective = fm.Objective(model, F.cross_entropy, (x[:, :-1], x[:, 1:]))
A = getattr(fm, name)(objective)
forecast = fm.predicted_memory(A)
v = torch.randn(A.size)
before = rest()
product = A @ v
peak = status("VmHWM")
ok = bool(torch.isfinite(product).all()) and float(product.norm()) > 0
del product
with _Counter() as counter:
    A @ v
print(json.dumps({"forecast": forecast.to_dict(), "n": A.size, "increase": peak - before, "peak": peak, "ok": ok,
                  "largest": counter.largest, "logits": examples * 128 * vocabulary * 4}))
"""


def _measured(name: str, *sizes: int) -> dict[str, Any]:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    command = [sys.executable, "-c", _GPT, name, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"]
    return result


def _assert_forecast(found: dict[str, Any]) -> None:
    assert 1 / 1.5 < found["forecast"]["total"] / found["increase"] < 1.5
    # A vector over the parameters, two of them side by side, or a few times the logits: never vocabulary × vocabulary.
    assert found["largest"] <= max(2 * 4 * found["n"], 3 * found["logits"])


@pytest.mark.parametrize("name", ["Hessian", "GaussNewton"])
def test_the_forecast_of_a_language_model_is_what_the_process_takes(name: str) -> None:
    _assert_forecast(_measured(name, 8000, 192, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Hessian", "GaussNewton"])
def test_products_of_a_gpt2_shaped_model_fit_into_12_gb(name: str) -> None:
    found = _measured(name, 50257, 384, 7, 2)
    assert found["n"] >= 30e6
    assert found["peak"] < 12e9
    _assert_forecast(found)


def _objective(examples: int = 40, **options: Any) -> fm.Objective:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 3))
    x, y = torch.ones(examples, 30), torch.zeros(examples, dtype=torch.long)
    return fm.Objective(model, F.cross_entropy, (x, y), **options)


def test_the_parts_grow_with_what_they_are_named_after() -> None:
    few, many = (fm.predicted_memory(fm.Hessian(_objective(n))) for n in (40, 400))
    assert many.parameters == few.parameters
    assert many.activations == pytest.approx(10 * few.activations, rel=1e-6)
    assert (few.batch_size, many.batch_size) == (40, 400)
    wide = fm.predicted_memory(fm.Hessian(_objective()), columns=9)
    assert wide.columns >= 8 * 4 * _objective().space.size
    assert wide.total == wide.parameters + wide.columns + wide.activations


def test_micro_batches_are_what_counts() -> None:
    whole, parts = (fm.predicted_memory(fm.GaussNewton(_objective(400, micro_batch_size=m))) for m in (None, 40))
    assert (whole.batch_size, parts.batch_size) == (400, 40)
    assert parts.total < whole.total


def test_a_forecast_leaves_no_trace_in_the_objective() -> None:
    objective = _objective()
    before = dict(objective.architecture)
    fm.predicted_memory(fm.Hessian(objective), columns=8)
    assert objective.architecture == before


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_sums_blocks_fishers_and_batch_statistics_are_forecast(mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    objective = fm.Objective(model, F.cross_entropy, (torch.randn(6, 4), torch.arange(6) % 3), mode=mode)
    H = fm.Hessian(objective)
    for A in (2.0 * H + fm.GaussNewton(objective), H.block("0"), fm.Fisher(objective, num_samples=2), fm.Fisher(objective)):
        assert fm.predicted_memory(A).total > 0


def test_a_forecast_says_its_parts_and_is_ready_for_json() -> None:
    forecast = memory.MemoryForecast(2**30, 2**29, 2**31, 2**28, 8, 4, 2**34)
    assert str(forecast) == (
        "A product takes 3.5 GiB at its peak: 1 GiB for the parameters, 0.5 GiB for 4 columns, 2 GiB for 8 examples at once; "
        "the largest tensor has 0.25 GiB; 16 GiB is free."
    )
    data = json.loads(json.dumps(forecast.to_dict()))
    assert (data["total"], data["fits"]) == (7 * 2**29, True)


def test_a_product_that_does_not_fit_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 1000)
    with pytest.warns(RuntimeWarning, match=r"0.000954 MiB is free.*micro_batch_size"):
        assert not fm.predicted_memory(fm.Hessian(_objective())).fits


def test_memory_is_forecast_for_matrices_of_data_alone() -> None:
    with pytest.raises(fm.NotSupported, match="an operator without one"):
        fm.predicted_memory(fm.as_operator(torch.eye(3)))
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(fm.NotSupported, match="size of its batches"):
        fm.predicted_memory(fm.Hessian(fm.Objective.from_closure(lambda: (w**2).sum(), [w])))


def test_a_dense_matrix_that_cannot_fit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = fm.Objective(nn.Linear(2_000_000, 1), F.mse_loss, (torch.ones(1, 2_000_000), torch.ones(1, 1)))
    with pytest.raises(fm.NotSupported, match=r"2,000,001 rows takes 1.49e\+04 GiB.*trace, diagonal"):
        fm.Hessian(wide).to_dense()
    monkeypatch.setattr(free_memory, "free_bytes", lambda _device: 100)
    with pytest.raises(fm.NotSupported, match="A dense matrix of 1,703 rows"):
        fm.Hessian(_objective()).to_dense()


def test_free_memory_is_known_here() -> None:
    free = free_memory.free_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
    assert free_memory.free_bytes(torch.device("meta")) is None


def test_what_goes_in_pieces_is_forecast_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fm.predicted_memory(fm.Hessian(_objective(400)))
    monkeypatch.setattr(engine, "_GRAPH_BYTES", 2**15)
    parts = fm.predicted_memory(fm.Hessian(_objective(400)))
    assert parts.batch_size < 100
    assert parts.activations == pytest.approx(whole.activations * parts.batch_size / 400, rel=0.01)
