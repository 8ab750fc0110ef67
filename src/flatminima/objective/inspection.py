"""The first pass over the data: count it, see that every loss is finite, and that a second pass gives the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from flatminima._errors import NonFiniteLoss, NotDeterministic, NotSupported
from flatminima.objective.batches import Batches, batch_size, describe, tensors_of
from flatminima.objective.closures import ClosureEvaluator
from flatminima.objective.dependence import refuse_hidden_paths, refuse_memory, refuse_writes, tolerance
from flatminima.objective.digest import combined, digest
from flatminima.objective.evaluators import Evaluation, ModelEvaluator, gradients_of

__all__ = ["Inspection", "inspect_closure", "inspect_data"]


@final
@dataclass(frozen=True)
class Inspection:
    """What one pass over the data showed.

    Attributes:
        num_examples: Number of examples.
        num_terms: What the mean loss divides by: elements, rows, or the weights of targets that are not ignored.
        total: Sum over all terms.
        digest: A fingerprint of all batches.
    """

    num_examples: int
    num_terms: float
    total: float
    digest: str


def inspect_data(evaluator: ModelEvaluator, theta: Tensor, *, check_deterministic: bool) -> Inspection:
    """Pass over the data once, or twice to compare, and see what kind of function of θ ``(n,)`` the loss is.

    Raises:
        ValueError: If the data is empty, has no term, or does not fit the model.
        NonFiniteLoss: If a batch's loss is infinite or NaN.
        NotDeterministic: If the second pass differs, with the culprit where it can be found.
        NotSupported: If the loss is no function of θ alone, or torch.autograd does not see its derivatives.
    """
    with evaluator.session():
        leaves = evaluator.leaves(theta)
        with refuse_writes(evaluator, leaves):
            first = _one_pass(evaluator, leaves)
        if first.num_examples == 0:
            raise ValueError("`data` must hold at least one example. Got an empty loader.")
        if not first.num_terms > 0:
            raise ValueError(f"`data` must hold at least one loss term. Got {first.num_terms}: is every target ignored?")
        _check_micro_batches(evaluator, leaves, first)
        if check_deterministic:
            _compare(evaluator, leaves, first, _one_pass(evaluator, leaves))
        batch = next(evaluator.prepared())
    one_batch = evaluator.replaced(batches=Batches([batch]))
    if check_deterministic:
        refuse_memory(one_batch, theta, tolerance(leaves.values()))
    with evaluator.session():
        leaves = evaluator.leaves(theta)
        with refuse_writes(evaluator, leaves):
            _check_gradient(one_batch, leaves, theta)
    return first


def inspect_closure(evaluator: ClosureEvaluator, theta: Tensor) -> None:
    """Call a closure at θ ``(n,)`` and elsewhere, and see what kind of function it is.

    Raises:
        ValueError: If it does not return one finite number, or calls ``backward()``.
        NotDeterministic: If two calls differ.
        NotSupported: If the loss is no function of θ alone, or torch.autograd does not see its derivatives.
    """
    with evaluator.session():
        leaves = evaluator.leaves(theta)
        with refuse_writes(evaluator, leaves):
            first, second = (next(evaluator.evaluations(leaves)).total.item() for _ in range(2))
        if any(leaf.grad is not None for leaf in leaves.values()):
            raise ValueError(
                "`closure` must return the loss without calling backward() (derivatives are taken of what it returns)."
            )
        if not math.isfinite(first):
            raise ValueError(f"`closure` must return a finite number. Got {first}.")
        precision = tolerance(leaves.values())
        if not math.isclose(first, second, rel_tol=precision, abs_tol=1e-30):
            raise NotDeterministic(
                f"Two calls of the closure gave {first:.6g} and {second:.6g}. Put its model in eval mode (dropout "
                "draws at random), give it the same data in every call, and update other modules (a teacher) outside."
            )
    refuse_memory(evaluator, theta, precision)
    with evaluator.session():
        leaves = evaluator.leaves(theta)
        with refuse_writes(evaluator, leaves):
            for _ in range(2):  # the second as of a later call, with the graph of the first gone
                total = next(evaluator.evaluations(leaves)).total
                unseen = _without_gradient(total, leaves)
                _plain_gradients(total, leaves)
        _refuse_hooks(leaves)
        refuse_hidden_paths(evaluator, theta, unseen)


def _without_gradient(total: Tensor, leaves: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the leaves that are no part of the total's graph."""
    if not total.requires_grad:
        return list(leaves)
    gradients = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None]


