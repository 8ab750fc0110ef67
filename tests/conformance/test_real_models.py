"""Models as people write them: every product against first derivatives of a plain copy, or a reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import flatminima as fm
from tests.conformance.first_order import empirical_fisher_product, gauss_newton_product, hessian_product, relative

D64 = torch.float64
WIDTH, LENGTH, CLASSES, EXAMPLES = 4, 3, 3, 5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


REAL = torch.randn(EXAMPLES, WIDTH, generator=generator(), dtype=D64)
SEQUENCES = torch.randn(EXAMPLES, LENGTH, WIDTH, generator=generator(1), dtype=D64)
TOKENS = torch.randint(0, 6, (EXAMPLES, LENGTH), generator=generator(2))
IMAGES = torch.randn(EXAMPLES, 2, 6, 6, generator=generator(3), dtype=D64)
LABELS = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator(4))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


def with_head(*layers: nn.Module, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Pooled(nn.Module):
    """Some layer on sequences, the mean over time, and a head."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> None:
        super().__init__()
        self.inner, self.call, self.head = inner, call, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.inner, x).mean(1))


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class TiedLanguageModel(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(6, WIDTH, sparse=sparse), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, 6)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens).transpose(0, 1))[0]).permute(1, 2, 0)


class Bag(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, WIDTH, sparse=sparse), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(tokens)))


class SparseTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, WIDTH, sparse=True, padding_idx=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)).mean(1))


