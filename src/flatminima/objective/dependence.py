"""Whether the loss is a function of θ alone whose derivatives torch.autograd can see; found by evaluating it elsewhere.

What a model keeps from earlier passes is found where a pass of these checks makes it anew: during them, or after the kept tensor
or array is replaced by None, deleted, or its flag flipped, in attributes of modules and in the containers and objects that they
hold (objects in objects four deep). Not found is what was kept before the checks began

- outside modules: in globals, closures, class attributes, functools.cache;
- under a flag that is no bool, or is a buffer, or is set by code that forward does not reach; as a plain number;
- from other parameters than the present ones, or from another batch (it may as well be meant as a constant);
- in a module that is no registered sub-module of the model.

That a path is cut which autograd sees in part (a norm that is detached, a straight-through estimator) is no matter of this file:
the loss has a derivative then, of another function. See ``flatminima.objective.consistency``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective.caches import Erasure, erasures, kept_by
from flatminima.objective.evaluators import Evaluator, ModelEvaluator

__all__ = ["refuse_hidden_paths", "refuse_memory", "refuse_writes", "tolerance"]


def tolerance(tensors: Iterable[Tensor]) -> float:
    """Return the relative difference that two evaluations of one number may have by rounding."""
    return min(1e3 * max((torch.finfo(t.dtype).eps for t in tensors), default=1e-7), 0.03)


@contextmanager
def refuse_writes(evaluator: Evaluator, leaves: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse what changes parameters while it computes the loss; the user's own get their values back.

    A write that leaves every value as it is does no harm. A closure may change parameters that are not its own, such as those of
    a teacher: they are put back after every session, and what that does to the loss is for ``refuse_memory`` to see.

    Raises:
        NotSupported: If a parameter was changed; the module that holds it is named.
    """
    named = [*evaluator.current().items(), *leaves.items()]
    if isinstance(evaluator, ModelEvaluator):
        named += [(n, p) for module in evaluator.modules for n, p in module.named_parameters(recurse=False)]
    watched = {id(t): (name, t, _version(t), t.detach().clone()) for name, t in reversed(named)}
    written: list[str] = []
    try:
        yield
    except Exception as error:  # what is written to differs from pass to pass, or is missed by a backward pass
        touched = [name for name, tensor, version, _ in watched.values() if _version(tensor) != version]
        written += _put_back(watched.values()) or (touched if "modified by an inplace operation" in str(error) else [])
        if written:
            raise NotSupported(_writes(evaluator, written[-1])) from error
        raise
    finally:
        written += _put_back(watched.values())
    if written:
        raise NotSupported(_writes(evaluator, written[-1]))


def refuse_hidden_paths(evaluator: Evaluator, theta: Tensor, names: Collection[str]) -> None:
    """Refuse a loss that changes with parameters from which autograd sees no path to it; to be called within a session.

    A parameter that the loss does not use passes, and one that only chooses between branches, for the step is small.

    Raises:
        NotSupported: If the loss at the first batch changes with the parameters of these names.
    """
    if not names:
        return
    trial, here = _in_double(evaluator, theta) or (evaluator, _loss(evaluator, theta))
    if not math.isfinite(here) or here != _loss(trial, theta):
        return
    epsilon = max(torch.finfo(leaf.dtype).eps for leaf in trial.leaves(theta).values())
    step = max(1e-6, epsilon**0.4) * _offsets(theta)

    def change(chosen: Iterable[str]) -> bool:
        there = theta.clone() if trial is evaluator else theta.double()
        for name in chosen:
            where = evaluator.space.slices[name]
            there[where] += step[where]
        value = _loss(trial, there)
        return math.isfinite(value) and abs(value - here) > 100 * epsilon * abs(here)

    if change(names):
        name = next((name for name in names if change([name])), next(iter(names)))
        raise NotSupported(
            f"The loss changes with {_named(evaluator, name)}, but torch.autograd sees no path between them: "
            "the code runs under torch.no_grad(), or uses .detach(), .data or .item(). Take that out, or leave the parameter out."
        )


def refuse_memory(evaluator: Evaluator, theta: Tensor, precision: float) -> None:
    """Refuse a loss that depends on where it was evaluated before; opens sessions of its own.

    First within one session: the loss at another point, after it was taken at θ, and once more, against what it is on its own.
    Then for what was kept before: the same after modules were made to forget it. That is evidence only if it leaves the loss
    at θ as it is, and if the pass writes again what was forgotten, the same as before: what a pass only reads is a constant.

    Args:
        evaluator: The loss; its first batch is used.
        theta: The point ``(n,)``.
        precision: Relative difference that two evaluations of one number may have.

    Raises:
        NotSupported: If a module keeps what it has computed from parameters, or the loss changes from call to call.
    """

    def differ(first: float, second: float) -> bool:
        return math.isfinite(first) and math.isfinite(second) and not _close(first, second, precision)

    other = theta + 0.1 * _offsets(theta)
    with evaluator.session():
        here = _loss(evaluator, theta)
        after, again, writes = _twice(evaluator, other)
        kept_by_now = kept_by(evaluator.modules)
    if differ(after, again) or (writes and math.isfinite(after + again) and after != again):
        raise NotSupported(
            "The loss changes with the number of calls, because a call changes what the next one reads"
            f"{f' ({_named(evaluator, writes)}, for one)' if writes else ''}. Do such updates outside."
        )
    with evaluator.session():
        ways = list(erasures(evaluator.modules))
        alone = _loss(evaluator, other)
    if differ(alone, after):
        raise NotSupported(_memory(kept_by_now))
    for way in ways:
        anew = _forgetting(evaluator, way, other)
        if anew is None or not differ(alone, anew[0]):
            continue
        anew = _forgetting(evaluator, way, theta)
        if anew is not None and anew[1] and _close(here, anew[0], precision):
            raise NotSupported(_memory({way.name: way.kind}))


