"""What is no function of the parameters alone, or hides its derivatives, is refused; the user's weights stay."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from flatminima._errors import NotDeterministic, NotSupported
from flatminima.objective import Objective
from flatminima.operators import Hessian

g = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=g), torch.randint(0, 3, (8,), generator=g)
TOKENS = torch.randint(0, 5, (8,), generator=g)


def _layer(*, bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 3, bias=bias)


class Cached(nn.Module):
    """Keeps a weight that it computes from another, in one of the ways in which people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = _layer(), how
        self.cache: dict[str, Tensor] = {}
        self.items: list[Tensor] = []
        self.nested: dict[str, list[Tensor]] = {"weights": []}
        self.weight: Tensor | None = None
        self.helper = SimpleNamespace(weight=None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.scaled(), self.layer.bias)

    def scaled(self) -> Tensor:
        new = self.layer.weight * 2
        if self.training:
            return new
        match self.how:
            case "dict":
                return self.cache.setdefault("w", new)
            case "list" | "nested list":
                kept = self.items if self.how == "list" else self.nested["weights"]
                if not kept:
                    kept.append(new)
                return kept[0]
            case "attribute":
                self.weight = new if self.weight is None else self.weight
                return self.weight
            case _:
                self.helper.weight = new if self.helper.weight is None else self.helper.weight
                return self.helper.weight


@pytest.mark.parametrize("how", ["dict", "list", "nested list", "attribute", "object"])
@pytest.mark.parametrize("filled", ["before, without gradient", "before, with gradient", "not before"])
def test_weights_that_a_model_keeps_from_an_earlier_pass_are_refused(how: str, filled: str) -> None:
    model = Cached(how).eval()
    if filled != "not before":
        with torch.set_grad_enabled(filled == "before, with gradient"):
            model(X)
    kept = (dict(model.cache), list(model.items), list(model.nested["weights"]), model.weight, model.helper.weight)
    with pytest.raises(NotSupported, match=r"depends on an earlier pass.*of Cached"):
        Objective(model, F.cross_entropy, (X, Y))
    assert model.cache.keys() == kept[0].keys()
    assert all(model.cache[k] is v for k, v in kept[0].items())
    assert [id(t) for t in model.items] == [id(t) for t in kept[1]]
    assert [id(t) for t in model.nested["weights"]] == [id(t) for t in kept[2]]
    assert model.weight is kept[3]
    assert model.helper.weight is kept[4]
    model.train()
    assert torch.isfinite(Objective(model, F.cross_entropy, (X, Y), mode="train").value())


def test_a_cache_is_refused_also_where_two_passes_are_not_compared() -> None:
    model = Cached("dict").eval()
    with pytest.raises(NotSupported, match="keeps a tensor with the graph of an earlier pass"):
        Objective(model, F.cross_entropy, (X, Y), check_deterministic=False)


def test_a_cache_of_the_closures_model_is_refused() -> None:
    for fill in (False, True):
        model = Cached("dict").eval()
        if fill:
            with torch.no_grad():
                model(X)
        with pytest.raises(NotSupported, match="depends on an earlier pass"):
            Objective.from_closure(lambda model=model: F.cross_entropy(model(X), Y), list(model.parameters()))
        assert len(model.cache) == fill


def test_a_model_that_keeps_features_or_constants_is_accepted() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale, self.constants = _layer(), torch.full((3,), 2.0), [torch.ones(3), 3]
            self.features: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.features.append(self.layer(x))
            self.last = self.features[-1]
            return self.last * self.scale + self.constants[0]

    model = Keeping()
    with torch.no_grad():
        model(X)
    assert torch.isfinite(Objective(model, F.cross_entropy, (X, Y)).value())
    assert len(model.features) == 1


