"""A closure over parameters as a loss of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor, nn

from flatminima.objective.batches import describe
from flatminima.objective.evaluators import Evaluation, Evaluator, Piece
from flatminima.objective.holders import deeper, held_by
from flatminima.objective.session import closure_session
from flatminima.params import ParameterSpace

__all__ = ["ClosureEvaluator"]

_REFERENCES_DEEP = 3  # functions and objects, from the closure on


@final
class ClosureEvaluator(Evaluator):
    """A function without arguments that returns the loss, and the parameters that it reads.

    Raises:
        TypeError: If the closure cannot be called.
        ValueError: If a parameter is no leaf tensor that requires a gradient, or two of them share memory.
    """

    def __init__(self, closure: Callable[[], Tensor], params: Mapping[str, Tensor]) -> None:
        if not callable(closure):
            raise TypeError(f"`closure` must be a function without arguments that returns the loss. Got {closure!r}.")
        _check_leaves(params)
        _check_apart(params)
        self.closure = closure
        self._params = dict(params)
        self._space = ParameterSpace({name: p.shape for name, p in params.items()})
        # To be put back as they are before the first call, which may write to them before they run.
        self._modules = {id(part): part for module in _modules_of(closure) for part in module.modules()}

    @property
    def space(self) -> ParameterSpace:
        return self._space

    @property
    def modules(self) -> Iterable[nn.Module]:
        return list(self._modules.values())

    def current(self) -> Mapping[str, Tensor]:
        return self._params

    def session(self) -> AbstractContextManager[None]:
        return closure_session(list(self._params.values()), self._modules)

    def leaves(self, theta: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, part in self.space.unflatten(theta).items():
                self._params[name].copy_(part)
        return dict(self._params)

    def pieces(self, leaves: Mapping[str, Tensor]) -> Iterator[Piece]:
        yield Piece(None, leaves, self._evaluation)

    def _evaluation(self, _batch: None, _leaves: Mapping[str, Tensor]) -> Evaluation:
        with torch.enable_grad():  # a closure may differentiate on its way to the loss
            total: Any = self.closure()
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ValueError(
                f"`closure` must return one number as a tensor. Got {describe(total)}. Return the loss itself, not loss.item()."
            )
        return Evaluation(total.reshape(()))


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function refers to: in enclosing scopes, globals, defaults, its object, and what these hold."""
    seen: dict[int, Any] = {}
    todo: list[tuple[Any, int]] = [(function, _REFERENCES_DEEP)]
    while todo:
        value, depth = todo.pop()
        if id(value) in seen or depth < 0:
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, FunctionType):
            todo += [(held, depth - 1) for held in _references(value)]
        elif isinstance(value, MethodType):
            todo += [(value.__self__, depth), (value.__func__, depth)]
        elif isinstance(value, partial):
            todo += [(held, depth) for held in (value.func, *value.args, *value.keywords.values())]
        else:
            todo += [(held, deeper(value, depth)) for held in held_by(value)]


def _references(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that is not bound yet
            yield cell.cell_contents
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _check_leaves(params: Mapping[str, Any]) -> None:
    if not params:
        raise ValueError("`params` must hold at least one tensor. Got none.")
    for name, p in params.items():
        if not isinstance(p, Tensor) or not p.is_leaf or not p.requires_grad:
            raise ValueError(f"`params` must be leaf tensors with requires_grad=True. Got {describe(p)} for {name!r}.")


def _check_apart(params: Mapping[str, Tensor]) -> None:
    """Two names for one memory would be two coordinates of one number."""
    names: dict[int, str] = {}
    for name, p in params.items():
        other = names.setdefault(id(p), name)
        if other != name:
            raise ValueError(f"`params` must hold each tensor once. Got the same one as {other!r} and {name!r}. Leave one out.")
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), str(p.device), name)
        for name, p in params.items()
        if p.is_contiguous() and p.numel() and p.device.type != "meta"
    )
    for (_, end, device, name), (start, _, other_device, other) in pairwise(spans):
        if start < end and device == other_device:
            raise ValueError(f"`params` must not share memory. Got {name!r} and {other!r}, which do. Pass one tensor.")
