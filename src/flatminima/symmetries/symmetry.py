"""Symmetry: a group of moves that leave one network's function unchanged; Symmetries: all that were found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import final, overload

import torch
from torch import Tensor

from flatminima._checks import check_generator, check_one_of, check_positive
from flatminima.symmetries.move import Move

__all__ = ["KINDS", "Symmetries", "Symmetry"]

#: Kinds of symmetry, in the order in which they are listed and applied.
KINDS = ("layer", "node", "permutation", "norm-scale", "softmax shift")


class Symmetry(ABC):
    """A named group action on the parameters and buffers of one model.

    Attributes:
        kind: One of ``KINDS``.
        name: What it acts on, in words.
        dimension: Number of free continuous parameters; 0 for a finite group.
        parameters: Names of the parameters that it changes.
        buffers: Names of the buffers that it changes.
    """

    kind: str
    name: str
    dimension: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]

    @final
    def random(
        self, generator: torch.Generator | None = None, scale: float = 1.0, *, state: Mapping[str, Tensor] | None = None
    ) -> Move:
        """Draw a move.

        Args:
            generator: Source of randomness; None is torch's global generator.
            scale: Standard deviation of the log of each factor; for a shift, in units of the weights' root mean square.
                Permutations are uniform, whatever the scale.
            state: Where the move will be applied, by name; the point at which the symmetry was found by default. It
                matters for norm-scale (a variance must not become negative) and for the size of a shift.

        Raises:
            ValueError: If ``scale`` is negative or not finite.
        """
        check_generator(generator)
        return self._random(generator, check_positive("scale", scale, allow_zero=True), state or {})

    @abstractmethod
    def _random(self, generator: torch.Generator | None, scale: float, state: Mapping[str, Tensor]) -> Move: ...

    @abstractmethod
    def describe(self) -> str:
        """Return one line: kind, size, and what it does."""

    def __repr__(self) -> str:
        return f"<{self.describe()}>"


class Symmetries(Sequence[Symmetry]):
    """The symmetries found in one model.

    Attributes:
        notes: What was not covered and why, one sentence each; empty if every operation was covered.
    """

    def __init__(self, found: Sequence[Symmetry] = (), notes: Sequence[str] = ()) -> None:
        self._found = tuple(sorted(found, key=lambda s: KINDS.index(s.kind)))
        self.notes: tuple[str, ...] = tuple(notes)

    @overload
    def __getitem__(self, index: int) -> Symmetry: ...

    @overload
    def __getitem__(self, index: slice) -> Symmetries: ...

    def __getitem__(self, index: int | slice) -> Symmetry | Symmetries:
        return Symmetries(self._found[index], self.notes) if isinstance(index, slice) else self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Symmetry]:
        return iter(self._found)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that were found."""
        return tuple(dict.fromkeys(s.kind for s in self._found))

    def of_kind(self, kind: str) -> Symmetries:
        """Return the symmetries of one kind, possibly none.

        Raises:
            ValueError: If ``kind`` is not a kind.
        """
        check_one_of("kind", kind, KINDS)
        return Symmetries([s for s in self._found if s.kind == kind], self.notes)

    def describe(self) -> str:
        """Return one line for each symmetry, then one for each note."""
        lines = [s.describe() for s in self._found] or ["No symmetry was found."]
        return "\n".join([*lines, *(f"Not covered: {note}." for note in self.notes)])

    def __repr__(self) -> str:
        return f"Symmetries({', '.join(self.kinds()) or 'none'}; {len(self.notes)} notes)"
