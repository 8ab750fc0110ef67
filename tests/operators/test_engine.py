"""How products are made: graphs that stay in memory between them, and the choice among ways that agree."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from flatminima.estimators import eigenpairs, frobenius_norm, trace
from flatminima.objective import Objective
from flatminima.operators import EmpiricalFisher, Fisher, GaussNewton, Hessian, LinearOperator, engine
from flatminima.operators.curvature import Curvature
from flatminima.operators.engine import Way
from flatminima.operators.graphs import held_bytes

PASSES: list[None] = []


class Counting(nn.Module):
    """A network whose forward passes are counted, and that may hold its hidden layer by checkpointing."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.hidden, self.top = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        PASSES.append(None)
        if self.checkpointed:
            return self.top(checkpoint(self._hidden, x, use_reentrant=False))  # type: ignore[no-any-return]
        return self.top(self._hidden(x))  # type: ignore[no-any-return]

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x))


@pytest.fixture(autouse=True)
def _counted_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count from zero, and only the passes of products: no trials, unless a test asks for them."""
    PASSES.clear()
    monkeypatch.setattr(engine, "_WORTH_A_TRIAL", (math.inf, 0.0))


def _objective(model: nn.Module) -> Objective:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 4, generator=g, dtype=torch.float64), torch.randint(3, (12,), generator=g)
    return Objective(model, cross_entropy, [(x[:8], y[:8]), (x[8:], y[8:])])


def _vector(A: LinearOperator) -> Tensor:
    return torch.randn(A.size, dtype=A.dtype, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("operator", [Hessian, GaussNewton])
def test_a_run_of_products_takes_one_forward_pass_of_each_batch(operator: type[LinearOperator]) -> None:
    model = Counting()
    A = operator(_objective(model))  # type: ignore[call-arg]
    v = _vector(A)
    A @ v
    before = len(PASSES)
    with A.keeping_graphs():
        for _ in range(5):
            A @ v
    assert len(PASSES) == before + 2
    A @ v
    assert len(PASSES) == before + 4


def test_what_does_not_fit_is_not_kept() -> None:
    model = Counting()
    H = Hessian(_objective(model))
    v = _vector(H)
    expected = H @ v
    before = len(PASSES)
    with H.keeping_graphs(max_bytes=1):
        for _ in range(3):
            assert torch.equal(H @ v, expected)
    assert len(PASSES) == before + 6


def test_sums_and_congruences_keep_what_their_parts_keep() -> None:
    model = Counting()
    objective = _objective(model)
    A = (Hessian(objective) - GaussNewton(objective)).congruence(torch.full((objective.space.size,), 2.0, dtype=torch.float64))
    v = _vector(A)
    expected = A @ v
    before = len(PASSES)
    with A.keeping_graphs():
        for _ in range(4):
            assert torch.equal(A @ v, expected)
    assert len(PASSES) == before + 4


@pytest.mark.parametrize("run", [lambda H: eigenpairs(H, k=2), lambda H: frobenius_norm(H), lambda H: trace(H, method="exact")])
def test_estimators_run_on_kept_graphs(run: object) -> None:
    model = Counting()
    H = Hessian(_objective(model))
    H @ _vector(H)
    before = len(PASSES)
    run(H)  # type: ignore[operator]
    assert len(PASSES) == before + 2


def test_the_graphs_go_with_the_block_also_when_it_ends_by_an_error() -> None:
    H = Hessian(_objective(Counting()))
    held: list[weakref.ref[Tensor]] = []

    def fail() -> None:
        with H.keeping_graphs():
            H @ _vector(H)
            held.extend(weakref.ref(root) for kept in H.engine._kept.values() for made in kept for root in made.roots)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    assert held
    assert [reference() for reference in held] == [None] * len(held)


def test_a_training_step_inside_the_block_does_not_move_the_operator() -> None:
    model = Counting()
    H = Hessian(_objective(model))
    v = _vector(H)
    with H.keeping_graphs():
        expected = H @ v
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        assert torch.equal(H @ v, expected)
    assert torch.equal(H @ v, expected)


def test_checkpointed_layers_are_made_anew_for_every_product() -> None:
    plain, checkpointed = (Hessian(_objective(Counting(checkpointed=c))) for c in (False, True))
    v = _vector(plain)
    with checkpointed.keeping_graphs():
        for _ in range(3):
            torch.testing.assert_close(checkpointed @ v, plain @ v)


def test_the_bytes_of_a_graph_are_those_of_the_tensors_it_holds() -> None:
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    assert list(held_bytes([x.exp().sum()]).values()) == [8000]  # the result of exp
    assert not held_bytes([(x + 1).sum()])
    y = x.exp()
    assert list(held_bytes([y.sum(), y.sin().sum()]).values()) == [8000]  # one tensor, held twice
    assert not held_bytes([torch.ones(3)])
    assert list(held_bytes([], (torch.ones(5), [torch.ones(3, dtype=torch.int64)])).values()) == [20, 24]


# --- which way ------------------------------------------------------------------------------------------------------------

NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(80, 4)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)),
        torch.randn(80, 1, 6, 6),
    ),
    "batch normalisation": lambda: (
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3)),
        torch.randn(80, 4),
    ),
}


def _of(name: str, *, dtype: torch.dtype = torch.float64) -> Objective:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = NETWORKS[name]()
        y = torch.randint(3, (len(x),))
    return Objective(model.to(dtype), cross_entropy, (x.to(dtype), y))


def _columns(A: LinearOperator, k: int) -> Tensor:
    return torch.randn(A.size, k, dtype=A.dtype, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def always_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try every product, with a clock by which every later way is faster than those before."""
    monkeypatch.setattr(engine, "_WORTH_A_TRIAL", (-math.inf, 0.0))
    monkeypatch.setattr(engine, "_WORTH_FORWARD", -math.inf)
    monkeypatch.setattr(engine, "_SHORT_RUN", 0)
    monkeypatch.setattr(engine, "_ROUNDS", 1)
    times = (-t * t / 2 for t in itertools.count())  # intervals get shorter and shorter, below zero
    monkeypatch.setattr(engine, "_clock", lambda _V: lambda: next(times))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("operator", [Hessian, GaussNewton, EmpiricalFisher])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("piece_size", [None, 32, 7])
