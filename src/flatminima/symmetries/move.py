"""Move: one element of a symmetry group, ready to be applied to a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor, nn

from flatminima.objective.session import copied, unwrap
from flatminima.params import ParameterSpace, clean_name

__all__ = ["Composition", "Layout", "Move", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a compiled one or a data-parallel one, or the module itself."""
    return unwrap(model)


@dataclass(frozen=True)
class Layout:
    """The tensors of the model in which symmetries were found.

    Attributes:
        shapes: Shape of every parameter and buffer, a tied tensor once, under its first name.
        aliases: That first name, for every name.
    """

    shapes: Mapping[str, torch.Size] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Read the layout of a model."""
        first: dict[int, str] = {}
        shapes, aliases = {}, {}
        for key, tensor in _named_tensors(model, remove_duplicate=False):
            aliases[key] = first.setdefault(id(tensor), key)
            shapes[aliases[key]] = tensor.shape
        return cls(MappingProxyType(shapes), MappingProxyType(aliases))

    def name(self, key: str) -> str:
        """Return the name of the tensor that a key of a state dict stands for."""
        return self.aliases.get(clean_name(key), clean_name(key))


def _named_tensors(model: nn.Module, *, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=remove_duplicate))
    tensors += model.named_buffers(remove_duplicate=remove_duplicate)
    return [(clean_name(name), tensor) for name, tensor in tensors]


class Move(ABC):
    """A map of parameters and buffers, tensor by tensor, that leaves the network's function unchanged.

    The arithmetic is in float64; every result is cast back to the dtype of the tensor that it replaces. So in a float32
    network the outputs agree to float32 rounding.
    """

    #: The tensors of the model in which the symmetry was found.
    layout: Layout

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """Names of the parameters and buffers that the move may change."""

    @abstractmethod
    def inverse(self) -> Move:
        """Return the move that undoes this one."""

    @abstractmethod
    def _change(self, name: str, value: Tensor) -> Tensor:
        """Return the new value of a tensor of ``names``, given in float64."""

    def _log_factor(self, name: str, shape: torch.Size) -> Tensor:
        """Return the log of the factor of every entry, broadcastable to ``shape``, where the move is a rescaling."""
        raise ValueError(
            f"`factors` must be asked of a move that multiplies every parameter by a number. Got a {type(self).__name__}. "
            "Use apply or apply_state."
        )

    @final
    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model`` at the new point; ``model`` itself is not changed.

        Raises:
            ValueError: If ``model`` lacks a tensor that the move changes.
        """
        moved = copied(unwrapped(model))
        tensors: dict[str, list[Tensor]] = {self.layout.name(key): [] for key in self.layout.shapes}
        for key, tensor in _named_tensors(moved, remove_duplicate=True):
            tensors.setdefault(self.layout.name(key), []).append(tensor)
        for name in sorted(self.names):
            got = [tuple(t.shape) for t in tensors[name]] or "no such tensor"
            if not tensors[name] or any(t.shape != self.layout.shapes[name] for t in tensors[name]):
                raise ValueError(
                    f"`model` must be the network in which the symmetry was found, with {name!r} of shape "
                    f"{tuple(self.layout.shapes[name])}. Got {got}. Call find_symmetries on this model."
                )
        with torch.no_grad():
            for name in self.names:
                for tensor in tensors[name]:
                    tensor.copy_(self._change(name, tensor.detach().double()))
        return moved

    @final
    def apply_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a new mapping of names to tensors at the new point; tensors that do not move are passed on, not copied.

        Args:
            state: A state dict, or any part of one. Names that the move does not know stay as they are.
        """
        moved = {}
        for key, value in state.items():
            name = self.layout.name(key)
            moved[key] = self._change(name, value.detach().double()).to(value.dtype) if name in self.names else value
        return moved

    @final
    def then(self, other: Move) -> Move:
        """Return the move that does this one first and ``other`` after it."""
        return Composition((self, other))

    @final
    def factors(self, space: ParameterSpace) -> Tensor:
        """Return the diagonal of a rescaling, shape ``(n,)`` in float64: the new θ is ``factors * θ``.

        Gradients become g / factors and Hessians H / (factors ⊗ factors).

        Raises:
            ValueError: If the move is not a rescaling (a permutation, a shift).
        """
        return torch.cat([self._log_factor(n, s).expand(s).reshape(-1) for n, s in space.shapes.items()]).exp()


@final
class Composition(Move):
    """Several moves, one after the other; without any it is the identity."""

    def __init__(self, moves: Iterable[Move] = ()) -> None:
        self.moves: tuple[Move, ...] = tuple(
            m for move in moves for m in (move.moves if isinstance(move, Composition) else (move,))
        )
        self.layout = self.moves[0].layout if self.moves else Layout()

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(move.names for move in self.moves))

    def inverse(self) -> Composition:
        return Composition(move.inverse() for move in reversed(self.moves))

    def _change(self, name: str, value: Tensor) -> Tensor:
        for move in self.moves:
            if name in move.names:
                value = move._change(name, value)
        return value

    def _log_factor(self, name: str, shape: torch.Size) -> Tensor:
        total = torch.zeros([1] * len(shape), dtype=torch.float64)
        for move in self.moves:
            total = total + move._log_factor(name, shape)
        return total
