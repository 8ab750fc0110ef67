"""Models and data that look ordinary and are not: each gets the right number, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import flatminima as fm
from tests.conformance.oracles import dense_gauss_newton, dense_hessian

D64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X, Y = torch.randn(12, 4, generator=generator(), dtype=D64), torch.randint(0, 3, (12,), generator=generator(1))


def seeded(build: Callable[[], nn.Module], scale: float = 1.0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def relu_net(*last: nn.Module) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), *last))


def test_log_softmax_with_nll_is_cross_entropy_on_logits_in_every_number() -> None:
    logits = fm.Objective(relu_net(), F.cross_entropy, (X, Y))
    logs = fm.Objective(relu_net(nn.LogSoftmax(1)), F.nll_loss, (X, Y))
    torch.testing.assert_close(fm.GaussNewton(logs).to_dense(), fm.GaussNewton(logits).to_dense(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fm.diagonal(fm.GaussNewton(logs)).value, fm.diagonal(fm.GaussNewton(logits)).value)
    assert fm.find_symmetries(logs).kinds() == fm.find_symmetries(logits).kinds()
    for name in fm.measures.available():
        one, other = (fm.measures.get(name)(o, generator=generator()) for o in (logits, logs))
        assert float(one) == pytest.approx(float(other), rel=1e-6), name
    with pytest.raises(fm.NotSupported, match="log-probabilities"):
        fm.GaussNewton(fm.Objective(relu_net(), F.nll_loss, (X, Y))) @ torch.ones(43, dtype=D64)


class Tagger(nn.Module):
    """One unbatched sequence: its positions are the loss's terms, and they depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        o = self.layer(x)
        return o + torch.cat([torch.zeros_like(o[:1]), o[:-1]])


@pytest.mark.parametrize("build", [Tagger, Coupled])
def test_rows_that_depend_on_each_other_have_no_closed_form_and_no_wrong_number(build: type[nn.Module]) -> None:
    model = seeded(build, 3.0)
    G = fm.GaussNewton(fm.Objective(model, F.cross_entropy, (X, Y)))
    expected = dense_gauss_newton(model, F.cross_entropy, X, Y).trace()
    found = fm.trace(G, rtol=0.05, generator=generator())
    assert abs(float(found) - expected) <= 5 * float(found.stderr) + 1e-9


class Reused(nn.Module):
    """A weight whose second use is silent on a batch of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        active = (x.abs().sum(1, keepdim=True) > 0).to(x.dtype)
        return self.head(torch.relu(self.enc(x)) + active * F.linear(x, self.enc.weight))


def test_each_batch_is_checked_for_itself() -> None:
    model = seeded(Reused)
    x = torch.cat([torch.zeros(6, 4, dtype=D64), X[:6]])
    G = fm.GaussNewton(fm.Objective(model, F.cross_entropy, [(x[:6], Y[:6]), (x[6:], Y[6:])]))
    expected = dense_gauss_newton(model, F.cross_entropy, x, Y).diagonal()
    torch.testing.assert_close(fm.diagonal(G).value, expected, rtol=1e-9, atol=1e-12)


def test_a_second_derivative_that_torch_gets_wrong_is_refused() -> None:
    model = seeded(lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)))
    objective = fm.Objective(model, F.cross_entropy, (X, Y))
    with pytest.raises(fm.NotSupported, match=r"not symmetric.*weight_norm"):
        fm.Hessian(objective) @ objective.theta


class HiddenParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.again = [self.a]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(torch.tanh(self.a(x)), _held(self))))


def _held(model: HiddenParameter) -> Tensor:
    return KEPT[id(model)]


KEPT: dict[int, Tensor] = {}


def test_a_parameter_that_is_reached_outside_its_module_is_refused() -> None:
    model = HiddenParameter().double()
    KEPT[id(model)] = model.a.weight
    with pytest.raises(fm.NotSupported, match=r"'a.weight' is not the one that a plain backward pass gives"):
        fm.Objective(model, F.cross_entropy, (X, Y))


class Merging(nn.Linear):
    """Merges a low-rank part into the weight when told to evaluate, as adapters do."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.A, self.merged = nn.Parameter(torch.ones(3, 4)), False

    def train(self, mode: bool = True) -> Merging:
        if not mode and not self.merged:
            self.weight.data += self.A.data
        self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.merged else self.weight + self.A, self.bias)


def test_a_train_method_that_merges_weights_is_not_called() -> None:
    model = Merging().double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    objective = fm.Objective(model, F.cross_entropy, (X, Y))
    assert objective.space.unflatten(objective.gradient())["A"].abs().sum() > 0
    assert not model.merged
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([1.0, -0.5]))
        self.first, self.second = nn.Linear(4, 13), nn.Linear(4, 13)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate.softmax(0)
        return weights[0] * self.first(x) + weights[1] * self.second(x)


