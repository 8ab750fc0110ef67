r"""The exact diagonal and block traces of the Gauss–Newton matrix, without probes.

With Λ = Σ_c σ_c s_c s_cᵀ per example, G_pp = (1/T) Σ_b Σ_c σ_c (∂(s_cᵀ o_b)/∂θ_p)² (Ibayashi et al. 2021, Prop. 1, in its
general form): one backward pass of every column for all examples at once, and per-layer rules for the squares. Parameters
outside a layer with a rule (embeddings, recurrent cells, shared or functional weights) get per-example gradients instead; which
rule is right for which parameter is *checked* on every batch against a plain backward pass, not assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn

from flatminima._errors import NotSupported
from flatminima.estimators.layer_squares import LayerRule, rule_for
from flatminima.objective import Evaluation
from flatminima.objective.batches import batch_size, masked, rows
from flatminima.operators import GaussNewton
from flatminima.operators.output_hessian import check_outputs, num_columns, output_factor
from flatminima.params import clean_name

__all__ = ["gauss_newton_squares"]

#: More columns per example than this, and random probes are the better method.
MAX_COLUMNS = 1024


def gauss_newton_squares(G: GaussNewton, *, diagonal: bool) -> tuple[dict[str, Tensor], int]:
    """Return the exact diagonal, or the exact trace, of every parameter's block of G.

    Args:
        G: The Gauss–Newton matrix.
        diagonal: Whether to return entries in the parameter's shape, or their sum ``()``.

    Returns:
        Tensors by parameter name, and the number of gradients that they cost.

    Raises:
        NotSupported: If an example needs more than MAX_COLUMNS columns, or examples are coupled (train-mode BatchNorm, a
            contrastive loss), so that no closed form per example exists.
    """
    objective = G.objective
    computation = _Computation(G, diagonal)
    with computation.hooked():
        flat = objective.integrate(computation.batch, G.theta)
    sizes = {name: shape if diagonal else torch.Size() for name, shape in objective.space.shapes.items()}
    parts = flat.split([size.numel() for size in sizes.values()])
    squares = {name: part.reshape(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
    if objective.l2:
        for name, shape in objective.space.shapes.items():
            squares[name] = squares[name] + objective.l2 * (1 if diagonal else shape.numel())
    return squares, computation.num_columns + 1


@final
class _Computation:
    """One run over the data: layers are watched by hooks, columns are sent back through them."""

    def __init__(self, G: GaussNewton, diagonal: bool) -> None:
        self.objective, self.diagonal, self.dtype = G.objective, diagonal, G.dtype
        self.evaluator = G.objective.model_evaluator("The exact diagonal")
        self.num_columns = 0
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.rules: dict[str, LayerRule] = {}
        training = self.evaluator.mode == "train"
        for name, module in self.evaluator.model.named_modules():
            rule = rule_for(module, training=training)
            if rule is not None and self._parameters(name, module):
                self.rules[name] = rule

    def hooked(self) -> ExitStack:
        """Watch the layers that have a rule; the hooks go when the context ends."""
        stack = ExitStack()
        for name in self.rules:

            def watch(_module: nn.Module, args: tuple[Any, ...], output: Tensor, name: str = name) -> Tensor:
                if args and isinstance(args[0], Tensor):
                    self.calls.setdefault(name, []).append((args[0].detach(), output))
                return output.clone()  # an activation in place must not overwrite what is differentiated in

            handle = self.evaluator.model.get_submodule(name).register_forward_hook(watch)
            stack.callback(handle.remove)
        return stack

    def batch(self, evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return one batch's squares as one flat vector over all parameters."""
        calls, self.calls = self.calls, {}
        outputs = check_outputs(self.evaluator.loss, evaluation.outputs)
        if not outputs.requires_grad:
            return torch.zeros(self._flat_size(), dtype=self.dtype, device=outputs.device)
        self.num_columns = num_columns(self.evaluator.loss, outputs)
        if self.num_columns > MAX_COLUMNS:
            raise NotSupported(f"An exact diagonal needs {self.num_columns} backward passes here, more than {MAX_COLUMNS}.")
        self._columns(evaluation, outputs)  # refuses a loss that couples examples
        self._check_independence(evaluation, outputs, leaves)
        squares = self._by_rules(evaluation, outputs, calls, self._right_rules(outputs, calls, leaves))
        others = {name: leaf for name, leaf in leaves.items() if name not in squares}
        if others:
            squares |= self._per_example(evaluation, leaves, others)
        return torch.cat([squares[name].reshape(-1).to(self.dtype) for name in self.objective.space.names])

    def _by_rules(
        self,
        evaluation: Evaluation,
        outputs: Tensor,
        calls: Mapping[str, list[tuple[Tensor, Tensor]]],
        layers: Sequence[str],
    ) -> dict[str, Tensor]:
        """Send every column back through the layers once, and let each layer add up its squares."""
        if not layers or self.num_columns == 0:
            return {}
        targets = [calls[name][0][1] for name in layers]
        sums = [self.rules[name].squares(calls[name][0][0], diagonal=self.diagonal) for name in layers]
        for column, signs in self._columns(evaluation, outputs):
            deltas = torch.autograd.grad(outputs, targets, column, retain_graph=True, materialize_grads=True)
            for layer, delta in zip(sums, deltas, strict=True):
                layer.add(delta, signs)
        squares: dict[str, Tensor] = {}
        for name, layer in zip(layers, sums, strict=True):
            result = layer.result()
            squares |= {full: result[short] for short, full in self._parameters(name).items()}
        return squares

    def _columns(self, evaluation: Evaluation, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            return output_factor(self.evaluator, evaluation, outputs.detach())
        except ValueError as error:
            raise NotSupported(str(error)) from error

    def _right_rules(
        self, outputs: Tensor, calls: Mapping[str, list[tuple[Tensor, Tensor]]], leaves: Mapping[str, Tensor]
    ) -> list[str]:
        """Return the layers whose rule agrees with a plain backward pass of a random column, on this batch."""
        column = torch.empty_like(outputs).normal_(generator=torch.Generator(outputs.device).manual_seed(0))
        watched = {name: calls[name][0] for name in self.rules if len(calls.get(name, ())) == 1}  # more calls add up
        watched = {name: call for name, call in watched.items() if call[1].requires_grad and len(call[1]) == len(outputs)}
        if not watched:
            return []
        own = {name: self._parameters(name) for name in watched}
        parameters = [leaves[full] for name in watched for full in own[name].values()]
        targets = [output for _, output in watched.values()]
        derivatives = torch.autograd.grad(outputs, [*targets, *parameters], column, retain_graph=True, materialize_grads=True)
        expected = iter(derivatives[len(targets) :])
        tolerance = 1e4 * torch.finfo(outputs.dtype).eps
        right = []
        for (name, (x, _)), delta in zip(watched.items(), derivatives, strict=False):
            found = self.rules[name].gradients(x, delta) if len(x) == len(delta) else {}
            agrees = True
            for short in own[name]:
                reference = next(expected)
                got = found[short].sum(0).reshape(reference.shape) if short in found else None
                agrees &= got is not None and bool((got - reference).norm() <= tolerance * (reference.norm() + delta.norm()))
            if agrees:
                right.append(name)
        return right

    def _check_independence(self, evaluation: Evaluation, outputs: Tensor, leaves: Mapping[str, Tensor]) -> None:
        """Each half of a batch, split at random, must give the outputs that it has in the whole: no row depends on another."""
        coupled = NotSupported("The examples of a batch are coupled (batch statistics, a sequence?): no closed form per example.")
        size = batch_size(evaluation.batch)
        if size != len(outputs) or (size < 2 and self.evaluator.mode == "train"):
            raise coupled
        if size < 2:
            return
        first = torch.rand(size, generator=torch.Generator().manual_seed(0)).argsort() < size // 2
        for half in (first, ~first):
            try:
                with torch.no_grad():
                    alone = self.evaluator.evaluate(masked(evaluation.batch, half), leaves).outputs
            except (RuntimeError, ValueError, IndexError) as error:  # batch statistics of a single example do not exist
                raise coupled from error
            finally:
                self.calls = {}
            whole = outputs.detach()[half.to(outputs.device)]
            if alone is None or alone.shape != whole.shape or (alone - whole).abs().max() > 1e-3 * whole.abs().max():
                raise coupled

    def _per_example(
        self, evaluation: Evaluation, leaves: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the squares of parameters without a rule, from gradients of one example at a time."""
        totals = {name: torch.zeros_like(leaf) for name, leaf in wanted.items()}
        for index in range(batch_size(evaluation.batch)):
            alone = self.evaluator.evaluate(rows(evaluation.batch, index, index + 1), leaves)
            self.calls = {}
            assert alone.outputs is not None
            for column, sign in self._columns(alone, alone.outputs):
                gradients = torch.autograd.grad(
                    alone.outputs, list(wanted.values()), column, retain_graph=True, materialize_grads=True
                )
                for name, gradient in zip(wanted, gradients, strict=True):
                    totals[name] += sign * gradient.square()
        return totals if self.diagonal else {name: total.sum() for name, total in totals.items()}

    def _parameters(self, name: str, module: nn.Module | None = None) -> dict[str, str]:
        """Return the selected parameters that a module owns: short name -> full name."""
        module = module or self.evaluator.model.get_submodule(name)
        prefix = f"{name}." if name else ""
        full = {short: clean_name(prefix + short) for short, p in module.named_parameters(recurse=False) if p is not None}
        return {short: long for short, long in full.items() if long in self.objective.space.shapes}

    def _flat_size(self) -> int:
        return self.objective.space.size if self.diagonal else len(self.objective.space.names)