def _twice(evaluator: Evaluator, theta: Tensor) -> tuple[float, float, str]:
    """Return the loss of two calls at θ, and the name of a parameter that they changed, or ""."""
    named = [(name, p) for module in evaluator.modules for name, p in module.named_parameters(recurse=False)]
    own = {id(p) for p in evaluator.current().values()}
    watched = [(name, p, p.detach().clone()) for name, p in named if id(p) not in own]
    first, second = _loss(evaluator, theta), _loss(evaluator, theta)
    return first, second, next((name for name, p, value in watched if not _equal(p, value)), "")


def _forgetting(evaluator: Evaluator, way: Erasure, theta: Tensor) -> tuple[float, bool] | None:
    """Return the loss at θ after modules were made to forget, and whether they then compute the same as was kept.

    None if they do not compute it again, or the pass changes parameters: it initialises, and what it makes is meant to stay.
    """
    with evaluator.session():
        way.erase()
        trial = evaluator.replaced() if isinstance(evaluator, ModelEvaluator) else evaluator  # buffers may be gone
        leaves = trial.leaves(theta)
        tensors = [*leaves.values(), *(p for module in trial.modules for p in module.parameters(recurse=False))]
        watched = [("", t, _version(t), t.detach().clone()) for t in tensors]
        try:
            loss = _loss_at(trial, leaves)
            written = way.written_again()
        finally:
            changed = _put_back(watched)
        if changed or not written:
            return None
        return loss, way.as_before(max(tolerance(leaves.values()), 1e-6))


def _in_double(evaluator: Evaluator, theta: Tensor) -> tuple[Evaluator, float] | None:
    """Return the loss computed in float64 with its value at θ, where the model and the device have that."""
    if not isinstance(evaluator, ModelEvaluator) or theta.dtype == torch.float64:
        return None
    double = evaluator.replaced(dtype=torch.float64)
    value = _loss(double, theta)
    return (double, value) if math.isfinite(value) else None


def _loss(evaluator: Evaluator, theta: Tensor) -> float:
    """Return the first batch's loss at θ, or NaN where it cannot be had."""
    return _loss_at(evaluator, evaluator.leaves(theta))


def _loss_at(evaluator: Evaluator, leaves: Mapping[str, Tensor]) -> float:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return float(next(iter(evaluator.evaluations(leaves))).total)
    except Exception:  # other values than the user's may be out of the model's domain
        return math.nan


def _offsets(theta: Tensor) -> Tensor:
    """Return a direction ``(n,)`` whose entries are as large as those of θ, everywhere alike so that zeros move too."""
    generator = torch.Generator(theta.device).manual_seed(0)
    size = theta.square().mean().sqrt().clamp_min(1e-2)
    return (theta.abs() + size) * torch.empty_like(theta).normal_(generator=generator)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())


def _named(evaluator: Evaluator, name: str) -> str:
    """Return a parameter's name with the module that holds it."""
    parameter = evaluator.current().get(name)
    for module in evaluator.modules:
        if parameter is not None and any(p is parameter for p in module.parameters(recurse=False)):
            owner = name.rpartition(".")[0]
            return f"{name!r} of {owner or 'the model'!r} ({type(module).__name__})"
    return repr(name)


def _put_back(watched: Iterable[tuple[str, Tensor, int, Tensor]]) -> list[str]:
    """Give the tensors their values back, and return the names of those whose values had changed."""
    changed = []
    for name, tensor, _, value in watched:
        if not _equal(tensor, value):
            changed.append(name)
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
    return changed


def _close(first: float, second: float, precision: float) -> bool:
    return math.isclose(first, second, rel_tol=precision, abs_tol=1e-30)


def _writes(evaluator: Evaluator, name: str) -> str:
    return (
        f"A forward pass writes to {_named(evaluator, name)}, so the loss is not taken at the given parameters. Known causes: "
        "Embedding with max_norm (leave it out), weights clipped in forward (do it after the optimiser's step, or use "
        "torch.nn.utils.parametrize), an optimiser's step inside a closure."
    )


def _memory(kept: Mapping[str, str]) -> str:
    where = ", ".join(f"{name!r} of {kind}" for name, kind in kept.items())
    return (
        "The loss at other parameters depends on an earlier pass: the model keeps what it has computed from its parameters "
        f"({f'look at {where}' if where else 'outside its attributes'}). Compute it in every forward pass, or turn the cache "
        "off; if it is meant as a constant, pass check_deterministic=False."
    )
