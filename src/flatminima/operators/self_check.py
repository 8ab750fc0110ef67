"""verify: every product at an objective, made by a second way that shares as little with the first as can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flatminima._checks import check_generator
from flatminima._errors import FlatminimaError, NotSupported, first_line
from flatminima.objective import Objective
from flatminima.objective.consistency import check_derivative, in_double
from flatminima.objective.evaluators import Evaluation, ModelEvaluator
from flatminima.objective.plain_backward import gradient_by_backward, rounding_of
from flatminima.operators.gauss_newton import GaussNewton
from flatminima.operators.hessian import Hessian
from flatminima.operators.output_hessian import CLOSED_FORMS
from flatminima.operators.verification import AGREES, DIFFERS, NOT_APPLICABLE, REFUSED, Check, Verification

__all__ = ["verify"]

# Of the parameters' size, the best first: the smallest cross no kink, the largest round least.
_STEPS, _SINGLE_STEPS = (1e-4, 1e-5, 1e-3, 1e-6, 1e-7, 1e-8), (1e-2, 1e-1, 1e-3)
# Language models normalise in float32 whatever their type, and a wrong derivative is wrong by far more.
_TOLERANCE, _SINGLE_TOLERANCE, _SYMMETRIC = 1e-3, 2e-2, 1e-5
_NEARBY = 1e-2  # of the parameters' size: kinks are met there with probability 0
_FEW, _COLUMNS = 4, 8

_GRADIENT = (
    "Something cuts or changes gradients: .detach(), torch.no_grad(), a straight-through estimator, a custom autograd function, "
    "the row of an embedding's padding_idx (which is held fixed). "
    "Curvature is then that of the function which autograd sees, not of the loss."
)
_BACKWARD = (
    "torch.autograd.grad gives another gradient than loss.backward(): a reentrant checkpoint, a parameter that is used past its "
    "module, a wrapper that works in backward hooks. Use use_reentrant=False, and give the module inside the wrapper."
)
_SECOND = (
    "torch's second derivative of an operation of this model or loss is wrong, or its gradient jumps everywhere. Replace the "
    "operation by plain ones, leave its parameters out with params=, or use operators that need no second derivative."
)
_OUTPUTS = "The Jacobian of the outputs, or the loss's curvature in them, is not what autograd says. " + _SECOND
_AGAIN = "The loss is not deterministic, or a module remembers earlier passes. Put the model in eval mode, and stop augmenting."
_BLOCK = "A product with several columns takes another way through autograd, which is wrong for this model. Use single columns."


def verify(objective: Objective, *, generator: torch.Generator | None = None) -> Verification:
    """Compare every product at an objective with a second way to it, and say whether they agree.

    In float64 where the model can, at a random point a hundredth of the parameters' size away (where no kink is met), along
    random directions u and v:

    - gradient: g·v with differences of the loss;
    - backward: g with what ``loss.backward()`` fills in on a copy of the model;
    - Hessian: H v with [g(θ + hv) − g(θ − hv)] / 2h, h from large to small until one agrees, and uᵀHv with vᵀHu;
    - Gauss-Newton: G v with JᵀΛ [o(θ + hv) − o(θ − hv)] / 2h, o being the outputs and Λ by autograd; uᵀGv with vᵀGu; and
      vᵀGv ≥ 0 for the losses that are convex in the outputs.

    In the objective's own type and at its own point: eight columns at once with eight single products, and one product twice.

    Errors below a thousandth are not seen: the precision of models that compute parts in float32.

    Cost: about 30 gradients and 30 products over the data. Nothing is printed; ``print(verify(objective))`` shows the table.

    Args:
        objective: The loss; nothing of it is changed.
        generator: Source of the directions and of the point close by.

    Returns:
        Verification, true if all checks agree. A check that fails says what to do; it raises nothing.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> objective = Objective(model, torch.nn.functional.cross_entropy, (torch.randn(5, 2), torch.tensor([0, 1, 1, 0, 1])))
        >>> verify(objective, generator=torch.Generator().manual_seed(0)).ok
        True
    """
    if not isinstance(objective, Objective):
        raise TypeError(f"`objective` must be a flatminima.Objective. Got {type(objective).__name__}.")
    check_generator(generator)
    double = in_double(objective)
    theta = double.theta
    device = torch.device("cpu") if generator is None else generator.device
    noise = torch.randn(2 + _COLUMNS, theta.numel(), generator=generator, dtype=torch.float64, device=device).to(theta.device)
    nearby = theta + (_NEARBY * _size(theta) * noise[1]).to(theta)
    near, u, v = double.at(nearby), noise[0].to(theta), noise[2].to(theta)
    V = noise[2:].T.to(objective.dtype).contiguous()
    checks = [
        _derivative(objective, generator),
        _caught("backward", "g and loss.backward()", lambda: _backward(double), DIFFERS),
        *_hessian(near, u, v),
        *_gauss_newton(near, u, v),
        *_blocks(objective, V),
    ]
    return Verification(tuple(checks), objective.space.size, objective.num_examples, double.dtype)


# --- first derivatives --------------------------------------------------------------------------------------------------------


def _derivative(objective: Objective, generator: torch.Generator | None) -> Check:
    found = check_derivative(objective, generator=generator)
    slope, difference = found.nearby, found.nearby.differences[-1]
    tolerance = 1e-4 if found.dtype == torch.float64 else 1e-2
    size = max(abs(slope.derivative), abs(difference), 1e-300)
    verdict = AGREES if found.agrees else DIFFERS
    compared = "g·v and [L(θ+hv) − L(θ−hv)]/2h"
    gap = abs(slope.derivative - difference) / size
    return Check("gradient", compared, slope.derivative, difference, gap, tolerance, verdict, _GRADIENT)


def _backward(objective: Objective) -> Check:
    """Compare the gradient with what a plain ``backward()`` leaves in the parameters of a copy, the worst parameter of all."""
    expected = objective.space.unflatten(objective.gradient())
    found = objective.space.unflatten(gradient_by_backward(objective))
    size = max(math.sqrt(sum(float(g.square().sum()) for g in found.values())), 1e-300)
    worst = max(expected, key=lambda name: float((expected[name] - found[name]).norm()))
    difference = float((expected[worst] - found[worst]).norm()) / size
    tolerance = 1e4 * rounding_of(objective)
    compared = "g and loss.backward()"
    left, right = float(objective.space.flatten(expected).norm()), size
    return _judged(Check("backward", compared, left, right, difference, tolerance, advice=f"In {worst!r}: {_BACKWARD}"))


# --- second derivatives -------------------------------------------------------------------------------------------------------


def _hessian(near: Objective, u: Tensor, v: Tensor) -> Iterator[Check]:
    compared = "Hv and [g(θ+hv) − g(θ−hv)]/2h"
    yield _caught("Hessian", compared, lambda: _against_differences(near, v), REFUSED)
    yield _caught("Hessian is symmetric", "uᵀHv and vᵀHu", lambda: _symmetric(Hessian, near, u, v), REFUSED)


def _against_differences(near: Objective, v: Tensor) -> Check:
    """Compare at the point, and if it does not agree nearer to 0 and on few examples: a wrong formula is wrong everywhere.

    Near a loss of 0 curvature is what is left of numbers that cancel; on many examples every step crosses some kink.
    """
    check = _product_and_differences(near, v)
    if check.ok:
        return check
    tries: list[Callable[[], Objective]] = [lambda: near.at(near.theta / 4)]
    if near.has_model and near.num_examples > _FEW:
        tries += [lambda: near.subset(_FEW), lambda: near.subset(_FEW).at(near.theta / 4)]
    for other in tries:
        try:
            again = _product_and_differences(other(), v)
        except (FlatminimaError, RuntimeError, ValueError):  # few examples need not be a loss
            continue
        if again.ok:
            return again
    return check


def _product_and_differences(objective: Objective, v: Tensor) -> Check:
    Hv, theta = Hessian(objective) @ v, objective.theta
    gradient = objective.gradient()

    def difference(h: float) -> Tensor:
        return (objective.gradient(theta + h * v) - objective.gradient(theta - h * v)) / (2 * h)

    compared = "Hv and [g(θ+hv) − g(θ−hv)]/2h"
    return _first_that_agrees(Check("Hessian", compared, advice=_SECOND), Hv, difference, theta, float(gradient.norm()))


def _symmetric(matrix: type[Hessian | GaussNewton], near: Objective, u: Tensor, v: Tensor) -> Check:
    """Compare at the point, and if that fails nearer to 0, where the loss is not saturated."""
    check = _uv_and_vu(matrix(near), u, v)
    others = (_uv_and_vu(matrix(near.at(share * near.theta)), u, v) for share in (1 / 4, 1 / 16))
    return check if check.ok else next((other for other in others if other.ok), check)


def _uv_and_vu(A: Hessian | GaussNewton, u: Tensor, v: Tensor) -> Check:
    Au, Av = A @ u, A @ v
    left, right = float(u @ Av), float(v @ Au)
    # Of random vectors uᵀAv is of size ‖Av‖; much smaller is chance.
    size = max(abs(left), abs(right), float(Au.norm()), float(Av.norm()), 1e-300)
    name, letter = ("Hessian is symmetric", "H") if isinstance(A, Hessian) else ("Gauss-Newton is symmetric", "G")
    tolerance = max(_SYMMETRIC, 1e3 * torch.finfo(A.dtype).eps)
    return _judged(Check(name, f"uᵀ{letter}v and vᵀ{letter}u", left, right, abs(left - right) / size, tolerance, advice=_SECOND))


# --- through the outputs ------------------------------------------------------------------------------------------------------


def _gauss_newton(near: Objective, u: Tensor, v: Tensor) -> Iterator[Check]:
    compared = "Gv and JᵀΛ[o(θ+hv) − o(θ−hv)]/2h"
    check = _caught("Gauss-Newton", compared, lambda: _against_outputs(near, v), NOT_APPLICABLE)
    yield check
    if check.verdict == NOT_APPLICABLE:
        return
    yield _symmetric(GaussNewton, near, u, v)
    if near.loss.name in CLOSED_FORMS:
        Gv = GaussNewton(near) @ v
        value, size = float(v @ Gv), max(float(v.norm() * Gv.norm()), 1e-300)
        below, tolerance = max(0.0, -value) / size, 1e3 * torch.finfo(near.dtype).eps
        yield _judged(Check("Gauss-Newton is psd", "vᵀGv and 0", value, 0.0, below, tolerance, advice=_OUTPUTS))


def _against_outputs(near: Objective, v: Tensor) -> Check:
    theta, check = near.theta, Check("Gauss-Newton", "Gv and JᵀΛ[o(θ+hv) − o(θ−hv)]/2h", advice=_OUTPUTS)
    for objective in (near, near.subset(_FEW)) if near.num_examples > _FEW else (near,):
        Gv = GaussNewton(objective) @ v
        found = _first_that_agrees(check, Gv, lambda h, o=objective: _pulled(o, theta, v, h), theta, float(Gv.norm()))  # type: ignore[misc]
        if found.ok:
            return found
    return found


def _pulled(objective: Objective, theta: Tensor, v: Tensor, h: float) -> Tensor:
    r"""Return Jᵀ Λ w + λ v for the difference w of the outputs along v; no derivative of J is taken."""
    evaluator = objective.model_evaluator("The outputs")
    above, below = (evaluator.leaves(theta + sign * h * v) for sign in (1, -1))

    def one(evaluation: Evaluation, leaves: dict[str, Tensor]) -> Tensor:
        outputs = evaluation.outputs
        assert outputs is not None
        with torch.no_grad():
            pushed = [evaluator.evaluate(evaluation.batch, moved).outputs for moved in (above, below)]
        w = (pushed[0] - pushed[1]) / (2 * h)  # type: ignore[operator]
        if not outputs.requires_grad:
            return torch.zeros_like(theta)
        pulled = torch.autograd.grad(
            outputs, list(leaves.values()), _curvature(evaluator, evaluation, outputs, w), materialize_grads=True
        )
        return objective.space.flatten(pulled, theta.dtype)

    return objective.integrate(one, theta) + objective.l2 * v  # type: ignore[arg-type]


def _curvature(evaluator: ModelEvaluator, evaluation: Evaluation, outputs: Tensor, w: Tensor) -> Tensor:
    """Return Λ w by autograd, of the loss as it is called; nll_loss is softmax cross-entropy on log-probabilities."""
    variable = outputs.detach().requires_grad_()
    total = evaluator.total_of(variable.log_softmax(1) if evaluator.loss.name == "nll" else variable, evaluation)
    (gradient,) = torch.autograd.grad(total, variable, create_graph=True, materialize_grads=True)
    if not gradient.requires_grad:
        return torch.zeros_like(w)
    (result,) = torch.autograd.grad(gradient, variable, w, materialize_grads=True)
    return result


# --- as they are used ---------------------------------------------------------------------------------------------------------


def _blocks(objective: Objective, V: Tensor) -> Iterator[Check]:
    H = Hessian(objective)
    try:
        single = torch.stack([H @ column for column in V.T], dim=1)
        block, again = H @ V, H @ V[:, 0].contiguous()
    except NotSupported as error:
        yield Check("columns at once", "H[v₁ … v₈] and Hv₁ … Hv₈", verdict=REFUSED, advice=first_line(error))
        return
    for name, compared, left, right, advice in (
        ("columns at once", "H[v₁ … v₈] and Hv₁ … Hv₈", block, single, _BLOCK),
        ("twice the same", "Hv and Hv", again, single[:, 0], _AGAIN),
    ):
        size = max(float(left.norm()), float(right.norm()), 1e-300)
        difference = float((left - right).norm()) / size
        yield _judged(
            Check(
                name, compared, float(left.norm()), float(right.norm()), difference, 1e3 * rounding_of(objective), advice=advice
            )
        )


def _first_that_agrees(
    check: Check, product: Tensor, difference: Callable[[float], Tensor], theta: Tensor, gradient_norm: float
) -> Check:
    """Return the comparison at the first step that agrees, or else at the best one."""
    epsilon, best = torch.finfo(theta.dtype).eps, replace(check, difference=math.inf, verdict=DIFFERS)
    is_double = theta.dtype == torch.float64
    tolerance = _TOLERANCE if is_double else _SINGLE_TOLERANCE
    for step in _STEPS if is_double else _SINGLE_STEPS:
        h = step * _size(theta)
        other = difference(h)
        left, right = float(product.norm()), float(other.norm())
        size = max(left, right)
        rounding = 8 * epsilon * gradient_norm / h
        if rounding > 0.1 * size > 0 and not math.isnan(best.left):
            continue  # anything would agree
        gap = float((product - other).norm())
        relative = gap / size if size > 0 else 0.0
        found = replace(check, left=left, right=right, difference=relative, tolerance=tolerance)
        found = replace(found, verdict=AGREES if gap <= tolerance * size + rounding else DIFFERS)
        best = found if found.ok or not found.difference >= best.difference else best
        if best.ok:
            break
    return best


def _caught(name: str, compared: str, check: Callable[[], Check], verdict: str) -> Check:
    """Return a check; where the library refuses the product, its reason."""
    try:
        return check()
    except NotSupported as error:
        return Check(name, compared, verdict=verdict, advice=first_line(error))


def _judged(check: Check) -> Check:
    return replace(check, verdict=AGREES if check.difference <= check.tolerance else DIFFERS)


def _size(theta: Tensor) -> float:
    return float(theta.square().mean().sqrt()) or 1.0
