"""The state in which the library calls the user's model, and its exact restoration afterwards.

Everything that is switched here is the process's or the model's, so it is switched for the library's own calls only and put
back whether the call returns, raises or is interrupted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

from flatminima._errors import NotSupported
from flatminima.objective.module_state import ModuleState

__all__ = ["closure_session", "copied", "session", "unwrap"]


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
    """Return the module inside ``torch.compile``, ``DataParallel`` and, of one process, ``DistributedDataParallel`` wrappers.

    Raises:
        NotSupported: If the model is spread over processes.
    """
    _refuse_shards(model)
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel):
            inner = model.module
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            if (size := model.process_group.size()) > 1:
                raise NotSupported(
                    f"The model is wrapped in DistributedDataParallel over {size} processes, whose gradients are averaged in "
                    "backward() alone: products here would be those of this process's data alone, without a word. Give "
                    "model.module and all the data to one process."
                )
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _refuse_shards(model: nn.Module) -> None:
    sharding = {"FullyShardedDataParallel", "FSDPModule"}
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if sharding & names or any(type(p.data).__name__ == "DTensor" for p in model.parameters()):
        raise NotSupported(
            "The model's parameters are sharded over processes (FSDP, DTensor), and curvature needs whole ones. Gather them: "
            "load a full state dict into a plain copy of the model."
        )


@contextmanager
def session(
    model: nn.Module, *, mode: str, generators: Sequence[torch.Generator] = (), others: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """Put the model and torch into the state that second derivatives need.

    Eval or train mode on every sub-module; gradients on; the math kernel of attention and no fused transformer layer (the
    fused ones have no second derivative), and dense gradients of embeddings (as have sparse ones); compiled code run eagerly;
    random state forked.

    Args:
        model: The model.
        mode: "eval" or "train".
        generators: Generators to put back too, for example a DataLoader's.
        others: Modules to put back too, for example those of the loss, whose modes are left alone.
    """
    with _torch_switched(model.parameters()), ExitStack() as stack:
        for generator in generators:
            stack.callback(generator.set_state, generator.get_state())
        stack.enter_context(_mode(model, mode))
        state = ModuleState()
        stack.callback(state.put_back)
        state.add([*model.modules(), *others])
        stack.enter_context(_without_hooks(model.parameters()))
        stack.enter_context(_dense_embeddings(model))
        if _holds_compiled_code(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def closure_session(params: Sequence[Tensor], modules: dict[int, nn.Module]) -> Iterator[None]:
    """Put torch into the state that second derivatives need, around calls of a function that is the user's own.

    Values and gradients of the parameters are put back, and whatever the modules that run inside keep from the calls: their
    other parameters, buffers, attributes and modes. Within the session the parameters have no gradient, and no hooks on it.

    Args:
        params: The tensors that the function reads, and that the caller writes to.
        modules: Modules that have been seen to run, by identity; those that run for the first time are added.
    """
    with _torch_switched(params), ExitStack() as stack:
        for parameter in params:
            stack.callback(_put_back, parameter, parameter.detach().clone(), parameter.grad, _copy_of(parameter.grad))
            parameter.grad = None
        stack.enter_context(_without_hooks(params))
        stack.enter_context(_modules_watched(modules, {id(parameter) for parameter in params}))
        yield


@contextmanager
def _torch_switched(tensors: Iterable[Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for device in ("cpu", "cuda"):  # the precision is the objective's to say
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_no_fused_transformer())
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(tensors)))
        yield


def _copy_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _put_back(parameter: Tensor, value: Tensor, gradient: Tensor | None, content: Tensor | None) -> None:
    with torch.no_grad():
        parameter.copy_(value)
        if gradient is not None and content is not None:
            gradient.copy_(content)
    parameter.grad = gradient


@contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take hooks on gradients off: they are for training, may change gradients, and see each one once."""
    hooked = [(parameter, parameter._backward_hooks) for parameter in parameters]
    try:
        for parameter, hooks in hooked:
            if hooks is not None:
                parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in hooked:
            if parameter._backward_hooks is not hooks:
                parameter._backward_hooks = hooks


@contextmanager
def _modules_watched(modules: dict[int, nn.Module], params: set[int]) -> Iterator[None]:
    state, thread = ModuleState(buffers=True, parameters=True, except_for=params), get_ident()
    state.add(modules.values())

    def remember(module: nn.Module, _inputs: Any) -> None:
        if id(module) not in modules and get_ident() == thread:
            new = {id(part): part for part in module.modules() if id(part) not in modules}
            modules.update(new)
            state.add(new.values())

    handle = register_module_forward_pre_hook(remember)
    try:
        yield
    finally:
        handle.remove()
        state.put_back()


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
def _dense_embeddings(model: nn.Module) -> Iterator[None]:
    sparse = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    try:
        for module in sparse:
            module.sparse = False
        yield
    finally:
        for module in sparse:
            module.sparse = True


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


def _cuda_devices(tensors: Iterable[Tensor]) -> list[int]:
    if not torch.cuda.is_available():
        return []
    return sorted({t.device.index for t in tensors if t.device.type == "cuda"})
