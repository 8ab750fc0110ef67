"""ParameterSpace: a model's named parameters as one flat vector of length n."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from flatminima._suggest import nearest

__all__ = ["ParameterSpace", "Selection", "clean_name", "vector_dtype"]

_Pick = str | nn.Module | nn.Parameter
#: What picks parameters: shell-style patterns on names, sub-modules, parameters, or a sequence of these; None is all trainable.
Selection = _Pick | Sequence[_Pick] | None

_COMPILED_PREFIX = "_orig_mod."


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes that ``torch.compile`` puts in."""
    return name.replace(_COMPILED_PREFIX, "")


def vector_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of flat vectors over parameters of these dtypes: at least float32, so that sums are exact enough."""
    result = torch.float32
    for dtype in dtypes:
        result = torch.promote_types(result, dtype)
    return result


@dataclass(frozen=True)
class ParameterSpace:
    """Named tensors, in a fixed order, seen as one vector θ of shape ``(n,)``.

    A tied parameter stands once, under its first name.

    Attributes:
        shapes: Shape of each parameter by its name, in the order in which they stand in θ.
    """

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, model: nn.Module, params: Selection = None) -> ParameterSpace:
        """Build the space of the model's trainable parameters, or of those that ``params`` picks.

        Args:
            model: Any module; a compiled one gives the names of the module inside.
            params: None for every parameter with ``requires_grad``. Otherwise one or several of: a shell-style pattern
                on names (``"*.weight"``), a sub-module (all its trainable parameters), a parameter.

        Raises:
            ValueError: If nothing is picked, a pick holds no trainable parameter of the model, or a parameter is complex.
            TypeError: If ``params`` holds anything else.
        """
        named = {clean_name(name): p for name, p in model.named_parameters()}
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        chosen = trainable if params is None else _select(named, trainable, params)
        if not named:
            raise ValueError(f"The model must have at least one trainable parameter. Got {type(model).__name__}, which has none.")
        if not chosen:
            raise ValueError(
                "The model must have at least one trainable parameter. "
                f"Got {len(named)} parameters, none with requires_grad=True. Call requires_grad_(True) on those to measure."
            )
        for name, parameter in chosen.items():
            if isinstance(parameter, nn.UninitializedParameter):
                raise ValueError(f"Parameters must have a shape. {name!r} is lazy: run the model once on an input before.")
            if not parameter.dtype.is_floating_point:
                raise ValueError(
                    f"Parameters must be real floating point numbers. Got {parameter.dtype} for {name!r}. "
                    "Hold a complex parameter as two real ones (torch.view_as_real), or leave it out with params=."
                )
        return cls(MappingProxyType({name: p.shape for name, p in chosen.items()}))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(self.shapes)

    @cached_property
    def slices(self) -> Mapping[str, slice]:
        """Where each parameter stands in θ."""
        slices, start = {}, 0
        for name, shape in self.shapes.items():
            slices[name] = slice(start, start + shape.numel())
            start += shape.numel()
        return MappingProxyType(slices)

    @cached_property
    def size(self) -> int:
        """Number n of scalar parameters."""
        return sum(shape.numel() for shape in self.shapes.values())

    def flatten(self, tensors: Mapping[str, Tensor] | Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensors, one per parameter, as one detached vector ``(n,)`` (always a copy)."""
        values = [tensors[name] for name in self.names] if isinstance(tensors, Mapping) else list(tensors)
        dtype = dtype or vector_dtype(v.dtype for v in values)
        return torch.cat([v.detach().reshape(-1).to(dtype) for v in values])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of the vector ``(n,)``, one per parameter, in the parameters' shapes."""
        if vector.shape != (self.size,):
            raise ValueError(f"`vector` must have shape ({self.size},) (one entry per parameter). Got {tuple(vector.shape)}.")
        return {name: vector[where].view(self.shapes[name]) for name, where in self.slices.items()}

    def unflatten_columns(self, V: Tensor, *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns of V ``(n, k)`` as stacks ``(k, *shape)``, one per parameter, in the dtypes of other tensors."""
        rows = V.T.contiguous()
        return {
            name: rows[:, where].reshape(len(rows), *self.shapes[name]).to(like[name].dtype)
            for name, where in self.slices.items()
        }

    def flatten_columns(self, stacks: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return stacks ``(k, *shape)``, one per parameter, as columns ``(n, k)``, detached."""
        return torch.cat([stacks[name].detach().reshape(len(stacks[name]), -1).to(dtype) for name in self.names], dim=1).T

    def select(self, pattern: str) -> tuple[str, ...]:
        """Return the names that a shell-style pattern matches; a name that ends a module ("layer1") matches all below it.

        Raises:
            ValueError: If nothing matches; the nearest name is given.
        """
        found = tuple(n for n in self.names if fnmatch.fnmatchcase(n, pattern) or n.startswith(pattern + "."))
        if not found:
            raise ValueError(f"No parameter matches {pattern!r}.{nearest(pattern, self.names)} Names: {_short(self.names)}.")
        return found


def _select(
    named: Mapping[str, nn.Parameter], trainable: Mapping[str, nn.Parameter], params: Selection
) -> dict[str, nn.Parameter]:
    if not isinstance(params, str | nn.Module | Tensor | Iterable):
        raise TypeError(f"`params` must hold name patterns, modules or parameters. Got {type(params).__name__}.")
    picks = [params] if isinstance(params, str | nn.Module | Tensor) else list(params or ())
    if not picks:
        raise ValueError("`params` must pick at least one parameter. Got nothing. Leave it out for all trainable parameters.")
    chosen: set[str] = set()
    for pick in picks:
        if isinstance(pick, str):
            chosen.update(ParameterSpace({n: p.shape for n, p in named.items()}).select(pick))
        elif isinstance(pick, nn.Parameter):
            chosen.update(n for n, p in named.items() if p is pick)
            if not any(p is pick for p in named.values()):
                raise ValueError(f"`params` must hold parameters of this model. Got a foreign one of shape {tuple(pick.shape)}.")
        elif isinstance(pick, nn.Module):
            chosen.update(_names_in(pick, named, trainable))
        else:
            raise TypeError(f"`params` must hold name patterns, modules or parameters. Got {type(pick).__name__}.")
    frozen = sorted(chosen - set(trainable))
    if frozen:
        raise ValueError(
            f"`params` must pick trainable parameters. Got frozen {_short(frozen)}. Call requires_grad_(True) on them."
        )
    return {n: p for n, p in trainable.items() if n in chosen}


def _names_in(module: nn.Module, named: Mapping[str, nn.Parameter], trainable: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the names of a module's trainable parameters, or of all where none is trainable."""
    own = {id(p) for p in module.parameters()}
    if not own:
        raise ValueError(f"`params` must hold modules with parameters. Got {type(module).__name__}, which has none.")
    names = {n for n, p in named.items() if id(p) in own}
    if not names:
        raise ValueError(f"`params` must hold modules of this model. Got a foreign {type(module).__name__}.")
    return names & set(trainable) or names


def _short(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"
