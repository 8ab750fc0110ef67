"""Matrices between layers, shifts and sums are named where they are symmetries, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatminima.symmetries import find_symmetries
from flatminima.symmetries.inputs import Call
from tests.symmetries.networks import mlp, randomised
from tests.symmetries.test_uncovered import Net, linear

BETWEEN = ": no nonlinearity lies between them"


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


#: Inputs of every form, many enough for the oracle.
ROWS, TOKENS, IMAGES, CHANNELS = drawn(60, 4), drawn(40, 3, 4), drawn(30, 2, 5, 5), drawn(30, 4, 3, 3)
ENTRIES = torch.randint(7, (30, 3), generator=torch.Generator().manual_seed(1))


def conv(a: int, b: int, kernel: int = 1, **options: int) -> nn.Conv2d:
    return nn.Conv2d(a, b, kernel, **options)  # type: ignore[arg-type]


def attention(fused: bool, heads: int = 1) -> Net:
    def rule(s: Net, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(2, (heads, -1)).transpose(1, 2) for m in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(q, k, v) if fused else (q @ k.transpose(2, 3)).softmax(-1) @ v
        return s.o(y.transpose(1, 2).flatten(2))

    return Net(rule, q=linear(4, 4), k=linear(4, 4), v=linear(4, 4), o=linear(4, 3))


def pair(rule: Callable[[Net, Tensor], Tensor], i: nn.Module, o: nn.Module, **more: nn.Module | Tensor) -> Net:
    return Net(rule, i=i, o=o, **more)


def two_readers(rule: Callable[[Tensor], tuple[Tensor, Tensor]], width: int) -> Net:
    def both(s: Net, x: Tensor) -> Tensor:
        left, right = rule(s.i(x))
        return torch.cat((s.o(left), s.p(right)), 1)

    return pair(both, linear(4, 6), linear(width, 3), p=linear(width, 3))


#: Name -> (network, inputs, the layers that the note names).
TRUE: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "linear": (lambda: nn.Sequential(linear(4, 5), linear(5, 3)), ROWS, "0, 1"),
    "without biases": (lambda: nn.Sequential(linear(4, 5, False), linear(5, 3, False)), ROWS, "0, 1"),
    "dropout": (lambda: nn.Sequential(linear(4, 5), nn.Dropout(), linear(5, 3)), ROWS, "0, 2"),
    "three": (lambda: nn.Sequential(linear(4, 5), linear(5, 6), linear(6, 3)), ROWS, "1, 2"),
    "a number": (lambda: pair(lambda s, x: s.o(-s.i(x) / 3 * 0.5), linear(4, 5), linear(5, 3)), ROWS, "i, o"),
    "parameters": (lambda: Net(lambda s, x: x @ s.a @ s.b, a=torch.ones(4, 5), b=torch.ones(5, 3)), ROWS, "a, b"),
    "from the left": (lambda: Net(lambda s, x: (s.b @ (s.a @ x.T)).T, a=torch.ones(5, 4), b=torch.ones(3, 5)), ROWS, "a, b"),
    "a gain of each unit": (
        lambda: pair(lambda s, x: s.o(s.i(x) * s.k), linear(4, 5), linear(5, 3), k=torch.ones(5)),
        ROWS,
        "i, o",
    ),
    "flattened image": (lambda: nn.Sequential(conv(2, 3, 2), nn.Flatten(), linear(48, 3)), IMAGES, "0, 2"),
    "flattened tokens": (lambda: nn.Sequential(linear(4, 5), nn.Flatten(), linear(15, 3)), TOKENS, "0, 2"),
    "convolutions": (lambda: nn.Sequential(conv(2, 4), conv(4, 3, 3)), IMAGES, "0, 1"),
    "convolutions, padded": (lambda: nn.Sequential(conv(2, 4), nn.AvgPool2d(2), conv(4, 3, 3, padding=1)), IMAGES, "0, 2"),
    "transposed convolutions": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 2), nn.ConvTranspose2d(4, 3, 3)),
        IMAGES,
        "0, 1",
    ),
    "pixel unshuffle": (
        lambda: nn.Sequential(conv(2, 3, 2), nn.PixelUnshuffle(2), conv(12, 3)),
        IMAGES,
        "0, 2",
    ),
    "BatchNorm": (lambda: nn.Sequential(conv(2, 4), nn.BatchNorm2d(4), conv(4, 3, 2)), IMAGES, "0, 2"),
    "BatchNorm without gain": (
        lambda: nn.Sequential(conv(2, 4, bias=False), nn.BatchNorm2d(4, affine=False), conv(4, 3, 2)),
        IMAGES,
        "0, 2",
    ),
    "LoRA": (
        lambda: Net(lambda s, x: F.relu(s.w(x) + 2 * s.b(s.a(x))), w=linear(4, 5), a=linear(4, 2, False), b=linear(2, 5, False)),
        ROWS,
        "a, b",
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), linear(4, 3)), ENTRIES, "0, 1"),
    "embedding with positions": (
        lambda: pair(lambda s, x: s.o(s.i(x) + s.positions[:3]), nn.Embedding(7, 4), linear(4, 3), positions=torch.ones(5, 4)),
        ENTRIES,
        "i, o",
    ),
    "a sum of two": (
        lambda: pair(lambda s, x: s.o(s.i(x) + s.p(x.sin())), linear(4, 5), linear(5, 3), p=linear(4, 5)),
        ROWS,
        "i, p, o",
    ),
    "two readers": (lambda: two_readers(lambda h: (h, h), 6), ROWS, "i, o, p"),
    "zeros beside": (lambda: pair(lambda s, x: s.o(F.pad(s.i(x), (0, 5))), linear(4, 5), linear(10, 3)), ROWS, "i, o"),
    "attention": (lambda: attention(False), TOKENS, "v, o"),
    "fused attention": (lambda: attention(True), TOKENS, "v, o"),
}
#: Name -> (network, inputs, the layer that makes what cannot be mixed). The last layer's name is o or the last number.
FALSE: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "SwiGLU": (
        lambda: pair(lambda s, x: s.o(s.i(x) * F.silu(s.gate(x))), linear(4, 5), linear(5, 3), gate=linear(4, 5)),
        ROWS,
        "i",
    ),
    "times a function of the input": (lambda: pair(lambda s, x: s.o(s.i(x) * x.sin()), linear(4, 4), linear(4, 3)), ROWS, "i"),
    "function of the input times": (lambda: pair(lambda s, x: s.o(x.sin() * s.i(x)), linear(4, 4), linear(4, 3)), ROWS, "i"),
    "divided by a function of the input": (
        lambda: pair(lambda s, x: s.o(s.i(x) / (1 + x**2)), linear(4, 4), linear(4, 3)),
        ROWS,
        "i",
    ),
    "a number divided by it": (lambda: pair(lambda s, x: s.o(1 / (5 + s.i(x))), linear(4, 5), linear(5, 3)), ROWS, "i"),
    "plus a function of the input": (lambda: pair(lambda s, x: s.o(s.i(x) + x.sin()), linear(4, 4), linear(4, 3)), ROWS, "i"),
    "grouped reader": (lambda: nn.Sequential(conv(4, 4), conv(4, 4, 2, groups=2)), CHANNELS, "0"),
    "grouped maker": (lambda: nn.Sequential(conv(4, 2, groups=2), conv(2, 3, 2)), CHANNELS, "0"),
    "depthwise reader": (lambda: nn.Sequential(conv(4, 4), conv(4, 4, 2, groups=4)), CHANNELS, "0"),
    "mean over features": (lambda: pair(lambda s, x: s.o(s.i(x).mean(1, keepdim=True)), linear(4, 5), linear(1, 3)), ROWS, "i"),
    "one layer for each head": (
        lambda: pair(lambda s, x: s.o(s.i(x).view(-1, 2, 3)).flatten(1), linear(4, 6), linear(3, 2)),
        ROWS,
        "i",
    ),
    "pixel shuffle": (lambda: nn.Sequential(conv(2, 8, 2), nn.PixelShuffle(2), conv(2, 3)), IMAGES, "0"),
    "chunks": (lambda: two_readers(lambda h: h.chunk(2, 1), 3), ROWS, "i"),
    "plus itself in reverse": (
        lambda: pair(lambda s, x: s.o(s.i(x) + s.i(x).flip(1)), linear(4, 4), linear(4, 3)),
        ROWS,
        "i",
    ),
    "max pool": (lambda: nn.Sequential(conv(2, 4), nn.MaxPool2d(2), conv(4, 3, 2)), IMAGES, "0"),
    "ReLU": (lambda: mlp(4, 5, 3), ROWS, "0"),
    "LayerNorm": (lambda: nn.Sequential(linear(4, 5), nn.LayerNorm(5), linear(5, 3)), ROWS, "0"),
    "two heads": (lambda: attention(True, heads=2), TOKENS, "v"),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return randomised(make())


def is_made_up_for(model: nn.Module, inputs: Tensor, maker: str) -> bool:
    """The oracle: a change E W of a weight that mixes its channels has the effect of a change of the other parameters."""
    named = dict(model.named_parameters())
    weight = named.get(f"{maker}.weight", named.get(maker))
    assert weight is not None
    layer = None if maker in named else model.get_submodule(maker)
    axis = int(isinstance(layer, nn.Embedding | nn.ConvTranspose2d) or (layer is None and weight.shape[0] == 4))  # x @ W
    n = weight.shape[axis]
    E = torch.randn(n, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    change = torch.tensordot(E, weight.detach(), dims=([1], [axis])).movedim(0, axis)
    with sdpa_kernel(SDPBackend.MATH):
        jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (inputs,)).reshape(-1))(
            {name: p.detach() for name, p in named.items()}
        )
    key = next(name for name, p in named.items() if p is weight)
    effect = jacobians.pop(key).flatten(1) @ change.reshape(-1)
    others = torch.cat([j.flatten(1) for j in jacobians.values()], dim=1)
    solution = torch.linalg.lstsq(others, effect[:, None], driver="gelsd").solution
    return bool((others @ solution - effect[:, None]).norm() < 1e-9 * effect.norm())


def chains(model: nn.Module, inputs: Tensor) -> list[str]:
    return [note.split(BETWEEN)[0] for note in find_symmetries(model, inputs[:9]).notes if BETWEEN in note]


@pytest.mark.parametrize("name", TRUE)
def test_layers_between_which_any_matrix_fits_are_named(name: str) -> None:
    make, inputs, layers = TRUE[name]
    model = made(make)
    assert is_made_up_for(model, inputs, layers.split(", ")[0])
    assert layers in chains(model, inputs)


@pytest.mark.parametrize("name", FALSE)
def test_layers_between_which_no_matrix_fits_are_not_named(name: str) -> None:
    make, inputs, maker = FALSE[name]
    model = made(make)
    assert not is_made_up_for(model, inputs, maker)
    assert chains(model, inputs) == []


# --- sums, shifts, means ----------------------------------------------------------------------------------------------------


def parallel(rule: Callable[[Net, Tensor], Tensor], a: nn.Module, b: nn.Module, o: nn.Module) -> Net:
    return Net(lambda s, x: s.o(F.relu(rule(s, x)).flatten(1)), a=a, b=b, o=o)


SUMS: dict[str, tuple[Callable[[], nn.Module], Tensor, bool]] = {
    "sum": (lambda: parallel(lambda s, x: s.a(x) + s.b(x), linear(4, 5), linear(4, 5), linear(5, 3)), ROWS, True),
    "weighted": (lambda: parallel(lambda s, x: 3 * s.a(x) - s.b(x) / 7, linear(4, 5), linear(4, 5), linear(5, 3)), ROWS, True),
    "small kernel": (
        lambda: parallel(lambda s, x: s.a(x) + s.b(x), conv(2, 3), conv(2, 3, 3, padding=1), linear(75, 3)),
        IMAGES,
        True,
    ),
    "off the centre": (
        lambda: parallel(lambda s, x: s.a(x)[..., 1:, 1:] + s.b(x), conv(2, 3), conv(2, 3, 2), linear(48, 3)),
        IMAGES,
        False,
    ),
    "another input": (
        lambda: parallel(lambda s, x: s.a(x) + s.b(x.flip(1)), linear(4, 5), linear(4, 5), linear(5, 3)),
        ROWS,
        False,
    ),
    "times the input": (
        lambda: parallel(lambda s, x: s.a(x) + s.b(x) * x, linear(4, 4), linear(4, 4), linear(4, 3)),
        ROWS,
        False,
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_layers_of_which_the_sum_counts_are_named_and_no_others(name: str) -> None:
    make, inputs, is_named = SUMS[name]
    notes = find_symmetries(made(make), inputs[:9]).notes
    assert any("a and b read the same and are added" in note for note in notes) == is_named


SHIFTS: dict[str, tuple[Callable[[], nn.Module], Tensor, str | None]] = {
    "linear": (lambda: pair(lambda s, x: s.o(s.i(x)), linear(4, 5), linear(5, 3)), ROWS, "i.bias, o.bias"),
    "mean": (
        lambda: pair(lambda s, x: s.o(s.i(x).mean(1, keepdim=True)), linear(4, 5), linear(1, 3)),
        ROWS,
        "i.bias, o.bias",
    ),
    "attention": (lambda: attention(True, heads=2), TOKENS, "v.bias, o.bias"),
    "positions": (
        lambda: pair(lambda s, x: F.relu(s.i(x) + s.positions), nn.Embedding(7, 4), linear(4, 3), positions=torch.ones(3, 4)),
        ENTRIES,
        "i.weight, positions",
    ),
    "sigmoid": (lambda: mlp(4, 5, 3, activation=nn.Sigmoid), ROWS, None),
    "times the input": (lambda: pair(lambda s, x: s.o(s.i(x) * x.sin()), linear(4, 4), linear(4, 3)), ROWS, None),
    "padded": (lambda: nn.Sequential(conv(2, 4), conv(4, 3, 3, padding=1)), IMAGES, None),
    "gates": (lambda: pair(lambda s, x: s.o(s.i(x) * s.g(x)), linear(4, 5), linear(5, 3), g=linear(4, 5)), ROWS, None),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_biases_that_make_up_for_each_other_are_named_and_no_others(name: str) -> None:
    make, inputs, biases = SHIFTS[name]
    notes = [note for note in find_symmetries(made(make), inputs[:9]).notes if note.startswith("shifts of")]
    assert [note.split(", which")[0].removeprefix("shifts of ") for note in notes] == ([] if biases is None else [biases])


CENTRED: dict[str, tuple[Callable[[], nn.Module], Tensor, bool]] = {
    "LayerNorm": (lambda: nn.Sequential(linear(4, 6), nn.LayerNorm(6), nn.ReLU(), linear(6, 3)), ROWS, True),
    "GroupNorm": (lambda: nn.Sequential(linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), linear(6, 3)), ROWS, True),
    "GroupNorm of images": (lambda: nn.Sequential(conv(2, 6), nn.GroupNorm(2, 6), nn.ReLU(), conv(6, 3)), IMAGES, False),
    "InstanceNorm": (lambda: nn.Sequential(conv(2, 6), nn.InstanceNorm2d(6), nn.ReLU(), conv(6, 3)), IMAGES, False),
    "read by others": (
        lambda: pair(lambda s, x: s.o(s.norm(s.i(x)) + F.relu(s.i(x))), linear(4, 6), linear(6, 3), norm=nn.LayerNorm(6)),
        ROWS,
        False,
    ),
}


@pytest.mark.parametrize("name", CENTRED)
def test_a_normalisation_that_subtracts_the_mean_is_named_where_nothing_else_sees_the_mean(name: str) -> None:
    make, inputs, is_named = CENTRED[name]
    notes = find_symmetries(made(make), inputs[:9]).notes
    assert any("one vector is added to all rows" in note for note in notes) == is_named


# --- what is tried, and on what ---------------------------------------------------------------------------------------------


def test_nothing_of_the_model_is_changed_by_trying() -> None:
    model = nn.Sequential(conv(2, 4), nn.BatchNorm2d(4), conv(4, 4), nn.Flatten(), linear(100, 6), nn.LayerNorm(6), linear(6, 3))
    model.train()
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert sum(BETWEEN in note for note in find_symmetries(model, IMAGES[:9]).notes) >= 2
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model[0].weight.requires_grad
    assert all(module.training for module in model.modules())


def test_a_network_that_is_too_large_is_not_tried_and_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatminima.symmetries import linear_chains

    model = made(TRUE["linear"][0])
    monkeypatch.setattr(linear_chains, "_MOST_SHIFTS", 3)
    assert any("0.bias, 1.bias may make up for each other: there are too many" in n for n in find_symmetries(model, ROWS).notes)
    monkeypatch.setattr(linear_chains, "_MOST_WORK", 3)
    notes = find_symmetries(model, ROWS).notes
    assert any("were not tried numerically: the network is too large" in note for note in notes)
    assert not any(BETWEEN in note for note in notes)


def test_a_model_that_takes_no_drawn_inputs_is_tried_on_its_examples() -> None:
    def rule(s: Net, x: Tensor) -> Tensor:
        torch._check(x.shape[0] == 9)
        return s.o(s.i(x))

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = pair(rule, linear(4, 5), linear(5, 3))
            self.register_forward_pre_hook(self.check)

        @staticmethod
        def check(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not torch.compiler.is_compiling() and not torch.equal(args[0], ROWS[:9]):
                raise ValueError("unknown inputs")

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x)
            return result

    assert chains(made(Picky), ROWS) == ["net.i, net.o"]


def test_drawn_inputs_have_the_form_of_the_examples_and_repeat() -> None:
    mask = torch.tensor([0.0, -torch.inf])
    call = Call.of_arguments((ROWS.float(), [ENTRIES, None]), {"mask": mask, "flag": True})
    first, second = (call.drawn(torch.Generator().manual_seed(0)) for _ in range(2))
    rows, (entries, nothing) = first.args
    assert rows.dtype == torch.float64
    assert rows.shape == ROWS.shape
    assert not torch.equal(rows, call.args[0])
    assert float(rows.std()) == pytest.approx(float(ROWS.std()), rel=0.2)
    assert entries.dtype == torch.int64
    assert set(entries.unique().tolist()) <= set(ENTRIES.unique().tolist())
    assert nothing is None
    assert first.kwargs["flag"] is True
    assert set(first.kwargs["mask"].tolist()) <= {0.0, -torch.inf}
    assert torch.equal(rows, second.args[0])
    assert torch.equal(entries, second.args[1][0])
