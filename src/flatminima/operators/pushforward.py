"""Linearisation: the Jacobian J of one batch's outputs, by its products J v and Jᵀ u."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from flatminima._errors import NotSupported
from flatminima.objective import Evaluation
from flatminima.objective.evaluators import ModelEvaluator
from flatminima.operators.base import is_missing_derivative
from flatminima.operators.forward_mode import along
from flatminima.params import ParameterSpace

__all__ = ["Linearisation"]

_DOUBLE, _FORWARD = "double backward", "forward mode"


@final
class Linearisation:
    r"""J at one point, by two routes.

    *Double backward*: Jᵀu is linear in u, so its derivative in u, applied to v, is J v. It needs the graph of one backward pass,
    which all vectors share. *Forward mode*: dual numbers go through the model once for every vector. The first is the base, and
    it is not trusted: at the first product uᵀ(J v) is compared with (Jᵀu)ᵀv for random u and v, and forward mode takes over
    where they differ or torch lacks the derivative. (A function that is marked as differentiable once gives zeros.)

    Args:
        evaluator: The model.
        evaluation: The batch.
        outputs: Its outputs, with their graph.
        leaves: All leaves.
        space: Those to differentiate in.
        known: What is known of the architecture; the route is added.
    """

    def __init__(
        self,
        evaluator: ModelEvaluator,
        evaluation: Evaluation,
        outputs: Tensor,
        leaves: Mapping[str, Tensor],
        space: ParameterSpace,
        known: dict[str, Any],
    ) -> None:
        self._evaluator, self._evaluation, self.outputs = evaluator, evaluation, outputs
        self._leaves, self._space = leaves, space
        self._parameters = [leaves[name] for name in space.names]
        self._known: dict[tuple[str, ...], str] = known.setdefault("routes to J v", {})
        self._dual: Tensor | None = None
        self._pulled: Sequence[Tensor] = ()

    @property
    def roots(self) -> Sequence[Tensor]:
        """The tensors whose graphs are held."""
        return [self.outputs, *self._pulled]

    def pull(self, u: Tensor) -> Sequence[Tensor]:
        """Return Jᵀ u, in the parameters' shapes."""
        return torch.autograd.grad(self.outputs, self._parameters, u, retain_graph=True, materialize_grads=True)

    def push(self, v: Tensor) -> Tensor:
        """Return J v, in the outputs' shape, for v ``(n,)``.

        Raises:
            NotSupported: If neither route gives J.
        """
        key = self._space.names
        if key not in self._known:
            self._known[key] = self._route(v)
        return self._by(self._known[key], v)

    def _by(self, route: str, v: Tensor) -> Tensor:
        return self._by_double_backward(v) if route == _DOUBLE else self._by_forward_mode(v)

    def _route(self, like: Tensor) -> str:
        reasons = []
        for route in (_DOUBLE, _FORWARD):
            try:
                reason = self._difference(route, like)
            except RuntimeError as error:
                if not is_missing_derivative(error):
                    raise
                reason = str(error).splitlines()[0]
            if not reason:
                return route
            reasons.append(f"{route}: {reason}")
        raise NotSupported(
            "torch has no second derivative for an operation of this model, and no derivative of it in forward mode "
            f"({'; '.join(reasons)})."
        )

    def _difference(self, route: str, like: Tensor) -> str:
        """Compare uᵀ(J v) with (Jᵀu)ᵀv, and return both where they differ by more than rounding."""
        generator = torch.Generator(self.outputs.device).manual_seed(0)
        u, v = (torch.empty_like(t.detach()).normal_(generator=generator) for t in (self.outputs, like))
        pushed, pulled = self._by(route, v).double(), self._space.flatten(self.pull(u), torch.float64)
        left, right = float((u.double() * pushed).sum()), float(pulled @ v.double())
        size = float(u.double().norm() * pushed.norm()) / u.numel() ** 0.5 + float(pulled.norm())  # v has entries of size 1
        if not abs(left - right) > 1e3 * self._eps() * size:  # an overflow is told elsewhere
            return ""
        return f"uᵀ(J v) = {left:.6g}, (Jᵀu)ᵀv = {right:.6g}"

    def _eps(self) -> float:
        # Language models normalise in float32 whatever their type; a wrong derivative is wrong by far more than either rounding.
        return max(torch.finfo(d).eps for d in (torch.float32, self.outputs.dtype, *(p.dtype for p in self._parameters)))

    def _by_double_backward(self, v: Tensor) -> Tensor:
        if self._dual is None:
            self._dual = torch.zeros_like(self.outputs, requires_grad=True)
            self._pulled = torch.autograd.grad(
                self.outputs, self._parameters, self._dual, create_graph=True, materialize_grads=True
            )
        parts = self._space.unflatten(v).values()
        live = [(g, part.to(g.dtype)) for g, part in zip(self._pulled, parts, strict=True) if g.requires_grad]
        if not live:  # outputs that depend on none of these parameters
            return torch.zeros_like(self.outputs, requires_grad=False)
        (pushed,) = torch.autograd.grad(
            [g for g, _ in live], self._dual, [part for _, part in live], retain_graph=True, materialize_grads=True
        )
        return pushed

    def _by_forward_mode(self, v: Tensor) -> Tensor:
        tensors = {name: leaf.detach() for name, leaf in self._leaves.items()}
        point = {name: tensors[name] for name in self._space.names}
        direction = {name: part.to(point[name].dtype) for name, part in self._space.unflatten(v).items()}

        def outputs(own: Mapping[str, Tensor]) -> Tensor:
            result = self._evaluator.evaluate(self._evaluation.batch, {**tensors, **own}).outputs
            assert result is not None
            return result

        pushed = along(outputs, point, direction)
        assert isinstance(pushed, Tensor)
        return pushed.detach()
