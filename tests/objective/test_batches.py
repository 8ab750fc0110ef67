"""Batch forms, bad data, determinism."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from flatminima import _errors as errors
from flatminima.objective import Objective
from flatminima.operators import Hessian

g = torch.Generator().manual_seed(0)
X1, X2 = torch.randn(10, 3, generator=g, dtype=torch.float64), torch.randn(10, 2, generator=g, dtype=torch.float64)
Y = torch.randint(0, 3, (10,), generator=g)
V = torch.randn(18 + 9, generator=g, dtype=torch.float64)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner, self.head = nn.Linear(5, 3).double(), nn.Linear(3, 3, bias=False).double()

    def forward(self, first: Tensor, second: Tensor | None = None, *, as_object: bool = False) -> Any:
        x = first if second is None else torch.cat([first, second], 1)
        return self.head(torch.tanh(self.inner(x)))


class WithLogits(TwoInputs):
    def forward(self, first: Tensor, second: Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(logits=super().forward(first, second), hidden=None)


class WithMapping(TwoInputs):
    def forward(self, first: Tensor, second: Tensor) -> Any:  # type: ignore[override]
        return {"logits": super().forward(first, second)}


def _pairs() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for start in (0, 4, 8):
        yield X1[start : start + 4], X2[start : start + 4], Y[start : start + 4]


Named = namedtuple("Named", ["first", "second", "labels"])


def _model_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


FORMS: dict[str, tuple[type[nn.Module], Any, Any]] = {
    "(x, y)": (TwoInputs, F.cross_entropy, [(torch.cat([a, b], 1), y) for a, b, y in _pairs()]),
    "(x1, x2, y)": (TwoInputs, F.cross_entropy, list(_pairs())),
    "list [x1, x2, y]": (TwoInputs, F.cross_entropy, [list(batch) for batch in _pairs()]),
    "named tuple": (TwoInputs, F.cross_entropy, [Named(*batch) for batch in _pairs()]),
    "(inputs by name, y)": (TwoInputs, F.cross_entropy, [({"first": a, "second": b}, y) for a, b, y in _pairs()]),
    "mapping with labels": (TwoInputs, F.cross_entropy, [{"first": a, "second": b, "labels": y} for a, b, y in _pairs()]),
    "other mapping": (TwoInputs, F.cross_entropy, [UserDict(first=a, second=b, labels=y) for a, b, y in _pairs()]),
    "output with .logits": (WithLogits, nn.CrossEntropyLoss(), list(_pairs())),
    "output with entry logits": (WithMapping, nn.CrossEntropyLoss(), list(_pairs())),
    "loss(model, batch)": (TwoInputs, _model_loss, list(_pairs())),
    "loader": (TwoInputs, F.cross_entropy, DataLoader(TensorDataset(X1, X2, Y), batch_size=4)),
    "one batch": (TwoInputs, F.cross_entropy, (X1, X2, Y)),
    "one mapping": (TwoInputs, F.cross_entropy, {"first": X1, "second": X2, "labels": Y}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_batch_form_gives_the_same_product(form: str) -> None:
    build, loss, data = FORMS[form]
    reference = Hessian(Objective(TwoInputs(), F.cross_entropy, [(torch.cat([X1, X2], 1), Y)])) @ V
    product = Hessian(Objective(build(), loss, data)) @ V
    torch.testing.assert_close(product, reference, rtol=1e-10, atol=1e-12)


def test_a_closure_gives_the_same_product_and_puts_the_parameters_back() -> None:
    model = TwoInputs()
    before = [p.detach().clone() for p in model.parameters()]
    objective = Objective.from_closure(lambda: F.cross_entropy(model(X1, X2), Y), dict(model.named_parameters()))
    reference = Objective(TwoInputs(), F.cross_entropy, (X1, X2, Y))
    torch.testing.assert_close(Hessian(objective) @ V, Hessian(reference) @ V, rtol=1e-10, atol=1e-12)
    theta = objective.theta + 0.1
    torch.testing.assert_close(objective.at(theta).gradient(), reference.at(theta).gradient(), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))


def test_a_closure_that_raises_leaves_the_parameters_as_they_were() -> None:
    w = torch.ones(2, requires_grad=True)
    objective = Objective.from_closure(lambda: w.square().sum() / (w[0] != 5), [w])
    calls = objective.at(torch.tensor([5.0, 2.0]))
    assert not torch.isfinite(calls.value())
    assert torch.equal(w.detach(), torch.ones(2))

    def broken() -> Tensor:
        if w[0] == 7:
            raise KeyboardInterrupt
        return w.sum()

    with pytest.raises(KeyboardInterrupt):
        Objective.from_closure(broken, [w]).at(torch.tensor([7.0, 7.0])).value()
    assert torch.equal(w.detach(), torch.ones(2))


def test_what_a_closure_cannot_tell_is_said() -> None:
    w = torch.ones(2, requires_grad=True)
    objective = Objective.from_closure(lambda: w.sum(), [w])
    with pytest.raises(errors.NotSupported, match="not known to an objective made from a closure"):
        objective.subset(1)
    with pytest.raises(ValueError, match="leaf tensors with requires_grad=True"):
        Objective.from_closure(lambda: w.sum(), [torch.ones(2)])
    values = iter(range(100))
    with pytest.raises(errors.NotDeterministic, match="Two calls of the closure gave"):
        Objective.from_closure(lambda: w.sum() * next(values), [w])


LINEAR = nn.Linear(3, 3).double()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((batch for batch in [(X1, Y)]), TypeError, "must allow more than one pass.*Pass list"),
        (TensorDataset(X1, Y), TypeError, "DataLoader"),
        (7, TypeError, "`data` must be a DataLoader"),
        ([], ValueError, "at least one example"),
        (DataLoader(TensorDataset(X1[:0], Y[:0])), ValueError, "at least one example"),
        ([(X1[:0], Y[:0])], ValueError, "at least one example"),
        ([X1], ValueError, "A batch must be"),
        ([(X1.float(), Y)], ValueError, r"do not fit batch 0, \(float32\[10, 3\], int64\[10\]\)"),
        ([(X1, Y), (X2, Y)], ValueError, "do not fit batch 1"),
        ([(X1, Y + 5)], ValueError, "do not fit batch 0"),
    ],
)
def test_bad_data_gets_one_clear_error(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Objective(LINEAR, F.cross_entropy, data)


def test_the_batch_with_a_nan_loss_is_named() -> None:
    bad = X1.clone()
    bad[6, 1] = torch.nan
    with pytest.raises(errors.NonFiniteLoss, match=r"batch 1 \(examples 4 to 7\) is nan"):
        Objective(LINEAR, F.cross_entropy, [(bad[:4], Y[:4]), (bad[4:8], Y[4:8]), (bad[8:], Y[8:])])


def test_a_shuffling_loader_is_detected() -> None:
    loader = DataLoader(TensorDataset(X1, Y), batch_size=4, shuffle=True)
    with pytest.raises(errors.NotDeterministic, match=r"DataLoader shuffles\. Build it with shuffle=False"):
        Objective(LINEAR, F.cross_entropy, loader)
    assert Objective(LINEAR, F.cross_entropy, list(loader)).num_examples == 10


def test_a_shuffling_loader_with_its_own_generator_leaves_that_as_it_was() -> None:
    own = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(X1, Y), batch_size=4, shuffle=True, generator=own)
    state = own.get_state()
    with pytest.raises(errors.NotDeterministic, match="shuffles"):
        Objective(LINEAR, F.cross_entropy, loader)
    assert torch.equal(own.get_state(), state)


def test_dropout_in_train_mode_is_named_as_the_culprit() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.Linear(8, 3)).double()
    with pytest.raises(errors.NotDeterministic, match=r"first module to differ is '1.1' \(Dropout\).*eval mode"):
        Objective(model, F.cross_entropy, (X1, Y), mode="train")
    assert torch.isfinite(Objective(model, F.cross_entropy, (X1, Y)).value())
    assert torch.isfinite(Objective(model, F.cross_entropy, (X1, Y), mode="train", check_deterministic=False).value())


def test_a_subset_is_the_first_examples_or_a_seeded_choice() -> None:
    objective = Objective(LINEAR, F.cross_entropy, [(X1[:4], Y[:4]), (X1[4:], Y[4:])])
    first = objective.subset(6)
    assert first.num_examples == 6
    torch.testing.assert_close(first.value(), Objective(LINEAR, F.cross_entropy, (X1[:6], Y[:6])).value())
    one, two = (objective.subset(6, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.num_examples == 6
    assert one.value() == two.value() != first.value()
    with pytest.raises(ValueError, match="at most 10"):
        objective.subset(11)


def test_parameters_are_picked_by_pattern_module_or_themselves() -> None:
    model = TwoInputs()
    for params, names in (
        ("inner.*", ("inner.weight", "inner.bias")),
        (model.inner, ("inner.weight", "inner.bias")),
        (["head", model.inner.bias], ("inner.bias", "head.weight")),
        ("*.weight", ("inner.weight", "head.weight")),
    ):
        objective = Objective(model, F.cross_entropy, (X1, X2, Y), params=params)  # type: ignore[arg-type]
        assert objective.space.names == names
        block = Hessian(Objective(model, F.cross_entropy, (X1, X2, Y))).to_dense()
        where = torch.cat([torch.arange(18 + 9)[_space(model)[name]] for name in names])
        torch.testing.assert_close(Hessian(objective).to_dense(), block[where][:, where])
    with pytest.raises(ValueError, match=r"No parameter matches 'inner.wieght'. Did you mean 'inner.weight'\?"):
        Objective(model, F.cross_entropy, (X1, X2, Y), params="inner.wieght")
    with pytest.raises(ValueError, match="foreign one"):
        Objective(model, F.cross_entropy, (X1, X2, Y), params=nn.Parameter(torch.ones(2)))


def _space(model: nn.Module) -> Any:
    return Objective(model, F.cross_entropy, (X1, X2, Y)).space.slices


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trainable parameter"):
        Objective(nn.Linear(3, 3).double().requires_grad_(False), F.cross_entropy, (X1, Y))
    with pytest.raises(ValueError, match="real floating point"):
        Objective(nn.Linear(3, 3, dtype=torch.complex64), F.cross_entropy, (X1, Y))