class MixtureOfExperts(nn.Module):
    """Two of three experts for each example, weighted by a softmax over those two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).topk(2, dim=1)
        weights, out = scores.softmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, weights[row, place, None] * expert(x[row]))
        return self.head(out)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inner, self.head = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.tanh(self.used(x)))


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(CLASSES)).double()
    model(REAL)
    return model


def two_layers() -> nn.Module:
    return with_head(nn.Linear(WIDTH, 5), nn.Tanh(), width=5)


def scripted() -> nn.Module:
    return torch.jit.script(two_layers())


def traced() -> nn.Module:
    return torch.jit.trace(two_layers().double(), REAL)


def compiled_in_place() -> nn.Module:
    model = two_layers()
    model.compile()
    return model


def in_eager(model: nn.Module) -> nn.Module:
    result = two_layers().double()
    result.load_state_dict(model.state_dict())
    return result


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor = LABELS
    mode: str = "eval"
    plain: Callable[[nn.Module], nn.Module] = lambda model: model


def encoder(**options: Any) -> nn.Module:
    return Pooled(nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True, **options))


def own_attention() -> nn.Module:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    return Pooled(attention, lambda m, x: m(x, x, x, need_weights=False)[0])


def masked_attention() -> nn.Module:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return Pooled(attention, lambda m, x: m(x, x, x, attn_mask=mask, is_causal=True)[0])


def recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.Module:
    return Pooled(kind(WIDTH, WIDTH, batch_first=True, **options), lambda m, x: m(x)[0][..., :WIDTH])


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES))


NEXT_TOKENS = TOKENS.roll(-1, 1).masked_fill(torch.tensor([[False, False, True]]), -100)
CASES = [
    Case("encoder layer, eval", encoder, SEQUENCES),
    Case("encoder layer, train", encoder, SEQUENCES, mode="train"),
    Case("encoder layer, norm first, gelu", lambda: encoder(norm_first=True, activation="gelu"), SEQUENCES),
    Case("multi-head attention", own_attention, SEQUENCES),
    Case("multi-head attention with a causal mask", masked_attention, SEQUENCES),
    Case("sdpa, causal", lambda: Pooled(CausalAttention()), SEQUENCES),
    Case("LSTM", lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True), SEQUENCES),
    Case("LSTM with projections", lambda: recurrent(nn.LSTM, proj_size=2, bidirectional=True), SEQUENCES),
    Case("GRU", lambda: recurrent(nn.GRU), SEQUENCES),
    Case("RNN", lambda: recurrent(nn.RNN), SEQUENCES),
    Case("LSTM, train", lambda: recurrent(nn.LSTM), SEQUENCES, mode="train"),
    Case("batch norm, eval", lambda: normed(nn.BatchNorm2d(4)), IMAGES),
    Case("batch norm, train", lambda: normed(nn.BatchNorm2d(4)), IMAGES, mode="train"),
    Case("group norm", lambda: normed(nn.GroupNorm(2, 4)), IMAGES),
    Case("instance norm", lambda: normed(nn.InstanceNorm2d(4, affine=True)), IMAGES),
    Case("layer norm", lambda: normed(nn.LayerNorm([4, 4, 4])), IMAGES),
    Case("RMS norm", lambda: normed(nn.RMSNorm([4, 4, 4])), IMAGES),
    Case("tied embeddings, ignored tokens", TiedLanguageModel, TOKENS, NEXT_TOKENS),
    Case("tied sparse embeddings", lambda: TiedLanguageModel(sparse=True), TOKENS, NEXT_TOKENS),
    Case("sparse embeddings", SparseTokens, TOKENS),
    Case("embedding bag", Bag, TOKENS),
    Case("sparse embedding bag", lambda: Bag(sparse=True), TOKENS),
    Case("frozen and unused", Unused, REAL),
    Case("mixture of experts", MixtureOfExperts, REAL),
    Case("checkpoint, not reentrant", lambda: Checkpointed(use_reentrant=False), REAL),
    Case("spectral norm", lambda: with_head(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()), REAL),
    Case("weight norm of a tensor", lambda: with_head(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None), nn.Tanh()), REAL),
    Case("orthogonal", lambda: with_head(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh()), REAL),
    Case("lazy", lazy, REAL),
    Case("compiled", lambda: torch.compile(two_layers()), REAL,
         plain=lambda model: model._orig_mod),
    Case("compiled in place", compiled_in_place, REAL, plain=lambda model: nn.Sequential(*model)),
    Case("data parallel", lambda: nn.DataParallel(two_layers()), REAL,
         plain=lambda model: model.module),
    Case("scripted", scripted, REAL, plain=in_eager),
    Case("traced", traced, REAL, plain=in_eager),
]  # fmt: skip


def _expected(case: Case, model: nn.Module, v: Tensor) -> dict[str, Tensor]:
    def outputs(m: nn.Module) -> Tensor:
        return m(case.x)

    def loss(o: Tensor) -> Tensor:
        return F.cross_entropy(o, case.y)

    def totals(m: nn.Module) -> list[Tensor]:
        o = outputs(m)
        return [F.cross_entropy(o[b : b + 1], case.y[b : b + 1], reduction="sum") for b in range(len(o))]

    scale = 1.0 / int((case.y != -100).sum())
    return {
        "Hessian": hessian_product(model, outputs, loss, v),
        "GaussNewton": gauss_newton_product(model, outputs, loss, v),
        "EmpiricalFisher": empirical_fisher_product(model, totals, v, scale),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_every_product_is_that_of_first_derivatives(case: Case) -> None:
    model = seeded(case.build)
    plain = case.plain(model).train(case.mode == "train")
    whole = case.mode == "train"
    data = (case.x, case.y) if whole else [(case.x[:2], case.y[:2]), (case.x[2:], case.y[2:])]
    objective = fm.Objective(model, F.cross_entropy, data, mode=case.mode)
    v = torch.randn(objective.space.size, generator=generator(9), dtype=D64)
    if isinstance(plain, SparseTokens):
        v[:WIDTH] = 0  # autograd holds the padding's row fixed
    expected = _expected(case, plain, v)
    found = {name: getattr(fm, name)(objective) @ v for name in expected}
    for name in expected:
        if name == "EmpiricalFisher" and case.name == "batch norm, train":
            continue  # rows of the outputs are no functions of single examples there
        assert relative(found[name], expected[name]) < 1e-6, name
    torch.testing.assert_close(fm.Fisher(objective) @ v, found["GaussNewton"], rtol=1e-8, atol=1e-11)
    block = fm.Hessian(objective) @ torch.stack([v, -v, 2 * v, 0 * v, v.flip(0)], dim=1)
    torch.testing.assert_close(block[:, 2], 2 * found["Hessian"], rtol=1e-8, atol=1e-11)
    assert torch.count_nonzero(block[:, 3]) == 0


# --- language and vision models of another library ----------------------------------------------------------------------------


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed (an optional test dependency)")


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    t = _transformers()
    options = {"vocab_size": 13, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    return t.GPT2LMHeadModel(t.GPT2Config(**options)), language_batch(13)


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    t = _transformers()
    options = {
        "vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8,
    }  # fmt: skip
    return t.LlamaForCausalLM(t.LlamaConfig(**options)), language_batch(13)


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    t = _transformers()
    options = {
        "vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 8,
        "num_labels": CLASSES,
    }  # fmt: skip
    return t.BertForSequenceClassification(t.BertConfig(**options)), {**language_batch(13), "labels": LABELS}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    t = _transformers()
    options = {
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 6,
        "patch_size": 3, "num_channels": 2, "num_labels": CLASSES,
    }  # fmt: skip
    return t.ViTForImageClassification(t.ViTConfig(**options)), {"pixel_values": IMAGES, "labels": LABELS}


def language_batch(vocabulary: int) -> dict[str, Tensor]:
    """Sequences of several lengths, padded, with their next tokens as labels; -100 where there is none."""
    tokens = torch.randint(1, vocabulary, (EXAMPLES, 6), generator=generator(5))
    mask = (torch.arange(6) < torch.tensor([6, 4, 3, 6, 2])[:, None]).long()
    labels = tokens.roll(-1, 1).masked_fill(mask.roll(-1, 1) * mask == 0, -100)
    labels[:, -1] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class ClassesSecond(nn.Module):
    """The logits of a language model as torch's losses want them: (batch, classes, positions)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits.transpose(1, 2)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _pieces(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: t[part] for name, t in batch.items()} for part in (slice(0, 2), slice(2, None))]


