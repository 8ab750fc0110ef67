"""Nothing of the user's changes, whatever happens; compiled, low-precision and attention models work."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from flatminima._errors import NotSupported
from flatminima.estimators.gauss_newton_diagonal import gauss_newton_squares
from flatminima.objective import Objective
from flatminima.operators import GaussNewton, Hessian
from tests.conformance.oracles import dense_hessian

g = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 2, 4, 4, generator=g), torch.randint(0, 3, (12,), generator=g)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(12, 3)
    )  # fmt: skip


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "training": [m.training for m in model.modules()],
        "tensors": {n: t.clone() for n, t in model.state_dict().items()},
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "rng": torch.get_rng_state(),
        "hooks": [len(m._forward_hooks) for m in model.modules()],
        "sdpa": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def _assert_same(before: Any, after: Any) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def _everything(model: nn.Module, **settings: Any) -> None:
    objective = Objective(model, F.cross_entropy, [(X[:8], Y[:8]), (X[8:], Y[8:])], **settings)
    V = torch.ones(objective.space.size, 2, dtype=objective.dtype)
    objective.value_and_gradient()
    results = [objective.gradient(), Hessian(objective) @ V, GaussNewton(objective) @ V, objective.at(objective.theta).value()]
    assert all(not r.requires_grad and r.grad_fn is None for r in results)
    if settings.get("mode") != "train":
        gauss_newton_squares(GaussNewton(objective), diagonal=True)
    objective.subset(3, generator=torch.Generator().manual_seed(0)).value()


@pytest.mark.parametrize("settings", [{}, {"mode": "train", "check_deterministic": False}, {"dtype": torch.float64}])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_of_the_users_changes(settings: dict[str, Any], context: Callable[[], Any]) -> None:
    model = _network().train()
    model[1].eval()
    F.cross_entropy(model(X), Y).backward()
    model[5].bias.grad = None
    before = _state(model)
    with context():
        _everything(model, **settings)
    _assert_same(before, _state(model))


class Failing(nn.Module):
    """Raises in a forward pass or in a backward pass, on the call that is asked for."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where, self.calls = _network(), where, count()  # an iterator: a number would be put back

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if next(self.calls) > 18:
            if self.where == "forward":
                raise KeyboardInterrupt
            y.register_hook(self._fail)
        return y

    @staticmethod
    def _fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("broken in backward")


@pytest.mark.parametrize(("where", "error"), [("forward", KeyboardInterrupt), ("backward", RuntimeError)])
def test_nothing_changes_when_a_call_raises_half_way(where: str, error: type[BaseException]) -> None:
    model = Failing(where).train()
    before = _state(model)
    with pytest.raises(error):
        _everything(model)
    _assert_same(before, _state(model))


def test_batch_norm_uses_running_statistics_unless_train_mode_is_asked_for() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    x = X.double()
    evaluated = Objective(model, F.cross_entropy, (x, Y)).value()
    trained = Objective(model, F.cross_entropy, (x, Y), mode="train").value()
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(evaluated, F.cross_entropy(model(x), Y))
        model.train()
        torch.testing.assert_close(trained, F.cross_entropy(model(x), Y))


def test_micro_batches_are_refused_where_they_would_change_the_function() -> None:
    with pytest.raises(ValueError, match="`micro_batch_size` must be None in train mode"):
        Objective(_network(), F.cross_entropy, (X, Y), mode="train", micro_batch_size=4)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_model_is_looked_through() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 3))
    eager = Objective(model, F.cross_entropy, (X, Y))
    v = torch.ones(eager.space.size)
    compiled = Objective(torch.compile(model), F.cross_entropy, (X, Y))
    assert compiled.space.names == eager.space.names == ("1.weight", "1.bias", "3.weight", "3.bias")
    assert torch.equal(Hessian(compiled) @ v, Hessian(eager) @ v)
    inside = nn.Sequential(nn.Flatten(), torch.compile(nn.Sequential(model[1], model[2])), model[3])
    nested = Objective(inside, F.cross_entropy, (X, Y))
    assert nested.space.names == ("1.0.weight", "1.0.bias", "2.weight", "2.bias")
    assert torch.equal(Hessian(nested) @ v, Hessian(eager) @ v)
    in_place = nn.Sequential(nn.Flatten(), model[1], model[2], model[3])
    in_place.compile()
    assert torch.equal(Hessian(Objective(in_place, F.cross_entropy, (X, Y))) @ v, Hessian(eager) @ v)