def _compare(evaluator: ModelEvaluator, leaves: Mapping[str, Tensor], first: Inspection, second: Inspection) -> None:
    if second.digest != first.digest:
        raise NotDeterministic(_changed_data(evaluator.batches.data))
    if not math.isclose(first.total, second.total, rel_tol=tolerance(leaves.values()), abs_tol=1e-30):
        raise NotDeterministic(
            f"The loss changed between two passes over the same data "
            f"({first.total / first.num_terms:.6g} -> {second.total / second.num_terms:.6g}). {_culprit(evaluator, leaves)} "
            "Put the model in eval mode (mode='eval'), or pass check_deterministic=False."
        )


def _one_pass(evaluator: ModelEvaluator, leaves: Mapping[str, Tensor]) -> Inspection:
    examples, terms, total, digests = 0, 0.0, 0.0, []
    with torch.no_grad():
        for index, batch in enumerate(evaluator.prepared()):
            evaluation, count = _evaluate(evaluator, index, batch, leaves)
            size, value = batch_size(batch), float(evaluation.total)
            if not math.isfinite(value):
                raise NonFiniteLoss(
                    f"The loss of batch {index} (examples {examples} to {examples + size - 1}) is {value}. "
                    "Look at its inputs and targets, and at the parameters, for NaN and infinities."
                )
            examples, terms, total = examples + size, terms + count, total + value
            digests.append(digest(tensors_of(batch)))
    return Inspection(examples, terms, total, combined(digests))


def _evaluate(evaluator: ModelEvaluator, index: int, batch: Any, leaves: Mapping[str, Tensor]) -> tuple[Evaluation, float]:
    """Evaluate a batch; say which one it was when the model or the loss refuses it."""
    try:
        evaluation = evaluator.evaluate(batch, leaves)
        return evaluation, evaluator.num_terms(evaluation)
    except (RuntimeError, TypeError, IndexError, AttributeError, ValueError) as error:
        if batch_size(batch) == 0:
            raise ValueError(f"`data` must hold at least one example a batch. Batch {index} is empty.") from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"The model and loss do not fit batch {index}, {describe(batch)}: {reason}") from error


def _check_gradient(evaluator: ModelEvaluator, leaves: Mapping[str, Tensor], theta: Tensor) -> None:
    """Compare the first batch's gradient in the leaves with that in the model's own parameters, and with what the loss does.

    They differ if the model reaches parameters by another way than its modules' attributes, which leaves cannot stand in for,
    or if a reentrant checkpoint hides part of the graph from torch.autograd.grad. A second gradient in the same leaves is taken
    too, as for a second batch.
    """
    batch = next(evaluator.prepared())
    with torch.random.fork_rng(devices=[]):  # a layer left random draws the same numbers in both
        total = evaluator.evaluate(batch, leaves).total
    _refuse_reentrant_checkpoints(total)
    _refuse_hooks(leaves)
    unseen = _without_gradient(total, leaves)
    own = evaluator.current()
    found = _plain_gradients(total, leaves)
    with torch.random.fork_rng(devices=[]):
        _plain_gradients(evaluator.evaluate(batch, leaves).total, leaves)  # as of a later batch, the first one's graph gone
    if all(own[name].dtype == leaf.dtype for name, leaf in leaves.items()):  # else its own parameters do not fit the batch
        expected = _plain_gradients(evaluator.evaluate_unchanged(batch).total, {name: own[name] for name in leaves})
        size = max(float(torch.stack([g.norm() for g in expected]).norm()), 1e-30)
        for name, ours, theirs in zip(leaves, found, expected, strict=True):
            if float((ours - theirs).norm()) > tolerance(leaves.values()) * size:
                raise NotSupported(
                    f"The gradient in {name!r} is not the one that a plain backward pass gives: the model uses the parameter by "
                    "another way than as an attribute of its module (a list, a closure, a hook). Register it where it is used."
                )
    refuse_hidden_paths(evaluator, theta, unseen)