@pytest.mark.parametrize("build", [gpt2, llama, bert, vit])
@pytest.mark.filterwarnings("ignore")  # of transformers' own
def test_models_with_dict_batches_and_logits_have_the_right_products(
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = build()
    model = model.double().eval()
    with torch.no_grad():  # the usual initialisation is so small that all curvature is in the head
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator(p.numel()), dtype=D64))
    inputs, labels = {name: t for name, t in batch.items() if name != "labels"}, batch["labels"]
    of_tokens = labels.ndim == 2
    model = ClassesSecond(model).eval() if of_tokens else model

    def outputs(m: nn.Module) -> Tensor:
        o = m(**inputs)
        return o if isinstance(o, Tensor) else o.logits

    def loss(o: Tensor) -> Tensor:
        return F.cross_entropy(o, labels)

    objective = fm.Objective(model, F.cross_entropy, _pieces(batch))
    assert objective.num_terms == int((labels != -100).sum())
    assert float(objective.value()) == pytest.approx(float(loss(outputs(model))), rel=1e-12)
    v = torch.randn(objective.space.size, generator=generator(9), dtype=D64)
    Gv = fm.GaussNewton(objective) @ v
    # Llama normalises in float32 whatever its type, so differences need a larger step and are worth less.
    h, tolerance = (1e-4, 3e-3) if build is llama else (1e-5, 1e-6)
    assert relative(fm.Hessian(objective) @ v, hessian_product(model, outputs, loss, v, h)) < tolerance
    assert relative(Gv, gauss_newton_product(model, outputs, loss, v, h)) < tolerance
    assert fm.verify(objective, generator=generator())
    torch.testing.assert_close(fm.Fisher(objective) @ v, Gv, rtol=1e-8, atol=1e-11)
    if of_tokens:  # the same by a loss of the user's own, which must say how many terms a batch has
        own = fm.Objective(model.model, token_loss, _pieces(batch), num_terms=lambda part: int((part["labels"] != -100).sum()))
        torch.testing.assert_close(fm.Hessian(own) @ v, fm.Hessian(objective) @ v, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(fm.GaussNewton(own) @ v, Gv, rtol=1e-9, atol=1e-11)


# --- refused, flagged, restored -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused_and_never_zero() -> None:
    inputs_need_no_gradient = Checkpointed(use_reentrant=True)
    with pytest.raises(fm.NotSupported, match="autograd sees no path"):
        fm.Objective(seeded(lambda: inputs_need_no_gradient), F.cross_entropy, (REAL, LABELS))
    behind_a_layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(use_reentrant=True))
    with pytest.raises(fm.NotSupported, match="Use use_reentrant=False, which is exact"):
        fm.Objective(seeded(lambda: behind_a_layer), F.cross_entropy, (REAL, LABELS))