def test_a_residual_that_is_blind_to_signs_is_not_taken_for_zero() -> None:
    model = seeded(Gated)
    x, y = X, torch.randn(12, 13, generator=generator(3), dtype=D64)
    H = fm.Hessian(fm.Objective(model, F.mse_loss, (x, y)))
    expected = dense_hessian(model, F.mse_loss, x, y).trace()
    for seed in range(12):
        found = fm.trace(H, generator=generator(seed))
        assert abs(float(found) - expected) <= 5 * float(found.stderr) + 1e-9


class Penalised(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) + 0.1 * outputs.logsumexp(1).square().mean()


def test_a_subclass_of_cross_entropy_has_no_softmax_shift() -> None:
    objective = fm.Objective(relu_net(), Penalised(), (X, Y))
    assert "softmax shift" not in fm.find_symmetries(objective).kinds()
    assert fm.symmetries.centre_classes(objective) is objective


def test_a_selection_of_parameters_has_no_least_trace() -> None:
    objective = fm.Objective(relu_net(), F.cross_entropy, (X, Y), params="0.*")
    with pytest.raises(fm.NotSupported, match="needs all parameters that the rescaling touches"):
        fm.measures.NodewiseMinimumSharpness()(objective)
    audit = fm.audit(objective, measures=["minimum-sharpness", "fisher-rao"], num_moves=1, generator=generator())
    assert [row.verdict for row in audit.rows] == ["failed", "survives"]
    assert audit.settings["canonical_form"] == "min-norm"


def test_micro_batches_must_not_cut_what_is_no_example() -> None:
    def to_prototypes(model: nn.Module, batch: Any) -> Tensor:
        x, prototypes, y = batch
        return F.cross_entropy(model(x) @ prototypes.T, y)

    prototypes = torch.randn(3, 3, generator=generator(2), dtype=D64)
    batches = [(X[:5], prototypes, Y[:5]), (X[5:8], prototypes, 0 * Y[5:8])]
    with pytest.raises(ValueError, match=r"`micro_batch_size` must not change the loss"):
        fm.Objective(relu_net(), to_prototypes, batches, micro_batch_size=2)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


@pytest.mark.parametrize("loss", [F.binary_cross_entropy_with_logits, F.mse_loss, nn.HuberLoss()])
def test_outputs_without_an_axis_of_classes_have_exact_traces(loss: Callable[..., Tensor]) -> None:
    model, y = seeded(Squeezed), (Y == 1).double()
    objective = fm.Objective(model, loss, [(X[:7], y[:7]), (X[7:], y[7:])])
    expected = dense_gauss_newton(model, loss, X, y).diagonal()
    torch.testing.assert_close(fm.diagonal(fm.GaussNewton(objective)).value, expected, rtol=1e-8, atol=1e-12)
    assert fm.audit(objective, measures=["hessian-trace"], num_moves=1, generator=generator()).rows[0].verdict == "moves"


def test_batch_statistics_are_sampled_and_audited() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    objective = fm.Objective(model, F.cross_entropy, (X, Y), mode="train")
    dense = fm.Hessian(objective).to_dense()
    assert float(fm.trace(fm.Hessian(objective), generator=generator())) == pytest.approx(dense.trace().item(), rel=0.2)
    audit = fm.audit(objective, measures=["hessian-trace"], num_moves=1, generator=generator())
    assert any("Train mode" in note for note in audit.notes)


def test_class_targets_of_bytes_are_class_targets() -> None:
    losses = (F.cross_entropy, nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0], dtype=D64)))
    for loss in losses:
        numbers, values = (fm.Objective(relu_net(), loss, (X, y)) for y in (Y, Y.to(torch.uint8)))
        torch.testing.assert_close(values.value(), numbers.value())
        torch.testing.assert_close(fm.diagonal(fm.GaussNewton(values)).value, fm.diagonal(fm.GaussNewton(numbers)).value)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        o = torch.tanh(self.layer(x))
        return o, o.square()


def test_outputs_in_a_tuple_have_a_hessian_and_no_gauss_newton_matrix() -> None:
    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets) + outputs[1].mean()

    objective = fm.Objective(seeded(Pair), loss, (X, Y))
    dense = fm.Hessian(objective).to_dense()
    assert float(fm.trace(fm.Hessian(objective), method="exact")) == pytest.approx(dense.trace().item())
    with pytest.raises(fm.NotSupported, match="one output tensor"):
        fm.trace(fm.GaussNewton(objective))
    audit = fm.audit(objective, measures=["fisher-rao", "hessian-trace"], num_moves=1, generator=generator())
    assert audit.rows[0].verdict == "failed"


class FixedType(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.zeros(len(x), 4, dtype=torch.float32) @ self.cell.weight + self.cell(x)))


def test_a_model_that_fixes_its_own_precision_is_told_what_to_do() -> None:
    objective = fm.Objective(FixedType(), F.cross_entropy, (X.float(), Y))
    with pytest.raises(ValueError, match=r"does not run in torch.float64.*pass dtype=None"):
        fm.audit(objective, generator=generator())


