r"""The exact diagonal and block traces of a matrix Jᵀ Λ J (Gauss–Newton, Fisher, empirical Fisher), without probes.

With Λ = Σ_c Σ_b σ_cb s_cb s_cbᵀ, each column s_cb within one row b of the outputs, G_pp = (1/T) Σ_c Σ_b σ_cb (g_cb)_p² for the
gradients g_cb = ∂(s_cbᵀ o_b)/∂θ (Ibayashi et al. 2021, Prop. 1, in its general form). Per-layer rules get the squares for all
rows at once from one backward pass of every column; parameters outside a layer with a rule (embeddings, recurrent cells, shared
or functional weights) get the gradients of one example at a time.

Both presume more than the matrix does: that a layer's first axis is that of the outputs, that no row depends on another, that a
weight has no second use. None of it is assumed. The random mixture Σ_cb r_cb g_cb of the very gradients that are squared is
compared with the plain gradient of Σ_c r_c ∘ s_c through the whole batch, on every batch; the two are equal for a random r only
if each g_cb is what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn

from flatminima._errors import NotSupported, first_line
from flatminima.estimators.layer_squares import LayerRule, rule_for
from flatminima.objective import Evaluation
from flatminima.objective.batches import batch_size, rows
from flatminima.objective.dependence import tolerance
from flatminima.operators.middle_factor import Columns, MiddleFactor, by_row
from flatminima.operators.output_hessian import check_outputs
from flatminima.operators.sandwich import Sandwich
from flatminima.params import clean_name

__all__ = ["gauss_newton_squares"]

#: More columns per example than this, and random probes are the better method.
MAX_COLUMNS = 1024
#: Most bytes of the graph of what goes through at a time, whose squares and products take several times as many.
_GRAPH_BYTES = 2**22
#: Most numbers in the columns that are held at a time.
_MOST_HELD = 2**24


def gauss_newton_squares(G: Sandwich, *, diagonal: bool) -> tuple[dict[str, Tensor], int]:
    """Return the exact diagonal, or the exact trace, of every parameter's block of G.

    Args:
        G: The Gauss–Newton matrix, or another with a middle factor that acts on outputs.
        diagonal: Whether to return entries in the parameter's shape, or their sum ``()``.

    Returns:
        Tensors by parameter name, and the number of gradients that they cost.

    Raises:
        NotSupported: If an example needs more than MAX_COLUMNS columns; if the loss couples examples (a contrastive one) or has
            no second derivative; if the model couples them (train-mode BatchNorm) in parameters outside a layer with a rule.
    """
    computation = _Computation(G, diagonal)
    piece_size = G.engine.fitting_piece_size(_GRAPH_BYTES)
    objective = G.objective if piece_size is None else G.objective.in_pieces(piece_size)
    with computation.hooked():
        flat = objective.integrate(computation.batch, G.theta)
    sizes = {name: shape if diagonal else torch.Size() for name, shape in G.space.shapes.items()}
    parts = flat.split([size.numel() for size in sizes.values()])
    squares = {name: part.reshape(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
    if G.l2:
        for name, shape in G.space.shapes.items():
            squares[name] = squares[name] + G.l2 * (1 if diagonal else shape.numel())
    return squares, computation.num_columns + 1


@final
class _Computation:
    """One run over the data: layers are watched by hooks, columns are sent back through them."""

    def __init__(self, G: Sandwich, diagonal: bool) -> None:
        self.space, self.diagonal, self.dtype = G.space, diagonal, G.dtype
        self.evaluator, self.middle_factors = G.evaluator, G.middle_factors()
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
        with _named_refusals():
            middle = self.middle_factors(evaluation, outputs.detach())
            self.num_columns = max(self.num_columns, middle.num_columns)
            if middle.num_columns > MAX_COLUMNS:
                raise NotSupported(f"An exact diagonal needs {middle.num_columns} backward passes here, more than {MAX_COLUMNS}.")
            if not outputs.requires_grad or middle.num_columns == 0:
                return torch.zeros(self._flat_size(), dtype=self.dtype, device=outputs.device)
            columns = _checked_columns(middle, outputs.detach())
        own = {name: leaves[name] for name in self.space.names}
        squares = self._by_rules(columns, outputs, own, calls)
        others = {name: leaf for name, leaf in own.items() if name not in squares}
        if others:
            squares |= self._per_example(evaluation, columns, outputs, leaves, others)
        return torch.cat([squares[name].reshape(-1).to(self.dtype) for name in self.space.names])

    def _by_rules(
        self,
        columns: Columns,
        outputs: Tensor,
        leaves: Mapping[str, Tensor],
        calls: Mapping[str, list[tuple[Tensor, Tensor]]],
    ) -> dict[str, Tensor]:
        """Send every column back through the layers once; return the squares of those whose gradients prove to be right.

        Parameters that the outputs do not depend on are among them, with zeros.
        """
        usable = {name: calls[name][0] for name in self.rules if self._is_usable(name, outputs, calls.get(name, ()))}
        targets = [output for _, output in usable.values()]
        sums = [self.rules[name].squares(x.to(self.dtype), diagonal=self.diagonal) for name, (x, _) in usable.items()]
        mixture, mixed = _Mixture(outputs), [torch.zeros_like(target, dtype=self.dtype) for target in targets]
        for column, signs in columns():
            weights = mixture.add(column)
            if targets:
                deltas = torch.autograd.grad(outputs, targets, column, retain_graph=True, materialize_grads=True)
                for layer, total, delta in zip(sums, mixed, (delta.to(self.dtype) for delta in deltas), strict=True):
                    layer.add(delta, signs.to(self.dtype))
                    total.addcmul_(delta, by_row(weights, delta))
        expected = mixture.gradients(outputs, leaves)
        squares = {name: self._zero(leaf) for name, leaf in leaves.items() if name not in expected}
        for name, layer, total in zip(usable, sums, mixed, strict=True):
            own, found = self._parameters(name), layer.gradient(total)
            if all(full in expected and short in found for short, full in own.items()) and mixture.agrees(
                {full: found[short] for short, full in own.items()}, expected
            ):
                result = layer.result()
                squares |= {full: result[short] for short, full in own.items()}
        return squares

    def _is_usable(self, name: str, outputs: Tensor, calls: Any) -> bool:
        if len(calls) != 1:  # the gradients of more calls add up before they are squared
            return False
        ((x, output),) = calls
        return bool(output.requires_grad and self.rules[name].fits(x) and len(x) == len(output) == len(outputs))

    def _per_example(
        self,
        evaluation: Evaluation,
        columns: Columns,
        outputs: Tensor,
        leaves: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the squares of parameters without a rule, from gradients of one example's outputs at a time.

        The columns are those of the whole batch, since a loss may weigh an example by what else is in the batch.
        """
        if batch_size(evaluation.batch) != len(outputs):
            raise _coupled()
        parameters = list(wanted.values())
        totals, mixed = ([torch.zeros_like(leaf, dtype=self.dtype) for leaf in parameters] for _ in range(2))
        mixture, rest, at_once = _Mixture(outputs), columns(), max(1, _MOST_HELD // outputs.numel())
        while held := [(column, signs, mixture.add(column)) for column, signs in islice(rest, at_once)]:
            for index in range(len(outputs)):
                alone = self._alone(evaluation, leaves, outputs, index)
                for column, signs, weights in held:
                    gradients = torch.autograd.grad(
                        alone, parameters, column[index : index + 1], retain_graph=True, materialize_grads=True
                    )
                    for total, mix, gradient in zip(totals, mixed, gradients, strict=True):
                        total += signs[index] * gradient.to(self.dtype).square()
                        mix += weights[index] * gradient
        if not mixture.agrees(dict(zip(wanted, mixed, strict=True)), mixture.gradients(outputs, wanted)):
            raise _coupled()
        return {name: total if self.diagonal else total.sum() for name, total in zip(wanted, totals, strict=True)}

    def _alone(self, evaluation: Evaluation, leaves: Mapping[str, Tensor], outputs: Tensor, index: int) -> Tensor:
        """Return the outputs ``(1, …)`` of one example by itself, which must be those that it has in the batch.

        Values alone prove nothing (a coupling may be at 0 here); they spare the work where the coupling is plain.
        """
        try:
            alone = self.evaluator.evaluate(rows(evaluation.batch, index, index + 1), leaves).outputs
        except (RuntimeError, ValueError, IndexError) as error:  # batch statistics of a single example do not exist
            raise _coupled() from error
        finally:
            self.calls = {}
        whole = outputs.detach()[index : index + 1]
        if alone is None or alone.shape != whole.shape or not alone.requires_grad:
            raise _coupled()
        eps = max(torch.finfo(leaf.dtype).eps for leaf in leaves.values())
        if (alone.detach() - whole).abs().max() > max(1e-3, 10 * eps) * outputs.detach().abs().max():
            raise _coupled()
        return alone

    def _parameters(self, name: str, module: nn.Module | None = None) -> dict[str, str]:
        """Return the selected parameters that a module owns: short name -> full name."""
        module = module or self.evaluator.model.get_submodule(name)
        prefix = f"{name}." if name else ""
        full = {short: clean_name(prefix + short) for short, p in module.named_parameters(recurse=False) if p is not None}
        return {short: long for short, long in full.items() if long in self.space.shapes}

    def _zero(self, leaf: Tensor) -> Tensor:
        return torch.zeros_like(leaf) if self.diagonal else leaf.new_zeros(())

    def _flat_size(self) -> int:
        return self.space.size if self.diagonal else len(self.space.names)


@final
class _Mixture:
    """The column Σ_c r_c ∘ s_c with independent random weights r_cb, and its gradients by plain backpropagation."""

    def __init__(self, outputs: Tensor) -> None:
        self.column = torch.zeros_like(outputs, requires_grad=False)
        self._generator = torch.Generator(outputs.device).manual_seed(0)

    def add(self, column: Tensor) -> Tensor:
        """Add a column, and return its weights ``(batch,)``."""
        weights = torch.empty(len(column), dtype=column.dtype, device=column.device).normal_(generator=self._generator)
        self.column.addcmul_(column, by_row(weights, column))
        return weights

    def gradients(self, outputs: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the column's gradients through the whole batch, of the leaves that the outputs depend on."""
        gradients = torch.autograd.grad(outputs, list(leaves.values()), self.column, retain_graph=True, allow_unused=True)
        return {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}

    def agrees(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
        """Tell whether gradients are the expected ones, up to rounding beside their own norm and that of all together."""
        rtol = tolerance((self.column, *expected.values()))
        floor = rtol * sum(_norm(gradient) ** 2 for gradient in expected.values()) ** 0.5
        for name, gradient in found.items():
            reference = expected[name].reshape(-1)
            if gradient.numel() != reference.numel():
                return False
            if not _norm(gradient.reshape(-1) - reference) <= rtol * _norm(reference) + floor:  # not so for nan
                return False
        return True


@contextmanager
def _named_refusals() -> Iterator[None]:
    """Say what a loss lacks whose middle factor cannot be formed, or not column by column."""
    try:
        yield
    except ValueError as error:
        raise NotSupported(str(error)) from error
    except RuntimeError as error:  # torch has no second derivative, or one that is not finite, so that eigh fails
        if "not implemented" not in str(error) and "eigh" not in str(error):
            raise
        raise NotSupported(f"The loss has no curvature in the outputs here: {first_line(error)}") from error


def _checked_columns(middle: MiddleFactor, outputs: Tensor) -> Columns:
    """Return what gives the columns of Λ and their signs, any number of times."""
    if middle.has_exact_columns:
        return middle.columns
    held = list(middle.columns())  # eigenvectors, which are formed all at a time anyway
    _check_columns(held, middle.product, outputs)
    return lambda: iter(held)


def _check_columns(columns: Sequence[tuple[Tensor, Tensor]], product: Callable[[Tensor], Tensor], outputs: Tensor) -> None:
    """Refuse a loss that couples examples: Σ_cb σ_cb s_cb s_cbᵀ must be the operator's Λ on a random vector.

    The vector has a part in common to all rows, in which couplings through a mean add up.
    """
    generator = torch.Generator(outputs.device).manual_seed(0)
    common, own = (torch.empty_like(part).normal_(generator=generator) for part in (outputs[:1], outputs))
    u = common + own
    found = torch.zeros_like(u)
    for column, signs in columns:
        found += column * by_row(signs * (column * u).reshape(len(u), -1).sum(1), column)
    expected = product(u)
    rounding = _norm(product(3 * u) / 3 - expected)  # large beside the curvature of a loss near 0
    if not _norm(found - expected) <= min(1e4 * torch.finfo(u.dtype).eps, 0.1) * _norm(expected) + 1e2 * rounding:
        raise NotSupported("The loss couples examples: its Hessian in the outputs has no factor within one example.")


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)))


def _coupled() -> NotSupported:
    return NotSupported("The examples of a batch are coupled (batch statistics, a sequence?): no closed form per example.")