def _plain_gradients(total: Tensor, leaves: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the gradients, and free the graph.

    Raises:
        NotSupported: If a part of the graph was freed before: a module kept it from an earlier pass.
    """
    try:
        return gradients_of(total, leaves)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise NotSupported(
            "A module keeps a tensor with the graph of an earlier pass and uses it again, so derivatives over several batches "
            "fail. Compute it in every forward pass, turn the cache off, or take the tensor off before."
        ) from error


def _refuse_hooks(leaves: Mapping[str, Tensor]) -> None:
    """Refuse hooks that a forward pass hangs on parameters; those that hung there before are off while the library works."""
    for name, leaf in leaves.items():
        if leaf._backward_hooks:
            raise NotSupported(
                f"A forward pass registers a gradient hook on {name!r}: it may change the gradient, and every pass adds one. "
                "Register it once, outside forward (it is then left out here: derivatives are those of the loss)."
            )


def _check_micro_batches(evaluator: ModelEvaluator, leaves: Mapping[str, Tensor], first: Inspection) -> None:
    """Splitting batches must not change the loss: it does if examples are coupled, or a tensor does not belong to examples."""
    if evaluator.batches.micro_batch_size is None:
        return
    whole = evaluator.replaced(batches=Batches(evaluator.batches.data))
    other = _one_pass(whole, leaves)
    same_loss = math.isclose(other.total, first.total, rel_tol=tolerance(leaves.values()), abs_tol=1e-30)
    if not same_loss or not math.isclose(other.num_terms, first.num_terms, rel_tol=1e-6):
        raise ValueError(
            "`micro_batch_size` must not change the loss. "
            f"Got {first.total / first.num_terms:.6g} with it and {other.total / other.num_terms:.6g} without: the batches hold "
            "a tensor that does not belong to single examples, or the loss couples examples. Leave micro_batch_size out."
        )


def _refuse_reentrant_checkpoints(total: Tensor) -> None:
    """Look through a graph: torch.autograd.grad gives None for all that a reentrant checkpoint hides."""
    seen, open_nodes = set(), [total.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise NotSupported(
                "The model uses torch.utils.checkpoint with use_reentrant=True, through which torch.autograd.grad silently gives "
                "no derivative. Use use_reentrant=False, which is exact."
            )
        open_nodes.extend(parent for parent, _ in node.next_functions)


def _changed_data(data: Any) -> str:
    if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
        cause = "The DataLoader shuffles. Build it with shuffle=False"
    else:
        cause = "Its batches differ: it shuffles, augments at random, or draws new samples. Stop that"
    return f"The data changed between two passes. {cause}, or pass list(loader) to fix one pass."


def _culprit(evaluator: ModelEvaluator, leaves: Mapping[str, Tensor]) -> str:
    """Name the first module whose output differs between two calls on one batch."""
    batch = next(evaluator.prepared())
    first, second = (_module_outputs(evaluator, batch, leaves) for _ in range(2))
    for (name, before), (_, after) in zip(first, second, strict=False):
        if before != after:
            module = evaluator.model.get_submodule(name)
            return f"The first module to differ is {name or 'the model'!r} ({type(module).__name__})."
    return "No module differs on the first batch: look at the loss, and at code between modules."


def _module_outputs(evaluator: ModelEvaluator, batch: Any, leaves: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    hooks = []
    for name, module in evaluator.model.named_modules():

        def record(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            seen.append((name, digest(tensors_of(output))))

        hooks.append(module.register_forward_hook(record))
    try:
        with torch.no_grad():
            evaluator.evaluate(batch, leaves)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