def test_a_small_hessian_is_summed_exactly_where_probes_would_take_longer() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.InstanceNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)))
    x = X[:, None]
    found = fm.trace(fm.Hessian(fm.Objective(model, F.cross_entropy, (x, Y))), rtol=1e-3, generator=generator())
    assert float(found) == pytest.approx(dense_hessian(model, F.cross_entropy, x, Y).trace().item(), rel=1e-6)
    assert found.num_products < 300


def test_the_generator_of_a_sampler_is_put_back() -> None:
    own = generator(4)
    data = TensorDataset(X, Y)
    state = own.get_state()
    with pytest.raises(fm.NotDeterministic, match="shuffles"):
        fm.Objective(relu_net(), F.cross_entropy, DataLoader(data, 4, sampler=RandomSampler(data, generator=own)))
    assert torch.equal(own.get_state(), state)


class Keeping(nn.Module):
    """Keeps a result with its graph, which torch refuses to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.net(x)
        return self.kept


def test_a_model_that_keeps_its_last_result_can_be_moved() -> None:
    model = seeded(Keeping)
    model(X)
    symmetries = fm.find_symmetries(model, X)
    assert "node" in symmetries.kinds()
    fm.check_equivalent(model, fm.random_equivalent(model, symmetries, generator=generator()), X)


def test_autocast_of_the_caller_does_not_reach_in() -> None:
    objective = fm.Objective(relu_net().float(), F.cross_entropy, (X.float(), Y))
    expected = objective.gradient()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(objective.gradient(), expected)


def test_unused_parameters_and_exact_zeros_are_named() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    audit = fm.audit(fm.Objective(seeded(Extra), F.cross_entropy, (X, Y)), measures=["fisher-rao"], generator=generator())
    assert any("Zero rows of the Hessian" in n and "unused.weight, unused.bias" in n for n in audit.notes)
    zero = fm.Objective(seeded(lambda: nn.Linear(4, 3), 0.0), F.cross_entropy, (X, Y))
    row = fm.audit(zero, measures=["radial-curvature"], generator=generator()).rows[0]
    assert (row.verdict, row.base.value) == ("failed", None)
    assert "the value is 0" in row.base.error


def test_a_bias_before_batch_norm_is_noted_as_free() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))).eval()
    assert any("shifts of 0.bias" in note for note in fm.find_symmetries(model, X).notes)
    plain = seeded(lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))).eval()
    assert not any("shifts of" in note for note in fm.find_symmetries(plain, X).notes)


def test_logits_that_cannot_be_shifted_are_noted() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
    notes = fm.find_symmetries(model, X, loss=F.cross_entropy).notes
    assert any(note.startswith("softmax shift: ") for note in notes)


def test_a_product_that_overflows_warns() -> None:
    model = nn.Linear(4, 3).half()
    with torch.no_grad():
        model.weight.fill_(0.1)
    objective = fm.Objective(model, F.mse_loss, (torch.full((2, 4), 200.0).half(), torch.zeros(2, 3).half()))
    with pytest.warns(RuntimeWarning, match="overflowed"):
        fm.Hessian(objective) @ torch.ones(15)


def test_a_saturated_loss_is_not_taken_for_a_wrong_derivative() -> None:
    # With logits this far apart the Hessian is a difference of numbers of order 1, and its rounding is large beside it.
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)))
    x = X.repeat(8, 1)
    with torch.no_grad():
        model[-1].weight.mul_(300.0)
        logits = model(x)
        y = logits.argmax(dim=1)
        apart = (logits.topk(2, dim=1).values @ torch.tensor([1.0, -1.0], dtype=D64)) > 18
    objective = fm.Objective(model, F.cross_entropy, (x[apart], y[apart]))
    assert 0 < float(objective.value()) < 1e-7
    H = fm.Hessian(objective)
    expected = dense_hessian(model, F.cross_entropy, x[apart], y[apart])
    torch.testing.assert_close(H.to_dense(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert fm.eigenpairs(H, generator=generator()).values[0] > 0


class Sequence(nn.Module):
    """Time comes first inside, and examples first outside."""

    def __init__(self, *inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(*inner), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).mean(0))


def _layers() -> nn.Module:
    return Sequence(nn.Linear(3, 25), nn.ReLU(), width=25)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(3, 1, 5, dropout=0.0)
    return Sequence(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), width=3)


@pytest.mark.parametrize("build", [_layers, _encoder])
@pytest.mark.parametrize("length", [5, 16])
def test_sequences_as_long_as_the_batch_have_the_exact_trace(build: Callable[[], nn.Module], length: int) -> None:
    model = seeded(build)
    x = torch.randn(16, length, 3, generator=generator(), dtype=D64) * (1.5 * torch.randn(16, 1, 1, generator=generator(1))).exp()
    y = torch.randint(0, 4, (16,), generator=generator(2))
    found = fm.trace(fm.GaussNewton(fm.Objective(model, F.cross_entropy, (x, y))))
    assert found.method == "exact Gauss-Newton trace"
    assert float(found) == pytest.approx(dense_gauss_newton(model, F.cross_entropy, x, y).trace().item(), rel=1e-9)
