from __future__ import annotations

import collections
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flatminima import CheckpointError
from flatminima.cli.checkpoints import load_into, read_checkpoint


def _network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("entry", [None, "state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_every_parameter_and_buffer_of_a_torch_file_is_loaded(tmp_path: Path, entry: str | None, prefix: str) -> None:
    source, target = _network(1), _network(2)
    state = {prefix + name: value for name, value in source.state_dict().items()}
    torch.save(state if entry is None else {entry: state, "epoch": 3}, tmp_path / "model.pt")
    load_into(target, tmp_path / "model.pt")
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in target.state_dict().items())


def test_a_safetensors_file_is_loaded(tmp_path: Path) -> None:
    source, target = _network(1), _network(2)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    load_into(target, tmp_path / "model.safetensors")
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in target.state_dict().items())


def test_a_model_whose_own_names_have_a_prefix_is_loaded(tmp_path: Path) -> None:
    source, target = nn.ModuleDict({"module": _network(1)}), nn.ModuleDict({"module": _network(2)})
    torch.save(source.state_dict(), tmp_path / "model.pt")
    load_into(target, tmp_path / "model.pt")
    assert torch.equal(target["module"][0].weight, source["module"][0].weight)


def test_a_tied_parameter_that_is_stored_once_is_loaded(tmp_path: Path) -> None:
    source, target = _Tied(), _Tied()
    save_file({"second.weight": source.second.weight.detach().clone()}, tmp_path / "model.safetensors")
    load_into(target, tmp_path / "model.safetensors")
    assert torch.equal(target.first.weight, source.first.weight)
    assert target.first.weight is target.second.weight


def test_missing_unexpected_and_misshapen_tensors_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    target = _network(2)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    state = _network(1).state_dict()
    state["2.weight"] = torch.zeros(5, 4)
    state["head.weight"] = torch.zeros(1)
    del state["0.bias"]
    torch.save(state, tmp_path / "model.pt")
    message = r"missing: 0\.bias; unexpected: head\.weight; of another shape: 2\.weight \(5, 4\) for \(2, 4\)"
    with pytest.raises(CheckpointError, match=message):
        load_into(target, tmp_path / "model.pt")
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    torch.save({f"layer{i}": torch.zeros(1) for i in range(40)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"unexpected: layer0, .*, layer5 and 34 more"):
        load_into(_network(), tmp_path / "model.pt")


class _Code:
    ran = False

    def __reduce__(self) -> tuple[object, ...]:
        return (setattr, (_Code, "ran", True))


def test_a_file_with_code_is_refused_without_running_it_and_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"state_dict": _network().state_dict(), "hook": _Code()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"holds more than tensors .*would run code.*model\.state_dict\(\)"):
        read_checkpoint(tmp_path / "model.pt")
    assert not _Code.ran


def test_a_whole_pickled_model_is_refused(tmp_path: Path) -> None:
    torch.save(_network(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model"])
@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04half a pickle", b"PK\x03\x04half a zip", b"\xff" * 64])
def test_a_broken_file_is_a_checkpoint_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a whole"):
        read_checkpoint(tmp_path / name)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_truncated_file_is_a_checkpoint_error(tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / name
    state = _network().state_dict()
    if name.endswith("pt"):
        torch.save(state, path)
    else:
        save_file(state, path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(CheckpointError, match="is not a whole"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "Got list"),
        ({}, "Got an empty dictionary"),
        ({"weights": [1.0]}, "something else under: weights"),
        (collections.OrderedDict(a=torch.zeros(1), epoch=3), "something else under: epoch"),
        (torch.zeros(3), "Got Tensor"),
    ],
)
def test_anything_but_tensors_by_name_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda own: {**own, **{f"module.{n}": t for n, t in own.items()}}, "twice, with and without a wrapper's prefix"),
        (lambda own: {"state_dict": own, "model": own}, r"several state dicts \(state_dict, model\)"),
        (lambda own: {n: t.long() for n, t in own.items()}, "of another kind: .* int64 for float32"),
        (lambda own: {n: t.to(torch.complex64) for n, t in own.items()}, "of another kind: .* complex64 for float32"),
        (lambda own: {n: t.to("meta") for n, t in own.items()}, "of another kind: .* without values"),
    ],
)
def test_a_checkpoint_that_would_be_guessed_at_is_refused(
    tmp_path: Path, content: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    model = nn.Linear(2, 3)
    torch.save(content(dict(model.state_dict())), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        load_into(model, tmp_path / "model.pt")


class Blocked:
    """Unpickles to a call of a module that torch blocks by name."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_a_blocked_module_is_named_and_not_called_damage(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1), "extra": Blocked()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"holds more than tensors \((posix|nt)\.system\)"):
        read_checkpoint(tmp_path / "model.pt")
