"""Trials of proposed symmetries: make a large move on a copy and see that the outputs stay, on given inputs and on drawn ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from flatminima.objective.session import copied
from flatminima.symmetries.equivalence import relative_difference
from flatminima.symmetries.inputs import Call, outputs, tensors
from flatminima.symmetries.linear_walk import Part
from flatminima.symmetries.move import Layout

__all__ = ["Trials"]

_RTOL = 1e-9
_LEAST = 1e-12
_MORE_ROWS = 8
#: Inputs drawn for the equations of shifts, at most.
_MOST_CALLS = 100
#: Step along a shift, beside the parameters' size: a unit that the inputs do not wake stays asleep.
_STEP = 1e-2


class Trials:
    """A copy of a model on which moves are tried.

    Args:
        model: The network in float64, at a point where no bias is zero. It is not changed.
        call: Example inputs; others are drawn like them, if the model takes those.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.model = copied(model)
        layout = Layout.of(self.model)
        named: list[tuple[str, Tensor]] = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.leaves = {layout.name(name): tensor for name, tensor in named}
        self.state = {name: tensor.detach() for name, tensor in self.leaves.items()}  # the same memory
        self.call = call
        self.runs = [(call, outputs(self.model, call))]
        other = self._drawn()
        if other is not call:
            self.runs.append((other, outputs(self.model, other)))

    def can_mix(self, parts: Mapping[str, Part], readers: Mapping[str, int]) -> bool:
        """Try an invertible matrix A on the channels of ``parts`` and its inverse on the inputs (axes given) of ``readers``.

        What is multiplied by gains D afterwards gets D⁻¹ A D. A reader may have several inputs for each channel, side by side or
        in turn.
        """
        axes = {name: self._axis(name, part) for name, part in parts.items()}
        sizes = {self.state[name].shape[axis] for name, axis in axes.items()}
        size = sizes.pop()
        inputs = {self.state[name].shape[axis] for name, axis in readers.items()}
        if sizes or size < 2 or any(n % size for n in inputs) or parts.keys() & readers.keys():
            return False
        A = self._matrix(size)
        inverse = torch.linalg.inv(A)
        moved = {}
        for name, part in parts.items():
            D = self._gains(part, size)
            moved[name] = _mixed(self.state[name], A * D / D[:, None], axes[name])
        for in_turn in (False, True):
            for name, axis in readers.items():
                moved[name] = _mixed(self.state[name], inverse.T, axis, in_turn=in_turn)
            if self._keeps(moved):
                return not self._keeps({name: moved[name] for name in parts})
            if inputs == {size}:
                break
        return False

    def can_share(self, a: str, b: str) -> bool:
        """Try to add a matrix (or smaller kernel) to the weight of one layer and a multiple of it to that of another."""
        x, y = self.state[a], self.state[b]
        if x.ndim != y.ndim or x.shape[:2] != y.shape[:2]:
            return False
        small = x if x.numel() <= y.numel() else y
        change = self._noise(small)
        if any((n - m) < 0 or (n - m) % 2 for t in (x, y) for n, m in zip(t.shape, small.shape, strict=True)):
            return False
        changes = {name: _centred_in(change, self.state[name].shape) for name in (a, b)}
        rows = self._rows(changes, 1)[0]
        if not bool(rows.abs().min()):
            return False
        factor = -rows[0] / rows[1]
        moved = {a: x + changes[a], b: y + factor * changes[b]}
        return self._keeps(moved) and not self._keeps({a: moved[a]})

    def can_centre(self, name: str, axis: int) -> bool:
        """Try to add one vector to all channels (along ``axis``) of a weight."""
        weight = self.state[name]
        if weight.shape[axis] < 2:
            return False
        change = self._noise(weight)
        return self._keeps({name: weight + change.narrow(axis, 0, 1)}) and not self._keeps({name: weight + change})

    def free_shifts(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that can be shifted together, channel by channel, and the outputs stay.

        The shifts δ solve J δ = 0, one row for every output; a random one of them is tried.
        """
        axes = {name: self._channels(name) for name in names}
        sizes = [self.state[name].shape[axis] for name, axis in axes.items()]
        null = _null_space(self._shift_rows(axes, sum(sizes)))
        noise = torch.randn(null.shape[1], generator=self.generator, dtype=torch.float64).to(null.device)
        deltas = dict(zip(axes, (null @ noise).split(sizes), strict=True))
        free = [name for name, delta in deltas.items() if float(delta.abs().max()) > 1e-6]
        if not free:
            return []
        step = _STEP * (0.1 + sum(float(self.state[name].abs().mean()) for name in free) / len(free))
        moved = {}
        for name in free:
            parameter = self.state[name]
            shape = [-1 if axis == axes[name] else 1 for axis in range(parameter.ndim)]
            moved[name] = parameter + step * deltas[name].reshape(shape)
        holds = self._keeps(moved) and not all(self._keeps({name: value}) for name, value in moved.items())
        return free if holds else []

    def num_channels(self, names: Iterable[str]) -> int:
        """Return the number of unknowns of :meth:`free_shifts`."""
        return sum(self.state[name].shape[self._channels(name)] for name in names)

    def _shift_rows(self, axes: Mapping[str, int], num_unknowns: int) -> Tensor:
        """Return rows of J over the channels of some parameters, at several inputs."""
        rows: list[Tensor] = []
        for _ in range(_MOST_CALLS):
            call = self._drawn() if rows else self.call
            gradients = self._gradients(list(axes), call, -(-num_unknowns // 4))
            for row in zip(*gradients, strict=True):
                by_channel = [g.movedim(axis, 0) for g, axis in zip(row, axes.values(), strict=True)]
                rows.append(torch.cat([g.reshape(len(g), -1).sum(1) for g in by_channel]))
            if len(rows) >= num_unknowns + _MORE_ROWS:
                break
        return torch.stack(rows)

    def _rows(self, changes: Mapping[str, Tensor], num_rows: int) -> Tensor:
        gradients = self._gradients(list(changes), self.call, num_rows)
        return torch.stack([(g * c).flatten(1).sum(1) for g, c in zip(gradients, changes.values(), strict=True)], dim=1)

    def _gradients(self, names: list[str], call: Call, most: int) -> list[Tensor]:
        """Return the derivatives of random sums of the outputs by some parameters, ``(sums, *shape)`` each."""
        parameters = [self.leaves[name].requires_grad_() for name in names]
        with torch.enable_grad():
            results = [t for t in tensors(self.model(*call.args, **call.kwargs)) if t.requires_grad]
        rows = []
        for _ in range(min(most, max(1, sum(t.numel() for t in results)))):
            cotangents = [self._noise(t.detach(), 1.0) for t in results]
            rows.append(
                torch.autograd.grad(results, parameters, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True)
            )
        return [torch.stack(column).detach() for column in zip(*rows, strict=True)]

    def _keeps(self, moved: Mapping[str, Tensor]) -> bool:
        """Tell whether the outputs stay with some tensors replaced."""
        before = {name: self.state[name].clone() for name in moved}
        for name, value in moved.items():
            self.state[name].copy_(value)
        kept = all(relative_difference(known, outputs(self.model, call)) <= _RTOL for call, known in self.runs)
        for name, value in before.items():
            self.state[name].copy_(value)
        return kept

    def _drawn(self) -> Call:
        """Return drawn inputs, or the example inputs if the model does not take them."""
        call = self.call.drawn(self.generator)
        try:
            is_finite = all(bool(t.isfinite().all()) for t in outputs(self.model, call))
        except Exception:  # whatever a user's model raises at inputs that mean nothing
            return self.call
        return call if is_finite else self.call

    def _channels(self, name: str) -> int:
        shape = self.state[name].shape
        wide = [axis for axis, size in enumerate(shape) if size > 1]
        return wide[0] if len(wide) == 1 else len(shape) - 1

    def _axis(self, name: str, part: Part) -> int:
        return self._channels(name) if part.axis is None else part.axis

    def _gains(self, part: Part, size: int) -> Tensor:
        D = torch.ones(size, dtype=torch.float64, device=next(iter(self.state.values())).device)
        for name, eps in part.gains:
            value = self.state[name].double().reshape(-1)
            D = D * (value if eps is None else (value + eps).rsqrt()) if value.numel() == size else D
        return D

    def _matrix(self, size: int) -> Tensor:
        """Return an invertible matrix: a rotation of numbers from 1/2 to 2."""
        noise = torch.randn(size, size, generator=self.generator, dtype=torch.float64)
        sizes = (2 * torch.rand(size, generator=self.generator, dtype=torch.float64) - 1).exp2()
        matrix: Tensor = torch.linalg.qr(noise)[0] * sizes
        return matrix.to(next(iter(self.state.values())).device)

    def _noise(self, like: Tensor, size: float | None = None) -> Tensor:
        noise = torch.randn(like.shape, generator=self.generator, dtype=torch.float64).to(like)
        return noise * (0.1 + float(like.square().mean().sqrt()) if size is None else size)


def _null_space(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the δ with ``rows @ δ = 0``, shape ``(unknowns, dimension)``; what has no effect stays 0."""
    sizes = rows.norm(dim=0)
    effective = sizes > _LEAST * sizes.max()
    if not bool(effective.any()):
        return rows.new_zeros(rows.shape[1], 0)
    _, values, vectors = torch.linalg.svd(rows[:, effective] / sizes[effective])
    values = torch.cat([values, values.new_zeros(len(vectors) - len(values))])
    found = vectors[values <= _RTOL * values[0]].T
    null = rows.new_zeros(rows.shape[1], found.shape[1])
    null[effective] = found / sizes[effective, None]
    basis: Tensor = torch.linalg.qr(null)[0]
    return basis


def _mixed(value: Tensor, matrix: Tensor, axis: int, *, in_turn: bool = False) -> Tensor:
    """Return ``matrix`` times the slices of a tensor along one axis, which holds several for each channel if it is longer.

    They lie side by side, as a flattened image has them, or ``in_turn``, all channels and then all again.
    """
    value = value.movedim(axis, 0)
    shape = (-1, len(matrix), value[0].numel()) if in_turn else (1, len(matrix), -1)
    return (matrix @ value.reshape(shape)).reshape(value.shape).movedim(0, axis)


def _centred_in(kernel: Tensor, shape: torch.Size) -> Tensor:
    """Return a kernel with as many zeros on both sides of it as make it ``shape``."""
    margins = [(n - m) // 2 for n, m in zip(shape[2:], kernel.shape[2:], strict=True)]
    return nn.functional.pad(kernel, [margin for margin in reversed(margins) for _ in range(2)])