def test_all_ways_give_one_product(name: str, operator: type[Curvature], k: int, piece_size: int | None) -> None:
    A = operator(_of(name))
    V = _columns(A, k)
    base, *others = A.engine.routes()
    expected = A.engine._sum(Way(base), V)
    for route in (base, *others):
        torch.testing.assert_close(A.engine._sum(Way(route, piece_size), V), expected)


@pytest.mark.parametrize("k", [1, 5])
def test_blocks_go_the_same_ways(k: int) -> None:
    H = Hessian(_of("convolutions"))
    block = H.block("4")
    dense, V = H.to_dense()[-39:, -39:], _columns(block, k)
    direct = block.direct  # type: ignore[attr-defined]
    for route in direct.engine.routes():
        torch.testing.assert_close(direct.engine._sum(Way(route, 16), V), dense @ V)


@pytest.mark.usefixtures("always_on_trial")
@pytest.mark.parametrize("k", [1, 5])
def test_the_fastest_way_is_taken_and_remembered(k: int) -> None:
    objective = _of("perceptron")
    H = Hessian(objective)
    V = _columns(H, k)
    first = H @ V
    second = H @ V
    torch.testing.assert_close(first, second)
    ways = [way for way in objective.architecture["ways"].values() if way is not None]
    assert ways == [Way("forward over reverse", objective.num_examples // (2 if k == 1 else 8))]
    assert torch.equal(Hessian(objective) @ V, second)


class Centred(nn.Module):
    """A network that couples the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.top(x))
        return y - y.mean(0)


@pytest.mark.usefixtures("always_on_trial")
@pytest.mark.parametrize("operator", [Hessian, GaussNewton])
@pytest.mark.parametrize("k", [1, 5])
def test_a_network_that_couples_examples_is_not_taken_to_pieces(operator: type[Curvature], k: int) -> None:
    x, y = torch.randn(80, 4, dtype=torch.float64), torch.randint(3, (80,))
    objective = Objective(Centred(), cross_entropy, (x, y))
    A = operator(objective)
    V = _columns(A, k)
    expected = A.engine._sum(Way("double backward"), V)
    for _ in range(3):
        torch.testing.assert_close(A @ V, expected)
    assert all(way is None or way.piece_size is None for way in objective.architecture["ways"].values())


@pytest.mark.parametrize("operator", [Hessian, GaussNewton, EmpiricalFisher])
def test_a_large_batch_goes_in_pieces_whose_graphs_stay_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, operator: type[Curvature]
) -> None:
    whole = operator(_of("perceptron"))
    V = _columns(whole, 2)
    expected = whole @ V
    assert whole.engine.base == Way("double backward")
    sizes = []
    for bound in (2**15, 2**14, 1):
        monkeypatch.setattr(engine, "_GRAPH_BYTES", bound)
        A = operator(_of("perceptron"))
        torch.testing.assert_close(A @ V, expected)
        sizes.append(A.engine.base.piece_size)
    assert sizes[0] is None or sizes[0] > sizes[1] >= 1
    assert sizes[2] == 1


@pytest.mark.parametrize("coupled", ["outputs", "batch statistics"])
def test_a_network_that_couples_examples_stays_whole_however_large(monkeypatch: pytest.MonkeyPatch, coupled: str) -> None:
    monkeypatch.setattr(engine, "_GRAPH_BYTES", 1)
    x, y = torch.randn(80, 4, dtype=torch.float64), torch.randint(3, (80,))
    normed = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = Centred() if coupled == "outputs" else normed
    objective = Objective(model, cross_entropy, (x, y), mode="train" if coupled == "batch statistics" else "eval")
    H = Hessian(objective)
    v = _columns(H, 1)
    torch.testing.assert_close(H @ v, H.engine._sum(Way("double backward"), v))
    assert H.engine.base.piece_size is None


@pytest.mark.usefixtures("always_on_trial")
def test_losses_that_are_no_sums_over_examples_are_not_taken_to_pieces() -> None:
    def spread(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean().sqrt()

    x, y = torch.randn(80, 4, dtype=torch.float64), torch.randn(80, 3, dtype=torch.float64)
    objective = Objective(nn.Linear(4, 3, dtype=torch.float64), spread, (x, y))
    H = Hessian(objective)
    v = _vector(H)
    expected = H.engine._sum(Way("double backward"), v[:, None])[:, 0]
    for _ in range(3):
        torch.testing.assert_close(H @ v, expected)
    assert all(way is None or way.piece_size is None for way in objective.architecture["ways"].values())


@pytest.mark.usefixtures("always_on_trial")
def test_labels_that_are_drawn_stay_the_same_on_every_way() -> None:
    F = Fisher(_of("perceptron"), num_samples=2, generator=torch.Generator().manual_seed(0))
    V = _columns(F, 5)
    expected = F.engine._sum(Way("double backward"), V)
    for _ in range(3):
        torch.testing.assert_close(F @ V, expected)


class OneVectorAtATime(nn.Module):
    """A network with a branch on values, which no vectorised pass can take."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.top(x).tanh()
        return 2 * y if float(y.detach().sum()) > 0 else y


@pytest.mark.usefixtures("always_on_trial")
@pytest.mark.parametrize("operator", [Hessian, GaussNewton])
def test_a_way_that_fails_is_not_taken(operator: type[Curvature]) -> None:
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    A = operator(Objective(OneVectorAtATime(), mse_loss, (x, y)))
    V = _columns(A, 5)
    expected = A.engine._sum(Way("double backward"), V)
    for _ in range(3):
        torch.testing.assert_close(A @ V, expected)


@pytest.mark.usefixtures("always_on_trial")
def test_runs_repeat_bit_by_bit_once_the_way_is_known() -> None:
    objective = _of("convolutions", dtype=torch.float32)
    H = Hessian(objective)

    def run() -> Tensor:
        v = _columns(H, 1)[:, 0]
        with H.keeping_graphs():
            for _ in range(6):
                v = H @ v
                v = v / v.norm()
        return v

    first = run()
    assert torch.equal(run(), first)


def test_two_hundred_products_leave_no_tensor_behind() -> None:
    H = Hessian(_of("perceptron"))
    v = _vector(H)

    def products(count: int) -> int:
        with H.keeping_graphs():
            for _ in range(count):
                H @ v
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    assert products(200) == products(5)