@pytest.mark.parametrize("fails", [False, True])
def test_flags_of_attention_are_what_they_were(fails: bool) -> None:
    def flags() -> list[bool]:
        own, cuda = torch.backends.mha, torch.backends.cuda
        return [
            own.get_fastpath_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ]  # fmt: skip

    model = seeded(encoder)
    objective = fm.Objective(model, F.cross_entropy, (SEQUENCES, LABELS))
    before, training = flags(), [m.training for m in model.modules()]
    if fails:
        model.head.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("half-way")))
        with pytest.raises(RuntimeError, match="half-way"):
            fm.Hessian(objective) @ objective.theta
    else:
        fm.Hessian(objective) @ objective.theta
    assert flags() == before
    assert [m.training for m in model.modules()] == training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_models_are_float32_and_near_the_truth(dtype: torch.dtype) -> None:
    model = seeded(two_layers).to(dtype)
    objective = fm.Objective(model, F.cross_entropy, (REAL.to(dtype), LABELS))
    wide = fm.Objective(model, F.cross_entropy, (REAL.to(dtype), LABELS), dtype=D64)
    v = torch.randn(objective.space.size, generator=generator(9))
    for operator in (fm.Hessian, fm.GaussNewton, fm.Fisher, fm.EmpiricalFisher):
        found = operator(objective) @ v
        assert found.dtype == torch.float32
        assert relative(found.double(), operator(wide) @ v.double()) < (0.1 if dtype == torch.bfloat16 else 0.01)


def test_complex_parameters_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"must be real floating point numbers.*'0.weight'"):
        fm.Objective(model, F.cross_entropy, (REAL, LABELS))


def test_a_lazy_model_that_never_ran_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="run the model once"):
        fm.Objective(nn.Sequential(nn.LazyLinear(3)), F.cross_entropy, (REAL, LABELS))


@pytest.fixture
def one_process() -> Any:
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # of torch's own wrapper
def test_a_data_parallel_wrapper_of_one_process_is_looked_through() -> None:
    plain = seeded(two_layers)
    wrapped = nn.parallel.DistributedDataParallel(plain)
    objective, expected = (fm.Objective(m, F.cross_entropy, (REAL, LABELS)) for m in (wrapped, plain))
    assert objective.space.names == expected.space.names
    v = torch.randn(objective.space.size, generator=generator(9), dtype=D64)
    assert torch.equal(fm.Hessian(objective) @ v, fm.Hessian(expected) @ v)


class _Two:
    def size(self) -> int:
        return 2


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
def test_a_data_parallel_wrapper_of_several_processes_is_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel(seeded(two_layers))
    wrapped.process_group = _Two()
    with pytest.raises(fm.NotSupported, match=r"2 processes.*of this process's data alone"):
        fm.Objective(wrapped, F.cross_entropy, (REAL, LABELS))


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
def test_sharded_parameters_are_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = seeded(two_layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(fm.NotSupported, match=r"sharded"):
        fm.Objective(model, F.cross_entropy, (REAL, LABELS))


@pytest.mark.filterwarnings("ignore")  # quantisation is deprecated
def test_quantised_layers_are_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(seeded(two_layers).float(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises((ValueError, fm.NotSupported), match=r"trainable parameter|quantised"):
        fm.Objective(model, F.cross_entropy, (REAL.float(), LABELS))
