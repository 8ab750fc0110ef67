"""The state in which the library calls the user's model, and its exact restoration afterwards.

Everything that is switched here is the process's or the model's, so it is switched for the library's own calls only and put
back whether the call returns, raises or is interrupted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["copied", "session", "unwrap"]


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy, also of a model that keeps results of a forward pass (which torch refuses to copy)."""
    results = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    return copy.deepcopy(model, dict[int, object](results))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and ``DataParallel`` wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def session(model: nn.Module | None, *, mode: str, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the model and torch into the state that second derivatives need.

    Eval or train mode on every sub-module; gradients on; the math kernel of attention and no fused transformer layer (the
    fused ones have no second derivative); compiled code run eagerly; random state forked.

    Args:
        model: The model, or None for a closure, whose modes are the caller's business.
        mode: "eval" or "train".
        generators: Generators to put back too, for example a DataLoader's.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for device in ("cpu", "cuda"):  # the precision is the objective's to say
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_no_fused_transformer())
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(model)))
        for generator in generators:
            stack.callback(generator.set_state, generator.get_state())
        if model is not None:
            stack.enter_context(_mode(model, mode))
            stack.enter_context(_tensor_attributes(model))
            if _holds_compiled_code(model):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _mode(model: nn.Module, mode: str) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:  # not model.train(): an override may do more, such as merging weights, and not undo it
            module.training = mode == "train"
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _tensor_attributes(model: nn.Module) -> Iterator[None]:
    """Put back the plain tensors on modules that forward passes set or write to: caches, counters, computed weights."""
    before = [(m, {name: v for name, v in vars(m).items() if isinstance(v, torch.Tensor)}) for m in model.modules()]
    leaves = {id(v): v for _, tensors in before for v in tensors.values() if v.is_leaf and not v.is_inference()}
    contents = [(leaf, leaf._version, leaf.detach().clone()) for leaf in leaves.values()]
    try:
        yield
    finally:
        for module, tensors in before:
            attributes = vars(module)
            for name in [n for n, v in attributes.items() if isinstance(v, torch.Tensor) and n not in tensors]:
                del attributes[name]
            attributes.update(tensors)
        with torch.no_grad():
            for leaf, version, content in contents:
                if leaf._version != version:
                    leaf.copy_(content)


@contextmanager
def _no_fused_transformer() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _holds_compiled_code(model: nn.Module) -> bool:
    return any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in model.modules())


def _cuda_devices(model: nn.Module | None) -> list[int]:
    if model is None or not torch.cuda.is_available():
        return []
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