class Hidden(nn.Module):
    """Computes with some parameters where autograd does not look."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.unused, self.how = _layer(), _layer(), nn.Parameter(torch.ones(2)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "all":
            with torch.no_grad():
                return self.second(self.first(x))
        if self.how == "first":
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)
        if self.how == "detached":
            return self.second(self.first(x).detach())
        return self.second(F.linear(x, self.first.weight.data, self.first.bias.data))


@pytest.mark.parametrize("how", ["all", "first", "detached", "data"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loss_that_changes_where_autograd_sees_no_path_is_refused(how: str, dtype: torch.dtype) -> None:
    model = Hidden(how).to(dtype)
    with pytest.raises(NotSupported, match=r"changes with 'first.weight' of 'first' \(Linear\), but torch.autograd sees no path"):
        Objective(model, F.cross_entropy, (X.to(dtype), Y))
    if how != "all":
        names = Objective(model, F.cross_entropy, (X.to(dtype), Y), params=["second", "unused"]).space.names
        assert names == ("unused", "second.weight", "second.bias")


def test_a_closure_without_gradients_is_refused_and_one_that_differentiates_inside_is_not() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def hidden() -> Tensor:
        with torch.no_grad():
            return w.square().sum()

    with pytest.raises(NotSupported, match=r"changes with '0', but torch.autograd sees no path"):
        Objective.from_closure(hidden, [w])

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
        return gradient.square().sum()

    objective = Objective.from_closure(penalty, [w])
    assert objective.value() == 9 * (1 + 16)
    torch.testing.assert_close(objective.gradient(), torch.tensor([36.0, 36.0 * 8]))


def test_parameters_that_only_choose_a_branch_are_accepted() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = _layer(bias=False), nn.ModuleList([_layer() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            choice = self.router(x).argmax(1)
            return torch.stack([self.experts[int(k)](row) for row, k in zip(x, choice, strict=True)])

    model = Routed()
    with torch.no_grad():
        for k, expert in enumerate(model.experts):
            expert.bias.add_(k)
    gradient = Objective(model, F.cross_entropy, (X, Y)).gradient()
    assert gradient[:9].count_nonzero() == 0
    assert gradient[9:].count_nonzero() > 0


class Clipping(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.write = _layer(), write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.inner.weight)
        return self.inner(x)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "data.clamp_": lambda w: w.data.clamp_(-0.1, 0.1),
    "decay": lambda w: w.mul_(0.9),
}
HARMLESS: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": lambda w: w.clamp_(-9.0, 9.0),
    "data.clamp_": lambda w: w.data.clamp_(-9.0, 9.0),
    "copy_": lambda w: w.copy_(w.clone()),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("params", [None, "*.bias"])
def test_a_forward_pass_that_writes_to_parameters_is_refused_and_undone(write: str, params: str | None) -> None:
    model = Clipping(WRITES[write])
    before = model.inner.weight.detach().clone()
    with pytest.raises(NotSupported, match=r"writes to 'inner.weight' of 'inner' \(Linear\)"):
        Objective(model, F.cross_entropy, (X, Y), params=params)
    assert torch.equal(model.inner.weight, before)


@pytest.mark.parametrize("write", HARMLESS)
def test_a_write_that_changes_no_value_does_no_harm_however_it_is_spelt(write: str) -> None:
    model, plain = Clipping(HARMLESS[write]), Clipping(lambda w: w)
    plain.load_state_dict(model.state_dict())
    batches = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    found, expected = (Hessian(Objective(m, F.cross_entropy, batches)) for m in (model, plain))
    v = torch.ones(12)
    with found.keeping_graphs():
        for _ in range(2):
            assert torch.equal(found @ v, expected @ v)
    closure = Objective.from_closure(lambda: F.cross_entropy(model(X), Y), list(model.parameters()))
    torch.testing.assert_close(Hessian(closure) @ v, expected @ v)


def test_a_write_that_a_backward_pass_cannot_bear_is_named() -> None:
    class Late(Clipping):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.inner(x).tanh() @ self.inner.weight)

    model = Late(HARMLESS["clamp_"])
    with pytest.raises(NotSupported, match=r"writes to 'inner.weight'"):
        Objective(model, F.cross_entropy, (X, Y))
    with pytest.raises(NotSupported, match=r"writes to 'inner.weight'"):
        Objective.from_closure(lambda: F.cross_entropy(model(X), Y), dict(model.named_parameters()))


def test_an_embedding_with_a_largest_norm_that_it_does_not_reach_is_accepted() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), _layer())
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
    plain = nn.Sequential(nn.Embedding(5, 3), _layer())
    plain.load_state_dict(model.state_dict())
    found, expected = (Objective(m, F.cross_entropy, (TOKENS, Y)).gradient() for m in (model, plain))
    assert torch.equal(found, expected)


def test_an_embedding_with_a_largest_norm_is_refused_and_unchanged() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), _layer())
    with torch.no_grad():
        model[0].weight.mul_(10.0)
    before = model[0].weight.detach().clone()
    with pytest.raises(NotSupported, match=r"writes to '0.weight' of '0' \(Embedding\).*max_norm"):
        Objective(model, F.cross_entropy, (TOKENS, Y))
    with pytest.raises(NotSupported, match=r"writes to '0.weight'"):
        Objective.from_closure(lambda: F.cross_entropy(model(TOKENS), Y), dict(model.named_parameters()))
    with pytest.raises(NotSupported, match=r"writes to"):
        Objective(model, F.cross_entropy, (TOKENS, Y), params="1")
    assert torch.equal(model[0].weight, before)


def test_a_write_to_a_parameter_that_is_reached_around_the_modules_is_undone() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _layer()
            self.weights = [self.inner.weight]

        def forward(self, x: Tensor) -> Tensor:
            self.weights[0].data.mul_(0.5)
            return self.inner(x)

    model = Listed()
    before = model.inner.weight.detach().clone()
    with pytest.raises(NotSupported, match=r"writes to 'inner.weight'"):
        Objective(model, F.cross_entropy, (X, Y))
    assert torch.equal(model.inner.weight, before)


def test_dropout_inside_a_closure_is_not_deterministic() -> None:
    model = nn.Sequential(_layer(), nn.Dropout(0.5))
    state = torch.get_rng_state()
    with pytest.raises(NotDeterministic, match="Put its model in eval mode"):
        Objective.from_closure(lambda: F.cross_entropy(model(X), Y), list(model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()
    objective = Objective.from_closure(lambda: F.cross_entropy(model(X), Y), list(model.parameters()))
    with torch.no_grad():
        assert objective.value() == F.cross_entropy(model(X), Y)
