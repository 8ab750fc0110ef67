"""Reading a checkpoint without running code, and loading it so that every parameter is accounted for."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatminima._errors import CheckpointError

__all__ = ["load_into", "read_checkpoint"]

_ENTRIES = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")
_SHOWN = 6


def load_into(model: nn.Module, path: str | Path) -> None:
    """Load a checkpoint into a model; every parameter and buffer must be there, in its shape, and nothing else.

    Raises:
        CheckpointError: If the file cannot be read, or names or shapes do not fit; all of them are listed.
    """
    found, own = read_checkpoint(path), model.state_dict()
    state = _renamed(found, own, path)
    _fill_tied(state, own)
    problems = [
        _listed("missing", (name for name in own if name not in state)),
        _listed("unexpected", (name for name in state if name not in own)),
        _listed("of another shape", (_shapes(name, state[name], own[name]) for name in own if _differ(name, state, own))),
        _listed("of another kind", (_kinds(name, state[name], own[name]) for name in own if _unlike(name, state, own))),
    ]
    if any(problems):
        raise CheckpointError(f"{path} does not fit the model ({len(own)} tensors): {'; '.join(p for p in problems if p)}.")
    model.load_state_dict(state)


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, on the CPU; nothing in the file is executed.

    A file that ends in ``.safetensors`` is read as such, every other one by ``torch.load(weights_only=True)``. In a dictionary
    with an entry "state_dict", "model_state_dict" or "model", that entry is taken.

    Raises:
        CheckpointError: If the file cannot be read, or holds anything but tensors by name.
    """
    path = Path(path)
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if isinstance(content, Mapping):
        entries = [entry for entry in _ENTRIES if isinstance(content.get(entry), Mapping)]
        if len(entries) > 1:
            raise CheckpointError(f"{path} holds several state dicts ({', '.join(entries)}). Save the one that you mean alone.")
        if entries:
            content = content[entries[0]]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} must hold tensors by name (a state dict). Got {_described(content)}.")
    odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"{path} must hold nothing but tensors by name (a state dict). {_listed('something else under', odd)}. "
            "Save model.state_dict() alone."
        )
    return {str(name): value for name, value in content.items()}


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from error


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"GLOBAL (\S+)", str(error))
        if blocked is None:
            raise CheckpointError(f"{path} is not a whole checkpoint of torch.save, nor named .safetensors.") from error
        raise CheckpointError(
            f"{path} holds more than tensors ({blocked[1]}), and reading it would run code from the file. "
            "Save it again with torch.save(model.state_dict(), …) or safetensors.torch.save_file, where you trust it."
        ) from error
    except (RuntimeError, EOFError, KeyError, AttributeError, ValueError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint of torch.save, nor named .safetensors.") from error


def _renamed(found: Mapping[str, Tensor], own: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Return the checkpoint under the model's names: prefixes of wrappers on either side do not count."""
    names = {_bare(name): name for name in own}
    state: dict[str, Tensor] = {}
    for name, value in found.items():
        renamed = name if name in own else names.get(_bare(name), _bare(name))
        if renamed in state:
            raise CheckpointError(f"{path} holds {renamed!r} twice, with and without a wrapper's prefix. Save one of them.")
        state[renamed] = value
    return state


def _bare(name: str) -> str:
    name = name.replace("_orig_mod.", "")
    while name.startswith(_PREFIXES):
        name = name.removeprefix("module.")
    return name


def _fill_tied(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Give a tied tensor, which safetensors stores once, under its other names too."""
    stored = {_address(own[name]): name for name in state if name in own and own[name].numel()}
    for name, value in own.items():
        if name not in state and value.numel() and _address(value) in stored:
            state[name] = state[stored[_address(value)]]


def _address(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _differ(name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    return name in state and state[name].shape != own[name].shape


def _unlike(name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    """Return whether loading would drop what a tensor is: integers or complex numbers as weights, sparse or empty storage."""
    if name not in state:
        return False
    found, wanted = state[name], own[name]
    return found.layout != wanted.layout or found.is_meta or found.is_floating_point() != wanted.is_floating_point()


def _kinds(name: str, found: Tensor, wanted: Tensor) -> str:
    place = " without values" if found.is_meta else ""
    return f"{name} {_kind(found)}{place} for {_kind(wanted)}"


def _kind(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    return f"{layout}{tensor.dtype}".replace("torch.", "")


def _shapes(name: str, found: Tensor, wanted: Tensor) -> str:
    return f"{name} {tuple(found.shape)} for {tuple(wanted.shape)}"


def _listed(what: str, names: Iterable[str]) -> str:
    everything = list(names)
    if not everything:
        return ""
    rest = len(everything) - _SHOWN
    return f"{what}: {', '.join(everything[:_SHOWN])}{f' and {rest} more' if rest > 0 else ''}"


def _described(content: object) -> str:
    return "an empty dictionary" if isinstance(content, Mapping) else type(content).__name__