def test_attention_has_its_second_derivative_in_any_mode() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64), Y[:5]
    expected = dense_hessian(model, F.cross_entropy, x, y)
    for mode in ("eval", "train"):
        found = Hessian(Objective(model, F.cross_entropy, (x, y), mode=mode)).to_dense()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def test_parameters_that_the_loss_uses_linearly_or_not_at_all_have_zero_rows() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.tensor([v], dtype=torch.float64)) for v in (1.0, 2.0, 3.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * x + self.b.square()

    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean()

    x = torch.ones(4, dtype=torch.float64)
    H = Hessian(Objective(Linear(), mean, (x, x)))
    torch.testing.assert_close(H.to_dense(), torch.diag(torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)))
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(Hessian(Objective.from_closure(lambda: w.sum(), [w])).to_dense(), torch.zeros(3, 3, dtype=torch.float64))


def test_a_tied_weight_counts_once() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1, 1, bias=False).double()
            self.second = nn.Linear(1, 1, bias=False).double()
            nn.init.ones_(self.first.weight)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * outputs.square().mean()

    x = torch.ones(1, 1, dtype=torch.float64)
    H = Hessian(Objective(Product(), half_square, (x, x)))
    assert H.to_dense().tolist() == [[6.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_give_float32_results(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3))
    reference = Objective(model, F.cross_entropy, (X, Y))
    v = torch.randn(reference.space.size, generator=torch.Generator().manual_seed(2))
    expected = Hessian(reference) @ v
    low = Hessian(Objective(model.to(dtype), F.cross_entropy, (X.to(dtype), Y))) @ v
    assert low.dtype == torch.float32
    assert (low - expected).norm() < 0.05 * expected.norm()


def test_computing_in_float64_leaves_the_model_in_its_own_precision() -> None:
    model = _network()
    double = Objective(model, F.cross_entropy, (X, Y), dtype=torch.float64)
    assert double.theta.dtype == torch.float64
    assert double.theta.equal(Objective(model, F.cross_entropy, (X, Y)).theta.double())
    with torch.no_grad():
        expected = F.cross_entropy(_copy(model)(X.double()), Y)
    torch.testing.assert_close(double.value(), expected, rtol=1e-12, atol=0)
    assert next(model.parameters()).dtype == torch.float32


def _copy(model: nn.Module) -> nn.Module:
    copy = _network().double().eval()
    copy.load_state_dict(model.state_dict())
    return copy


def test_many_products_leave_no_tensors_behind() -> None:
    objective = Objective(_network(), F.cross_entropy, (X, Y))
    H, v = Hessian(objective), torch.ones(objective.space.size)

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    H @ v
    before = live_tensors()
    for _ in range(200):
        H @ v
    assert live_tensors() == before


def test_an_objective_follows_the_model_and_an_operator_keeps_its_point() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    objective = Objective(model, F.cross_entropy, (X, Y))
    H, before = Hessian(objective), objective.value()
    v = torch.ones(objective.space.size)
    product = H @ v
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    assert objective.value() != before
    assert torch.equal(H @ v, product)
    assert not torch.allclose(Hessian(objective) @ v, product)


def test_a_shared_module_and_a_tied_weight_are_put_back() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential()
    model.add_module("a", shared)
    model.add_module("b", shared)
    model.add_module("c", nn.Linear(3, 3))
    model.c.weight = shared.weight
    weight = shared.weight
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    objective = Objective(model, F.cross_entropy, (x, Y[:6]))
    assert objective.space.names == ("a.weight", "a.bias", "c.bias")
    found = Hessian(objective).to_dense()
    assert model.a.weight is model.b.weight is model.c.weight is weight
    expected = dense_hessian(model.double(), F.cross_entropy, x.double(), Y[:6])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.middle, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(checkpoint(lambda z: torch.tanh(self.middle(z)), h, use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_reentrant_checkpoint_is_refused_and_the_other_kind_is_exact() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Checkpointed(reentrant=False).double()
    found = Hessian(Objective(model, F.cross_entropy, (x, Y[:6]))).to_dense()
    torch.testing.assert_close(found, dense_hessian(model, F.cross_entropy, x, Y[:6]), rtol=1e-8, atol=1e-11)
    with pytest.raises(NotSupported, match="use_reentrant=False"):
        Objective(Checkpointed(reentrant=True).double(), F.cross_entropy, (x, Y[:6]))


class Caching(nn.Module):
    """Keeps its last input, as hooks and old weight normalisation keep tensors on modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.count = nn.Linear(3, 3), torch.ones(3), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        self.scale = self.scale * 2
        self.count += 1
        return self.layer(x)


def test_tensors_that_a_forward_pass_hangs_on_modules_are_taken_off() -> None:
    model = Caching()
    scale = model.scale
    Hessian(Objective(model, F.cross_entropy, (torch.ones(2, 3), Y[:2]))) @ torch.ones(12)
    assert model.scale is scale
    assert not hasattr(model, "last")
    assert model.count == 0


class Remembering(nn.Module):
    """Writes plain values, containers, and attributes that were None or not there, at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.features: Any = None
        self.gone: Any = "here"
        self.calls, self.total, self.started, self.name = 0, 0.5, False, "new"
        self.lines, self.by_name, self.shapes = [1], {"a": 1}, {1}
        self.last_two, self.ordered = deque([1, 2], maxlen=2), OrderedDict(a=1, b=2)
        self.counts, self.lists = Counter("aab"), defaultdict(list, {"a": [1]})
        self.nested = {"inner": [{"tensor": torch.zeros(2)}]}
        self.pair = ([1], torch.zeros(2))
        self.helper = SimpleNamespace(calls=0, lines=[], last=None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls, self.total, self.started, self.name = self.calls + 1, self.total * 2, True, "old"
        self.features, self.extra = x, [x]
        self.__dict__.pop("gone", None)
        self.lines.append(x)
        self.by_name.update(a=x, b=x)
        self.shapes.add(x.shape)
        self.last_two.append(x)
        self.ordered.move_to_end("a")
        self.counts.update("abc")
        self.lists["b"].append(x)
        self.nested["inner"].append({})
        self.nested["inner"][0]["tensor"] += 1
        self.nested["inner"][0]["other"] = x
        self.pair[0].append(x)
        self.pair[1].add_(1)
        self.helper.calls, self.helper.last, self.helper.new = self.helper.calls + 1, x, x
        self.helper.lines.append(x)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(3))
            self.added = nn.Linear(3, 3)
        return self.layer(x)


def _plain(value: Any) -> Any:
    """Return a copy with tensors as lists, that compares as a whole."""
    if isinstance(value, Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, dict):
        return (type(value), [(k, _plain(v)) for k, v in value.items()])
    if isinstance(value, list | tuple | deque):
        return (type(value), [_plain(v) for v in value])
    if isinstance(value, SimpleNamespace):
        return _plain(vars(value))
    return set(value) if isinstance(value, set) else value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: _plain(value) for name, value in vars(module).items()}


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("from_closure", [False, True])
def test_what_a_forward_pass_writes_on_modules_is_put_back(times: int, from_closure: bool) -> None:
    model, x = nn.Sequential(Remembering()), torch.ones(2, 3)
    for _ in range(times):
        model(x)
    before, objects = _attributes(model[0]), {name: id(value) for name, value in vars(model[0]).items()}
    if from_closure:
        objective = Objective.from_closure(lambda: F.cross_entropy(model(x), Y[:2]), dict(model.named_parameters()))
    else:
        objective = Objective(model, F.cross_entropy, (x, Y[:2]))
    Hessian(objective) @ torch.ones(objective.space.size)
    assert _attributes(model[0]) == before
    assert {name: id(value) for name, value in vars(model[0]).items()} == objects
    assert model[0].last_two.maxlen == 2
    assert model[0].lists.default_factory is list


def test_what_was_written_is_put_back_when_a_call_raises() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Remembering()

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            raise KeyboardInterrupt

    model = Broken()
    before = _attributes(model.inner)
    with pytest.raises(KeyboardInterrupt):
        Objective(model, F.cross_entropy, (torch.ones(2, 3), Y[:2]))
    assert _attributes(model.inner) == before


def test_what_a_loss_module_keeps_is_put_back() -> None:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Tensor] = []

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.history.append(F.cross_entropy(outputs, targets))
            return self.history[-1]

    loss = Logging()
    Objective(_network(), loss, (X, Y)).gradient()
    assert loss.history == []
