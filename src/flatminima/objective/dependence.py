"""Whether the loss is a function of θ alone whose derivatives torch.autograd can see; found by evaluating it elsewhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flatminima._errors import NotSupported
from flatminima.objective.evaluators import Evaluator, ModelEvaluator
from flatminima.objective.module_state import drop_tensors, kept_tensors

__all__ = ["refuse_hidden_paths", "refuse_memory", "refuse_writes", "tolerance"]


def tolerance(tensors: Iterable[Tensor]) -> float:
    """Return the relative difference that two evaluations of one number may have by rounding."""
    return min(1e3 * max((torch.finfo(t.dtype).eps for t in tensors), default=1e-7), 0.03)


@contextmanager
def refuse_writes(evaluator: Evaluator, leaves: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse what writes to parameters while it computes the loss; the user's own get their values back.

    Raises:
        NotSupported: If a parameter was written to; the module that holds it is named.
    """
    named = [*evaluator.current().items(), *leaves.items()]
    named += [(n, p) for module in evaluator.modules for n, p in module.named_parameters(recurse=False)]
    watched = {id(t): (name, t, _version(t), t.detach().clone()) for name, t in reversed(named)}
    written: list[str] = []
    try:
        yield
    except Exception as error:  # what is written to differs from pass to pass: this is the cause of other errors
        written += _put_back(watched.values())
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

    First within one session: the loss at another point, after it was taken at θ, against what it is on its own. Then for what
    was kept before: the same without the tensors that modules keep, where that changes nothing at θ.

    Args:
        evaluator: The loss; its first batch is used.
        theta: The point ``(n,)``.
        precision: Relative difference that two evaluations of one number may have.

    Raises:
        NotSupported: If a module keeps what it has computed from parameters.
    """

    def differ(first: float, second: float) -> bool:
        finite = math.isfinite(first) and math.isfinite(second)
        return finite and not math.isclose(first, second, rel_tol=precision, abs_tol=1e-30)

    other = theta + 0.1 * _offsets(theta)
    with evaluator.session():
        here, after = _loss(evaluator, theta), _loss(evaluator, other)
        kept_by_now = kept_tensors(evaluator.modules)
    with evaluator.session():
        kept_before = kept_tensors(evaluator.modules)
        alone = _loss(evaluator, other)
    if differ(alone, after):
        raise NotSupported(_memory(kept_by_now))
    for name, modules in kept_before.items():
        for inside in (True, False):
            with evaluator.session():
                anew = []
                for point in (other, theta):
                    for module in modules:
                        drop_tensors(module, name, inside=inside)
                    anew.append(_loss(evaluator, point))
            if differ(alone, anew[0]) and math.isclose(here, anew[1], rel_tol=precision, abs_tol=1e-30):
                raise NotSupported(_memory({name: modules}))


def _in_double(evaluator: Evaluator, theta: Tensor) -> tuple[Evaluator, float] | None:
    """Return the loss computed in float64 with its value at θ, where the model and the device have that."""
    if not isinstance(evaluator, ModelEvaluator) or theta.dtype == torch.float64:
        return None
    double = evaluator.replaced(dtype=torch.float64)
    value = _loss(double, theta)
    return (double, value) if math.isfinite(value) else None


def _loss(evaluator: Evaluator, theta: Tensor) -> float:
    """Return the first batch's loss, or NaN where it cannot be had."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            evaluation = next(iter(evaluator.evaluations(evaluator.leaves(theta))))
            return float(evaluation.total)
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
    """Give the tensors their values back, and return the names of those that were written to."""
    written = []
    for name, tensor, version, value in watched:
        changed = not _equal(tensor, value)
        if changed or _version(tensor) != version:
            written.append(name)
        if changed:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
    return written


def _writes(evaluator: Evaluator, name: str) -> str:
    return (
        f"A forward pass writes to {_named(evaluator, name)}, so the loss is not taken at the given parameters. Known causes: "
        "Embedding with max_norm (leave it out), weights clipped in forward (do it after the optimiser's step, or use "
        "torch.nn.utils.parametrize), an optimiser's step inside a closure."
    )


def _memory(kept: Mapping[str, list[nn.Module]]) -> str:
    where = ", ".join(f"{name!r} of {type(modules[0]).__name__}" for name, modules in kept.items())
    return (
        "The loss at other parameters depends on an earlier pass: the model keeps what it has computed from its parameters "
        f"({f'look at {where}' if where else 'outside its attributes'}). Compute it in every forward pass, or turn the cache off."
    )
