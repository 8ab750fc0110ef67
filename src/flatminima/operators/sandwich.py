r"""Sandwich: a matrix Jᵀ Λ J, with J the Jacobian of the model's outputs and Λ anything that acts on outputs.

The Gauss–Newton matrix, the Fisher information and the empirical Fisher differ in the middle factor alone. Λ is never formed:
it is a map from outputs to outputs, and, where the exact diagonal is wanted, a sum of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, final

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective import Evaluation, Objective, Piece
from flatminima.objective.evaluators import ModelEvaluator
from flatminima.operators.base import DEFAULT_GRAPH_BYTES, LinearOperator, named_missing_derivative
from flatminima.operators.curvature import Curvature
from flatminima.operators.engine import Engine
from flatminima.operators.forward_mode import along, for_all
from flatminima.operators.graphs import PieceProducts, Route
from flatminima.operators.middle_factor import MiddleFactor, MiddleFactors
from flatminima.operators.output_hessian import check_outputs
from flatminima.operators.pushforward import Linearisation
from flatminima.params import ParameterSpace

__all__ = ["Sandwich"]


class Sandwich(Curvature, ABC):
    r"""A matrix :math:`\frac1T \sum_b J_b^\top \Lambda_b J_b`, plus λ I for an objective with an l2 term of weight λ.

    A product costs a forward pass and a backward one that all columns share, and two backward ones per column: J v is the
    derivative of Jᵀu in u. Where torch has no second derivative of an operation, J v is taken in forward mode.
    """

    #: What the matrix is called, in messages and in the methods of estimates.
    label: ClassVar[str]

    def __init__(self, objective: Objective) -> None:
        what = f"The {self.label} matrix"
        evaluator = objective.model_evaluator(what)
        if evaluator.takes_model:
            raise NotSupported(
                f"{what} must know the model's outputs. Got a loss that calls the model itself. "
                "Give it as loss(outputs, targets)."
            )
        super().__init__(objective)
        self.evaluator: ModelEvaluator = evaluator
        self.l2 = objective.l2
        self.engine = self._make_engine()

    @property
    def splits(self) -> bool:
        """Whether Λ of a batch is that of its parts, side by side, whatever the parts are."""
        return True

    @abstractmethod
    def middle_factors(self) -> MiddleFactors:
        """Return what makes Λ of each batch, for one pass over the data; outputs are given detached."""

    def keeping_graphs(self, max_bytes: int = DEFAULT_GRAPH_BYTES) -> AbstractContextManager[None]:
        return self.engine.keeping(max_bytes)

    def _matmat(self, V: Tensor) -> Tensor:
        with named_missing_derivative():
            result = self.engine(V)
        return result + self.l2 * V if self.l2 else result

    def _restricted(self, names: Sequence[str]) -> LinearOperator:
        block = self._in(names)
        block.engine = block._make_engine()
        return block

    def _make_engine(self) -> Engine:
        return Engine(self.objective, self.theta, self._routes, type(self).__name__, splits=self.splits)

    def _routes(self) -> Mapping[str, Route]:
        middle_factor = self.middle_factors()

        def reverse(piece: Piece) -> PieceProducts:
            evaluation = piece.evaluate()
            outputs = check_outputs(self.objective.loss, evaluation.outputs)
            middle = middle_factor(evaluation, outputs.detach()) if outputs.requires_grad else None
            if middle is None or middle.num_columns == 0:
                return _Nothing()
            J = Linearisation(self.evaluator, evaluation, outputs, piece.leaves, self.space, self.objective.architecture)
            return _ByColumn(J, middle, self.space, self.dtype)

        def forward(piece: Piece) -> PieceProducts:
            return _ForwardMode(piece, middle_factor, self.space, self.dtype)

        return {"double backward": reverse, "forward mode": forward}


@final
class _Nothing(PieceProducts):
    """Outputs that do not depend on the parameters, or that no curvature is in."""

    def products(self, V: Tensor) -> Tensor:
        return torch.zeros_like(V)


@final
class _ByColumn(PieceProducts):
    """Jᵀ (Λ (J v)), column by column through one graph of the outputs and one of Jᵀu."""

    def __init__(self, J: Linearisation, middle: MiddleFactor, space: ParameterSpace, dtype: torch.dtype) -> None:
        self.J, self.middle, self.space, self.dtype = J, middle, space, dtype

    @property
    def roots(self) -> Sequence[Tensor]:
        return self.J.roots

    def products(self, V: Tensor) -> Tensor:
        curved = (self.middle.product(self.J.push(v)) for v in V.T.contiguous())
        return torch.stack([self.space.flatten(self.J.pull(u), self.dtype) for u in curved], dim=1)


@final
class _ForwardMode(PieceProducts):
    """J v by dual numbers in the pass that makes the graph for Jᵀu; several columns at once."""

    def __init__(
        self, piece: Piece, middle_factor: Callable[[Evaluation, Tensor], MiddleFactor], space: ParameterSpace, dtype: torch.dtype
    ) -> None:
        self.piece, self.middle_factor, self.space, self.dtype = piece, middle_factor, space, dtype

    def products(self, V: Tensor) -> Tensor:
        tensors = {name: leaf.detach() for name, leaf in self.piece.leaves.items()}
        point = {name: tensors[name] for name in self.space.names}
        targets: list[Evaluation] = []

        def outputs_of(wanted: Mapping[str, Tensor]) -> Tensor:
            evaluation = self.piece.evaluate({**tensors, **wanted})
            targets.append(evaluation)
            assert evaluation.outputs is not None
            return evaluation.outputs

        outputs, pull = torch.func.vjp(outputs_of, point)[:2]
        middle = self.middle_factor(targets[0], outputs.detach())

        def push(v: Mapping[str, Tensor]) -> Tensor:
            pushed: Tensor = along(outputs_of, point, v)
            return pushed

        columns = self.space.unflatten_columns(V, like=point)
        if V.shape[1] == 1:
            pushed = push({name: part[0] for name, part in columns.items()})
            (result,) = pull(middle.product(pushed))
            return self.space.flatten(list(result.values()), self.dtype).unsqueeze(1)
        pushed = for_all(push, columns)
        curved = torch.stack([middle.product(u) for u in pushed])
        (pulled,) = for_all(pull, curved)
        return self.space.flatten_columns(pulled, self.dtype)
