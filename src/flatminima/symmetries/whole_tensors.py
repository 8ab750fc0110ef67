"""Rescalings of whole parameters that the graph did not explain, found numerically: a check that asks no rule.

Multiply every parameter tensor p by exp(a_p): the outputs stay if J(θ) Σ_p a_p θ_p = 0 at every θ. Cotangents drawn at random
turn one backward pass into one row of these equations for all tensors at once, so their null space costs about as many
passes as there are tensors. What it holds beyond the symmetries that were found is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatminima.objective.session import copied
from flatminima.params import clean_name
from flatminima.symmetries.graph import one_line
from flatminima.symmetries.inputs import Call, num_operations, outputs, tensors
from flatminima.symmetries.rescaling import Rescaling
from flatminima.symmetries.settle import DEPENDS, shown
from flatminima.symmetries.symmetry import Symmetry
from flatminima.symmetries.values import compressed

__all__ = ["unexplained_scalings"]

_MOST_TENSORS = 200
_MOST_WORK = 100_000_000_000
_NUM_POINTS = 3
_MORE_ROWS = 8
#: Largest part of what every tensor does alone that their scalings may leave together; an eps in a normalisation leaves some.
_ALMOST = 1e-4
_LEAST = 1e-12


def unexplained_scalings(model: nn.Module, call: Call, found: Sequence[Symmetry], not_moved: set[str]) -> list[str]:
    """Return notes on rescalings of whole parameters that change no output and are no move of ``found``.

    Args:
        model: The network in float64.
        call: Example inputs.
        found: The symmetries that hold.
        not_moved: Layers and parameters of which a note says already that they can be rescaled.
    """
    names = [clean_name(name) for name, _ in model.named_parameters()]
    if not names:
        return []
    if len(names) > _MOST_TENSORS:
        return [f"rescalings of whole parameters were not looked for numerically: more than {_MOST_TENSORS} parameters"]
    try:
        if num_operations(model, call) * len(names) > _MOST_WORK:
            return ["rescalings of whole parameters were not looked for numerically: the network is too large for it"]
        null = _null_space(_equations(model, call))
    except Exception as error:  # whatever a user's model raises when it is differentiated
        return [f"rescalings of whole parameters could not be looked for numerically ({one_line(error)})"]
    known = _explained(found, names)
    notes = []
    for direction in _sparse(null):
        residual = direction - known @ (known.T @ direction)
        if float(residual.norm()) < 1e-4 * float(direction.norm()):
            continue
        known = torch.cat([known, (residual / residual.norm())[:, None]], dim=1)
        involved = [name for name, a in zip(names, direction.tolist(), strict=True) if abs(a) > 1e-3]
        if not _is_said(involved, not_moved) and _stays(model, call, direction):
            notes.append(_note(model, involved))
    return notes


def _equations(model: nn.Module, call: Call) -> Tensor:
    """Return rows Σ_p (cotangent · J_p θ_p) a_p = 0, shape ``(rows, tensors)``, from several θ near the model's."""
    generator = torch.Generator().manual_seed(2)
    num_rows, rows = sum(1 for _ in model.parameters()) + _MORE_ROWS, list[Tensor]()
    while len(rows) < num_rows:
        near = copied(model)
        with torch.no_grad():
            for parameter in near.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                parameter.add_(noise * 0.1 * (0.1 + parameter.square().mean().sqrt()))
            for name, buffer in near.named_buffers():  # means that are still zero are no symmetry
                if name.endswith("running_mean"):
                    buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64).to(buffer))
        parameters = [p.requires_grad_() for p in near.parameters()]
        with torch.enable_grad():
            results = [t for t in tensors(near(*call.args, **call.kwargs)) if t.requires_grad]
        for _ in range(min(-(-num_rows // _NUM_POINTS), max(1, sum(t.numel() for t in results)))):
            cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in results]
            gradients = torch.autograd.grad(
                results, parameters, cotangents, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.stack([(g * p).sum().detach().cpu() for g, p in zip(gradients, parameters, strict=True)]))
    return torch.stack(rows)


def _null_space(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the a with ``rows @ a`` next to nothing, shape ``(tensors, dimension)``."""
    sizes = rows.norm(dim=0)
    effective = sizes > _LEAST * sizes.max()
    scale = torch.where(effective, sizes, 1.0)
    _, values, vectors = torch.linalg.svd((rows * effective) / scale)
    values = torch.cat([values, values.new_zeros(len(vectors) - len(values))])
    basis: Tensor = vectors[values <= _ALMOST].T / scale[:, None]
    if basis.shape[1]:
        basis = torch.linalg.qr(basis / basis.norm(dim=0))[0]
    return basis


def _sparse(null: Tensor) -> list[Tensor]:
    """Return a basis of the span of orthonormal columns with many zeros, by elimination; largest entry 1."""
    rows = null.T.clone()
    for i in range(len(rows)):
        column = int(rows[i:].abs().amax(0).argmax())
        pivot = i + int(rows[i:, column].abs().argmax())
        rows[[i, pivot]] = rows[[pivot, i]]
        rows[i] /= rows[i, column].clone()
        others = torch.arange(len(rows)) != i
        rows[others] -= rows[others, column, None] * rows[i]
    return [row / row.abs().max() for row in rows]


def _explained(found: Sequence[Symmetry], names: list[str]) -> Tensor:
    """Return an orthonormal basis of the moves of ``found`` that scale every tensor by one number, ``(tensors, dimension)``."""
    basis = torch.zeros(len(names), 0, dtype=torch.float64)
    for symmetry in (s for s in found if isinstance(s, Rescaling) and s.kind == "layer"):
        values = torch.zeros(len(names), symmetry.dimension + 1, dtype=torch.float64)
        uneven = [values.new_zeros(0, symmetry.dimension + 1)]
        for place, name in enumerate(names):
            exponents = values.new_zeros(1, symmetry.dimension + 1)
            for role in symmetry.roles.get(name, ()):
                variables = compressed(role.variables).reshape(-1).unique() % (symmetry.dimension + 1)
                each = role.exponent * torch.eye(symmetry.dimension + 1, dtype=torch.float64)[variables]
                uneven.append(each[1:] - each[:1])  # one number for the whole tensor: these must not differ
                exponents = exponents + each[:1]
            values[place] = exponents[0]
        _, sizes, vectors = torch.linalg.svd(torch.cat(uneven)[:, :-1], full_matrices=True)
        allowed = vectors[int((sizes > 1e-9).sum()) :].T if vectors.numel() else vectors
        basis = torch.cat([basis, values[:, :-1] @ allowed], dim=1)
    left, sizes, _ = torch.linalg.svd(basis, full_matrices=False)
    directions: Tensor = left[:, sizes > 1e-9]
    return directions


def _stays(model: nn.Module, call: Call, direction: Tensor) -> bool:
    """Tell whether the outputs stay, but for an eps, when every tensor is multiplied by exp(a_p t), far both ways.

    What the tensors do together is compared with what each does alone, which may be little in a deep network.
    """
    before = outputs(model, call)

    def change(a: Tensor) -> float:
        moved = copied(model)
        with torch.no_grad():
            for parameter, factor in zip(moved.parameters(), a.exp().tolist(), strict=True):
                parameter.mul_(factor)
        gaps = [(y - x).abs().amax() for x, y in zip(before, outputs(moved, call), strict=True) if x.numel()]
        return float(torch.stack(gaps).max())

    involved = torch.nonzero(direction.abs() > 1e-3).flatten().tolist()
    size = max(float(t.abs().max()) for t in before if t.numel())
    for t in (-1.0, 1.0, 3.0):
        together = change(t * direction)
        alone = [change(t * direction * (torch.arange(len(direction)) == p)) for p in involved]
        if not together <= (1e-3 * min(alone) if len(involved) > 1 else 1e-6 * size):
            return False
    return True


def _is_said(involved: list[str], not_moved: set[str]) -> bool:
    """Tell whether a note on a layer of a rescaling was given: on one that is read twice, or on all of them."""
    layers = [name.rsplit(".", 1)[0] for name in involved]
    reused = any(name in not_moved for name in involved)
    return reused or all(layer in not_moved for layer in layers)


def _note(model: nn.Module, involved: list[str]) -> str:
    sizes = {clean_name(name): p.numel() for name, p in model.named_parameters()}
    gains = [name for name in involved if sizes[name] == 1]
    what = f"{shown(gains)} multiplies all channels: " if len(gains) == 1 and len(involved) > 1 else ""
    together = " together, each as a whole," if len(involved) > 1 else ""
    return f"{what}rescaling {shown(involved)}{together} leaves the outputs as they are; {DEPENDS}"
