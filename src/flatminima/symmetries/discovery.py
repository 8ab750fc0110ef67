"""find_symmetries: trace a model, read its symmetries off the graph, and keep those that hold numerically."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatminima.objective import Objective
from flatminima.objective.losses import Loss
from flatminima.objective.session import copied
from flatminima.params import clean_name
from flatminima.symmetries.equivalence import check_not_empty, relative_difference
from flatminima.symmetries.graph import TraceFailed, one_line, trace
from flatminima.symmetries.inputs import Call, double_copy, kept_rng, outputs
from flatminima.symmetries.linear_chains import linear_groups
from flatminima.symmetries.move import Layout, unwrapped
from flatminima.symmetries.permutation import Permutation
from flatminima.symmetries.rescaling import Rescaling, Role, Statistic
from flatminima.symmetries.rules import rule_for
from flatminima.symmetries.softmax_shift import SoftmaxShift, softmax_loss, softmax_loss_of
from flatminima.symmetries.structure import ScaleVariables, exchangeable_cells, is_scaled, scale_variables
from flatminima.symmetries.symmetry import Symmetries, Symmetry
from flatminima.symmetries.walk import Walk, walk
from flatminima.symmetries.whole_tensors import unexplained_scalings

__all__ = ["find_symmetries", "model_at"]

_RTOL = 1e-10


def find_symmetries(model: nn.Module | Objective, example_inputs: object = None, *, loss: object = None) -> Symmetries:
    r"""Find the maps of a network's parameters that leave its function unchanged.

    The network is traced in eval mode. Every unit gets an unknown log-scale and an identity; each operation says which
    scales must be equal, which must stay, and which units move together. What is left free are the symmetries:

    - "layer": :math:`W_d \to \alpha_d W_d`, :math:`\prod_d \alpha_d = 1`, :math:`b_d \to (\prod_{k \le d} \alpha_k)\, b_d`;
    - "node": a unit's incoming row and bias times s, what reads it divided by s; contains "layer";
    - "permutation": hidden units or channels in another order;
    - "norm-scale": what feeds a BatchNorm times c, its running mean times c, its variance :math:`c^2 (v + \epsilon) - \epsilon`;
    - "softmax shift": one vector added to the last layer's weights of every class, if ``loss`` is softmax cross-entropy (for an
      objective: any loss of outputs ``(examples, classes)`` that does not see the shift), or if the model ends in a softmax.

    Each is then tried on the example inputs, in float64, at the given parameters and at others near by; one that changes
    the outputs by more than 1e-10 (relative) is dropped with a note. Units that an operation outside the known ones touches
    are fixed, with a note. What is a symmetry and not moved along is named in a note: matrices between layers without a
    nonlinearity between and biases that make up for each other (both tried before they are named), the scale of what a
    normalisation reads, layers used twice, and any other rescaling of whole parameters, which is looked for numerically; where
    the network is too large for these trials a note says so. Scaling by negative numbers is not looked for.

    Args:
        model: The network, or an objective; it is copied, not changed.
        example_inputs: Tensor, tuple of positional inputs or dict of keyword inputs, a few rows. An objective has its own.
        loss: The loss, if its own symmetries count too: ``nn.CrossEntropyLoss``, ``F.cross_entropy`` or a partial of it.
            An objective has its own, and there any other loss is tried: one number is added to all outputs of an example.

    Returns:
        The symmetries with notes on what was not covered. A model that cannot be traced gives none, and a note.

    Raises:
        TypeError: If ``model`` is neither, or ``example_inputs`` is missing or has another form.
        ValueError: If ``example_inputs`` holds no example.
        NotSupported: If the objective knows no model (a closure), or no inputs (a loss that calls the model) and none are given.

    References:
        Dinh et al. (2017), "Sharp Minima Can Generalize For Deep Nets", for "layer"; Neyshabur et al. (2015),
        "Path-SGD", for "node".

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> symmetries = find_symmetries(net, torch.randn(8, 4), loss=nn.CrossEntropyLoss())
        >>> {s.kind: s.dimension for s in symmetries}
        {'layer': 2, 'node': 11, 'permutation': 0, 'softmax shift': 7}
    """
    if isinstance(model, Objective):
        if example_inputs is not None or loss is not None:
            return _of_objective(model, example_inputs, loss)
        known = model.architecture  # tracing takes longer than most measures, and depends on the architecture alone
        if "symmetries" not in known:
            known["symmetries"] = _of_objective(model, None, None)
        found = known["symmetries"]
        assert isinstance(found, Symmetries)
        return found
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module or an Objective. Got {type(model).__name__}.")
    with kept_rng(model):
        found = _found(model, Call.of(example_inputs), softmax_loss(loss))
    if callable(loss) and Loss.of(loss).name == "custom" and "softmax shift" not in found.kinds():
        note = "softmax shift: this loss is not one of torch's own, and without an objective it cannot be tried: not looked for"
        return Symmetries(found, (*found.notes, note))
    return found


def _of_objective(objective: Objective, example_inputs: object, loss: object) -> Symmetries:
    call = Call.of_arguments(*objective.example_inputs()) if example_inputs is None else Call.of(example_inputs)
    notes = ("the objective is in train mode, these are the symmetries in eval mode",) if objective.mode == "train" else ()
    model = model_at(objective)
    kind, note = softmax_loss_of(objective) if loss is None else (softmax_loss(loss), "")
    with kept_rng(model):
        found = _found(model, call, kind)
    notes = (*notes, *found.notes)
    return Symmetries(found, (*notes, note) if note and "softmax shift" not in found.kinds() else notes)


def model_at(objective: Objective) -> nn.Module:
    """Return a copy of the objective's model at the objective's point."""
    model = copied(objective.model)
    values = objective.space.unflatten(objective.theta)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if clean_name(name) in values:
                parameter.copy_(values[clean_name(name)])
    return model


def _found(model: nn.Module, call: Call, softmax: str) -> Symmetries:
    try:
        double = double_copy(model)
        reference = outputs(double, call)
        again = outputs(double, call)
    except Exception as error:  # whatever a user's model raises; the caller is told and nothing is claimed
        return Symmetries((), (f"the model does not run as a copy in float64 ({one_line(error)}): nothing is claimed",))
    check_not_empty(reference, "example_inputs")
    if not relative_difference(reference, again) <= _RTOL:
        return Symmetries((), ("the outputs differ between two runs in eval mode: nothing is claimed",))
    try:
        graph = trace(double, call)
    except TraceFailed as error:
        return Symmetries((), (f"torch.export could not trace the model ({error}): nothing is claimed",))
    state = walk(graph, rule_for)
    notes = [note if count == 1 else f"{note} ({count} times)" for note, count in state.notes.items()]
    # At the given parameters, and near by, where no bias is zero and no two units are equal.
    noisy = _jittered(double, state)
    points = [(p, copied(p), outputs(p, call)) for p in (double, noisy)]
    kept = []
    for candidate in _candidates(state, double, softmax):
        # A loss of a softmax does not see a shift of the logits; a model that ends in a softmax must give the same outputs.
        is_shift = candidate.kind == "softmax shift" and softmax == "cross_entropy"
        if all(_holds(candidate, *point, call, shift_invariant=is_shift) for point in points):
            kept.append(candidate)
        else:
            notes.append(f"{candidate.kind}: found in the graph, but the outputs changed when it was tried: dropped")
    if softmax and not any(isinstance(s, SoftmaxShift) for s in kept):
        notes.append(
            "softmax shift: the logits do not come straight from one layer that could be shifted: not looked for further"
        )
    notes += _free_shifts(state, double)
    notes += linear_groups(graph, noisy, call)
    notes += unexplained_scalings(double, call, kept, state.not_moved)
    return Symmetries(kept, notes)


def _free_shifts(state: Walk, model: nn.Module) -> list[str]:
    """Name the shifts before a normalisation, which are no moves here: a bias is free where a running mean follows it."""
    normalised = {int(i) for absorption in state.absorptions for i in absorption.ids.flatten()} - {0}
    parameters = dict(model.named_parameters())
    biases = [
        name
        for name, terms in state.terms.items()
        if name in parameters and parameters[name].ndim == 1
        if any(t.exponent == 1 and normalised & {int(i) for i in t.ids.flatten()} for t in terms)
    ]
    if not biases:
        return []
    return [
        f"shifts of {', '.join(biases)} together with the running means of the normalisation that follows: no move is made along "
        "them, and measures that look at the size of the parameters depend on them"
    ]


def _candidates(state: Walk, model: nn.Module, softmax: str) -> list[Symmetry]:
    layout = Layout.of(unwrapped(model))
    layer, node, norm = scale_variables(state)
    found: list[Symmetry | None] = [
        _rescaling("layer", layer, state, model, layout),
        _rescaling("node", node, state, model, layout),
        _permutation(state, layout, model),
        _rescaling("norm-scale", norm, state, model, layout),
        _softmax_shift(state, layout, model, softmax),
    ]
    return [symmetry for symmetry in found if symmetry is not None]


def _rescaling(kind: str, variables: ScaleVariables, state: Walk, model: nn.Module, layout: Layout) -> Rescaling | None:
    if not len(variables):
        return None
    roles = {}
    for name, terms in state.terms.items():
        of = tuple(Role(variables.of(t.ids), t.exponent) for t in terms if is_scaled(t, variables))
        if of:
            roles[name] = of
    buffers, statistics, values = [], {}, dict(model.named_buffers())
    if kind == "norm-scale":
        for absorption in state.absorptions:
            numbers = variables.of(absorption.ids)
            if bool((numbers >= 0).any()):
                roles[absorption.mean] = (Role(numbers, +1),)
                statistics[absorption.var] = Statistic(numbers, absorption.eps, values[absorption.var].detach().cpu().clone())
                buffers += [absorption.mean, absorption.var]
    layers = torch.from_numpy(variables.layers)
    return Rescaling(kind, layout, roles, variables.labels, layers, buffers=tuple(buffers), statistics=statistics)


def _permutation(state: Walk, layout: Layout, model: nn.Module) -> Permutation | None:
    cells = exchangeable_cells(state)
    if not cells:
        return None
    is_in_cell = torch.zeros(len(state.units), dtype=torch.bool)
    for cell in cells:
        is_in_cell[torch.from_numpy(cell)] = True
    terms = {}
    for name, all_terms in state.terms.items():
        of = tuple(t for t in all_terms if t.axis is not None and bool(is_in_cell[t.ids].any()))
        if of:
            terms[name] = of
    names = [b.name for b in state.units.blocks for _ in range(b.size)]
    labels = [names[int(cell[0, 0]) - 1] for cell in cells]
    buffers = tuple(name for name in terms if name in dict(model.named_buffers()))
    return Permutation(layout, cells, labels, terms, len(state.units), buffers=buffers)


def _softmax_shift(state: Walk, layout: Layout, model: nn.Module, loss: str) -> SoftmaxShift | None:
    output = state.output
    if output is None or output.affine is None or not output.shape:
        return None
    affine = output.affine
    if loss != "cross_entropy" and not affine.is_normalised:  # the outputs are no (log-)softmax: a shift changes them
        return None
    if any(state.num_uses[name] > 1 for name in (affine.weight, affine.bias) if name):
        return None
    ids = output.ids_along(1 if len(output.shape) > 1 else 0)
    if ids is None or ids.sort().values.tolist() != affine.ids.tolist():
        return None
    weight = dict(model.named_parameters())[affine.weight]
    return SoftmaxShift(layout, affine.weight, affine.weight_axis, affine.bias, float(weight.detach().square().mean().sqrt()))


def _holds(
    symmetry: Symmetry, model: nn.Module, scratch: nn.Module, before: list[Tensor], call: Call, *, shift_invariant: bool
) -> bool:
    """Try one random move from ``model``, written into its copy ``scratch``."""
    state: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    moved = symmetry.random(torch.Generator().manual_seed(0), 0.5, state=state).apply_state(state)
    # Not functional_call: in torch 2.13 it leaves the new values behind in a module that stands under two names.
    with torch.no_grad():
        for name, tensor in [*scratch.named_parameters(), *scratch.named_buffers()]:
            tensor.copy_(moved[name])
    return relative_difference(before, outputs(scratch, call), shift_invariant=shift_invariant) <= _RTOL


def _jittered(model: nn.Module, state: Walk) -> nn.Module:
    """Return a copy with noise on the parameters and on the statistics of the normalisations."""
    generator = torch.Generator().manual_seed(1)
    noisy = copied(model)
    variances = {a.var for a in state.absorptions}
    means = {a.mean for a in state.absorptions}
    with torch.no_grad():
        for name, tensor in [*noisy.named_parameters(), *noisy.named_buffers()]:
            noise = 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
            if name in variances:
                tensor.mul_(noise.exp())
            elif name in means or isinstance(tensor, nn.Parameter):
                tensor.add_(noise * (0.1 + tensor.square().mean().sqrt()))
    return noisy
