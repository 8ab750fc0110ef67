"""Hessian: the second derivative of the objective, by products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective import Evaluation, Objective, Piece, gradients_of
from flatminima.operators.base import DEFAULT_GRAPH_BYTES, LinearOperator, named_missing_derivative
from flatminima.operators.curvature import Curvature
from flatminima.operators.engine import Engine
from flatminima.operators.forward_mode import along, for_all
from flatminima.operators.graphs import PieceProducts, Route
from flatminima.params import ParameterSpace

__all__ = ["Hessian"]


@final
class Hessian(Curvature):
    r"""H = ∇²L(θ), shape ``(n, n)``, of exactly the scalar that the objective states, its l2 term included.

    .. math:: H v = \nabla_\theta \big( \nabla_\theta L(\theta)^\top v \big)

    Two nested reverse passes (Pearlmutter 1994). One forward pass and one gradient graph serve all the columns of a block
    ``(n, k)``: about 1 + 2k gradients. Symmetric, in general not positive semi-definite. A parameter that the loss does not
    use, or uses linearly, has a zero row. At the kink of a piecewise-linear network the product is that of torch's chosen
    branch (relu'(0) = 0).

    Args:
        objective: The loss. The point θ is read now, so that later training does not move the operator; data and buffers are
            read at every product.

    Raises:
        NotSupported: At the first product, if torch has no second derivative for an operation, or one that is not symmetric.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self.engine = self._make_engine()

    def keeping_graphs(self, max_bytes: int = DEFAULT_GRAPH_BYTES) -> AbstractContextManager[None]:
        return self.engine.keeping(max_bytes)

    def _make_engine(self) -> Engine:
        routes: dict[str, Route] = {"double backward": self._reverse}
        if self.objective.has_model:
            routes["forward over reverse"] = self._forward
        return Engine(self.objective, self.theta, lambda: routes, "Hessian")

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        block = self._in(names)
        block.engine = block._make_engine()
        return block

    def _matmat(self, V: Tensor) -> Tensor:
        with named_missing_derivative():
            result = self.engine(V)
        known = self.objective.architecture
        if known["asymmetry"]:
            self._check_elsewhere(known)
        return result + self.objective.l2 * V if self.objective.l2 else result

    def _reverse(self, piece: Piece) -> PieceProducts:
        made = self._gradient_graph(piece.evaluate(), piece.leaves)
        known = self.objective.architecture
        if "asymmetry" not in known:
            known["asymmetry"] = self._asymmetry(made)
        return made

    def _gradient_graph(self, evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> _DoubleBackward:
        wanted = {name: leaves[name] for name in self.space.names}
        return _DoubleBackward(gradients_of(evaluation.total, wanted, create_graph=True), wanted, self.space, self.dtype)

    def _forward(self, piece: Piece) -> PieceProducts:
        return _ForwardOverReverse(piece, self.space, self.dtype)

    def _asymmetry(self, made: _DoubleBackward) -> str:
        """Compare uᵀHv with vᵀHu, and return both where they differ by more than plain rounding.

        torch's second derivative of some fused operations is wrong, and then it is not symmetric either.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        u, v = torch.empty(2, self.size, dtype=self.dtype, device=self.device).normal_(generator=generator)
        Hu, Hv = (made.product(w) for w in (u, v))
        # At least float32's: language models normalise in that whatever their type.
        epsilon = max(torch.finfo(d).eps for d in (torch.float32, *(leaf.dtype for leaf in made.leaves.values())))
        difference, size = (u @ Hv - v @ Hu).abs(), Hu.norm() * v.norm() + Hv.norm() * u.norm()
        if not difference > 1e3 * epsilon * size / self.size**0.5:  # an overflow is told elsewhere
            return ""
        return f"uᵀHv = {float(u @ Hv):.6g}, vᵀHu = {float(v @ Hu):.6g}"

    def _check_elsewhere(self, known: dict[str, Any]) -> None:
        """Look at the symmetry again at θ/4 and θ/16, where the loss is not saturated.

        Near a loss of 0 the curvature is what is left when numbers of order 1 cancel, and its rounding is large beside it. A
        wrong formula is wrong everywhere.
        """
        here, found = known["asymmetry"], [""]

        def first_batch(evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> Tensor:
            if not found:
                found.append(self._asymmetry(self._gradient_graph(evaluation, leaves)))
            return evaluation.total.detach()

        for share in (1 / 4, 1 / 16):
            found.clear()
            self.objective.integrate(first_batch, share * self.theta)
            if not found[0]:
                known["asymmetry"] = ""
                return
        raise NotSupported(
            f"torch's second derivative of this model is wrong: the Hessian is not symmetric ({here}). Known causes: weight_norm "
            "with a dim other than None, as by default (fold it in with remove_parametrizations or remove_weight_norm), and "
            "custom autograd functions."
        )


@final
class _DoubleBackward(PieceProducts):
    """H v as the gradient of gᵀv (Pearlmutter 1994), column by column through one graph of g."""

    def __init__(
        self, gradients: Sequence[Tensor], leaves: Mapping[str, Tensor], space: ParameterSpace, dtype: torch.dtype
    ) -> None:
        self.gradients, self.leaves, self.space, self.dtype = gradients, leaves, space, dtype

    @property
    def roots(self) -> Sequence[Tensor]:
        return self.gradients

    def products(self, V: Tensor) -> Tensor:
        return torch.stack([self.product(v) for v in V.T.contiguous()], dim=1)

    def product(self, v: Tensor) -> Tensor:
        # A gradient without a graph is constant in θ: its rows of H are zero.
        parts = self.space.unflatten(v)
        live = [(g, parts[name].to(g.dtype)) for g, name in zip(self.gradients, self.leaves, strict=True) if g.requires_grad]
        if not live:
            return torch.zeros_like(v)
        columns = torch.autograd.grad(
            [g for g, _ in live],
            list(self.leaves.values()),
            [part for _, part in live],
            retain_graph=True,
            materialize_grads=True,
        )
        return self.space.flatten(columns, self.dtype)


@final
class _ForwardOverReverse(PieceProducts):
    """H v as the derivative of g along v, in forward mode, for all columns at once."""

    def __init__(self, piece: Piece, space: ParameterSpace, dtype: torch.dtype) -> None:
        self.piece, self.space, self.dtype = piece, space, dtype

    def products(self, V: Tensor) -> Tensor:
        tensors = {name: leaf.detach() for name, leaf in self.piece.leaves.items()}
        point = {name: tensors[name] for name in self.space.names}

        def total(wanted: Mapping[str, Tensor]) -> Tensor:
            return self.piece.evaluate({**tensors, **wanted}).total

        def product(v: Mapping[str, Tensor]) -> Any:
            return along(torch.func.grad(total), point, v)

        columns = self.space.unflatten_columns(V, like=tensors)
        result = for_all(product, columns)
        return self.space.flatten_columns(result, self.dtype)
