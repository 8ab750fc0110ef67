"""Objective: the loss of (model, loss function, data) as one stated scalar function of the flat parameter vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from flatminima._checks import check_at_least, check_generator, check_one_of, check_positive, check_shape
from flatminima._errors import NotSupported
from flatminima.objective.batches import Batches, inputs_and_targets, rows
from flatminima.objective.closures import ClosureEvaluator
from flatminima.objective.evaluators import Evaluation, Evaluator, ModelEvaluator, Piece, gradients_of
from flatminima.objective.inspection import Inspection, inspect_closure, inspect_data
from flatminima.objective.losses import Loss, LossFunction
from flatminima.objective.session import unwrap
from flatminima.params import ParameterSpace, Selection, vector_dtype

__all__ = ["Objective"]

Made = TypeVar("Made")


@final
class Objective:
    r"""The loss over the data as a function of the flat parameter vector θ of shape ``(n,)``.

    .. math:: L(\theta) = \frac{1}{T} \sum_{b} \text{total}_b(\theta) + \frac{\lambda}{2}\lVert\theta\rVert^2

    with T the number of loss terms over all the data (T = 1 for ``reduction="sum"``), so batches of any size or weight add up
    to one mean. Values are those of exactly this scalar, and derivatives what torch.autograd gives for it; where code cuts a
    gradient in part (a detached norm, a straight-through estimator) that is the derivative of another function: see
    ``flatminima.objective.consistency.check_derivative``.

    After every call, also one that raises, these are what they were: parameters, buffers, modes, ``.grad`` and its hooks,
    random state, torch's flags; the attributes of modules; and, followed from these attributes on, containers of any class,
    tuples, attributes and slots of objects (objects in objects four deep), with the numbers in tensors, NumPy arrays and byte
    arrays (those that objects hold: up to 4 MiB each). Not put back is what forward code writes elsewhere: globals, class
    attributes, variables of functions and hooks, files, tensors that belong to a graph; objects of torch, NumPy and the standard
    library other than containers, partials and namespaces.

    Hooks on parameters' gradients do not run. Pass-to-pass memory is refused where the checks at the start can see it; what
    they cannot see is listed in ``flatminima.objective.dependence``. A write to parameters that changes no value passes.

    Args:
        model: Any module. ``torch.compile`` wrappers are looked through: second derivatives need the eager code.
        loss: ``loss(outputs, targets)``, for example ``torch.nn.functional.cross_entropy`` or a loss module; torch's standard
            losses are recognised with their weights, ``ignore_index``, label smoothing and reduction. Any other callable
            returns the mean over a batch's terms; if its first parameter is called ``model`` it gets ``(model, batch)``.
            Of an output object, ``.logits`` is what the loss gets.
        data: A DataLoader without shuffling, a list of batches, or one batch. A batch is ``(x, y)``, ``(x1, x2, y)``,
            ``({"name": x}, y)``, or a mapping with the targets under "labels", "label", "targets", "target" or "y".
        params: Which parameters θ consists of: None for all trainable ones, or name patterns, modules or parameters.
        l2: λ, for the term (λ/2)‖θ‖² over the chosen parameters.
        reduction: "mean" or "sum" over all terms; None follows the loss.
        num_terms: Number of terms in a batch, for a custom loss; the batch size by default.
        micro_batch_size: Evaluate every batch in pieces of at most this many examples, to bound memory.
        mode: "eval" (running statistics, no dropout) or "train" (each batch is its own normalisation population).
        dtype: Floating point type to compute in, such as ``torch.float64``; None keeps the model's own.
        check_deterministic: Pass over the data twice at the start and compare; and see that the loss at other parameters does
            not depend on earlier passes (weights that a model computes once and keeps).

    Attributes:
        space: The chosen parameters, in the order in which they stand in θ.
        num_examples: Number of examples in the data.
        num_terms: T before any reduction: elements, rows, or weights of targets that are not ignored.

    Raises:
        TypeError: If the data allows only one pass, or an argument has the wrong type.
        ValueError: If the data is empty or does not fit the model, or no parameter is trainable.
        NonFiniteLoss: If the loss of a batch is not finite.
        NotDeterministic: If two passes differ; the message names the culprit.
        NotSupported: If the loss is no function of θ with derivatives: a forward pass changes parameters, keeps what it has
            computed from them, hangs hooks on them, or uses one where autograd sees no path to the loss at all.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> objective = Objective(model, torch.nn.functional.mse_loss, (x, torch.zeros(2, 1)))
        >>> objective.value(), objective.gradient()
        (tensor(2.5000), tensor([5.]))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        data: Any,
        *,
        params: Selection = None,
        l2: float = 0.0,
        reduction: str | None = None,
        num_terms: Callable[[Any], float] | None = None,
        micro_batch_size: int | None = None,
        mode: str = "eval",
        dtype: torch.dtype | None = None,
        check_deterministic: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module. Got {type(model).__name__}.")
        check_one_of("mode", mode, ("eval", "train"))
        if micro_batch_size is not None:
            check_at_least("micro_batch_size", micro_batch_size, 1)
            if mode == "train":
                raise ValueError("`micro_batch_size` must be None in train mode (it would change the batches' statistics).")
        if num_terms is not None and not callable(num_terms):
            raise TypeError(
                f"`num_terms` must be a function of a batch. Got {num_terms!r}. Write num_terms=lambda batch: {num_terms!r}."
            )
        model, known = unwrap(model), Loss.of(loss)
        self.architecture = {}
        self.reduction = known.reduction if reduction is None else check_one_of("reduction", reduction, ("mean", "sum"))
        self.l2 = check_positive("l2", l2, allow_zero=True)
        self._evaluator: Evaluator = ModelEvaluator(
            model,
            known,
            Batches(data, micro_batch_size),
            ParameterSpace.of(model, params),
            mode=mode,
            num_terms=num_terms,
            dtype=_checked_dtype(dtype),
        )
        self._theta: Tensor | None = None
        self._inspect(check_deterministic)

    @classmethod
    def from_closure(
        cls, closure: Callable[[], Tensor], params: Mapping[str, Tensor] | Iterable[Tensor], *, l2: float = 0.0
    ) -> Objective:
        """Build an objective from a function that returns the loss, and the tensors that it reads.

        The closure is the whole stated scalar. It is called with other values in the tensors, which are then put back, as are
        their gradients, and the parameters, buffers and attributes of the modules that it refers to (through variables, objects
        and functions, three deep) and of those that run inside. Modes are the caller's business.

        Args:
            closure: Returns a scalar tensor, differentiable in ``params``.
            params: Leaf tensors with ``requires_grad``, in order or by name, each once.
            l2: λ of an added (λ/2)‖θ‖².

        Raises:
            TypeError: If the closure cannot be called, or ``params`` holds no tensors.
            ValueError: If there is no tensor, one is no leaf that requires a gradient, or two share memory; if the closure
                calls ``backward()``, or returns anything but one finite number.
            NotDeterministic: If two calls differ.
            NotSupported: If the loss is no function of θ with derivatives, as for a model.
        """
        self = cls.__new__(cls)
        self.reduction, self.l2, self._theta = "sum", check_positive("l2", l2, allow_zero=True), None
        self.architecture = {}
        evaluator = ClosureEvaluator(closure, _named(params))
        self._evaluator = evaluator
        self._inspection = Inspection(1, 1.0, 0.0, "")
        inspect_closure(evaluator, self.theta)
        return self

    #: What higher layers found out about the architecture (its symmetries); shared with every objective made from this one.
    architecture: dict[str, Any]

    # --- what it is -------------------------------------------------------------------------------------------------------

    @property
    def space(self) -> ParameterSpace:
        """The parameters that θ consists of."""
        return self._evaluator.space

    @property
    def num_examples(self) -> int:
        """Number of examples in the data (1 for a closure)."""
        return self._inspection.num_examples

    @property
    def data_digest(self) -> str:
        """A fingerprint of the batches, as they were when the objective was made; "" for a closure."""
        return self._inspection.digest

    @property
    def num_terms(self) -> float:
        """Number of loss terms over all the data."""
        return self._inspection.num_terms

    @property
    def scale(self) -> float:
        """The factor of every batch's total in L: 1/T, or 1 for a sum."""
        return 1.0 if self.reduction == "sum" else 1.0 / self.num_terms

    @property
    def dtype(self) -> torch.dtype:
        """Data type of θ, gradients and products: at least float32."""
        return vector_dtype(leaf.dtype for leaf in self._leaf_types())

    @property
    def device(self) -> torch.device:
        """Device of θ, gradients and products."""
        return next(iter(self._evaluator.current().values())).device

    @property
    def theta(self) -> Tensor:
        """The point ``(n,)`` at which everything is evaluated: the model's current parameters, or those given to ``at``."""
        if self._theta is not None:
            return self._theta.clone()
        return self.space.flatten(self._evaluator.current(), self.dtype)

    @property
    def has_model(self) -> bool:
        """Whether the model is known and called as ``loss(model(inputs), targets)``, so that it can be traced and moved."""
        return isinstance(self._evaluator, ModelEvaluator) and not self._evaluator.takes_model

    @property
    def model(self) -> nn.Module:
        """The user's module, unwrapped.

        Raises:
            NotSupported: If the objective was built from a closure.
        """
        return self.model_evaluator("The model itself").model

    @property
    def loss(self) -> Loss:
        """The loss and what is known of it."""
        return self.model_evaluator("The loss function").loss

    @property
    def mode(self) -> str:
        """The mode in which the model is evaluated: "eval" or "train"."""
        return self._evaluator.mode if isinstance(self._evaluator, ModelEvaluator) else "eval"

    # --- other objectives -------------------------------------------------------------------------------------------------

    def at(self, theta: Tensor) -> Objective:
        """Return the same objective at another point θ ``(n,)``; the model is not changed."""
        return self._with(_theta=check_shape("theta", theta, (self.space.size,)).detach().to(self.device, self.dtype, copy=True))

    def with_model(self, model: nn.Module) -> Objective:
        """Return the same loss and data with another model of the same architecture, at that model's parameters.

        Raises:
            ValueError: If names or shapes of the parameters differ.
        """
        old, model = self.model_evaluator("Another model"), unwrap(model)
        evaluator = old.replaced(model=model)
        shapes = {name: p.shape for name, p in evaluator.current().items() if name in self.space.shapes}
        if shapes != dict(self.space.shapes):
            raise ValueError("`model` must have the objective's parameters, by name and shape. Got another architecture.")
        return self._with(_evaluator=evaluator, _theta=None)

    def subset(self, num_examples: int, *, generator: torch.Generator | None = None) -> Objective:
        """Return the objective over the first ``num_examples`` examples, or over a random choice when a generator is given.

        Raises:
            ValueError: If ``num_examples`` is not between 1 and the number there are.
        """
        old = self.model_evaluator("A subset of the data")
        if check_at_least("num_examples", num_examples, 1) > self.num_examples:
            raise ValueError(f"`num_examples` must be at most {self.num_examples} (all there are). Got {num_examples}.")
        with old.session():
            batches = old.batches.subset(num_examples, check_generator(generator))
        result = self._with(_evaluator=old.replaced(batches=batches))
        result._inspect(check_deterministic=False)
        return result

    def in_memory(self) -> Objective:
        """Return the same objective with its batches held on the device, in the dtype to compute in: no loader, no casts."""
        old = self.model_evaluator("The data")
        with old.session():
            batches = Batches(list(old.prepared()))
        return self._with(_evaluator=old.replaced(batches=batches))

    def without_l2(self) -> Objective:
        """Return the same objective without its l2 term."""
        return self._with(l2=0.0)

    def to(self, dtype: torch.dtype | None) -> Objective:
        """Return the same objective computed in another floating point type; the model keeps its own."""
        old = self.model_evaluator("Another precision")
        theta = self._theta
        result = self._with(_evaluator=old.replaced(dtype=_checked_dtype(dtype)))
        result._theta = None if theta is None else theta.to(result.dtype)
        return result

    # --- values -----------------------------------------------------------------------------------------------------------

    def value(self, theta: Tensor | None = None) -> Tensor:
        """Return L, shape ``()``, at θ ``(n,)`` or at the current point; one forward pass over the data."""

        def total(evaluation: Evaluation, _leaves: Mapping[str, Tensor]) -> Tensor:
            return evaluation.total.detach().to(self.dtype)

        theta = self._point(theta)
        result = self.integrate(total, theta, gradients=False)
        return result + 0.5 * self.l2 * theta.square().sum() if self.l2 else result

    def gradient(self, theta: Tensor | None = None) -> Tensor:
        """Return ∇L, shape ``(n,)``, at θ or at the current point; one forward and backward pass over the data."""
        return self.value_and_gradient(theta)[1]

    def value_and_gradient(self, theta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return L, shape ``()``, and ∇L, shape ``(n,)``."""

        def both(evaluation: Evaluation, leaves: Mapping[str, Tensor]) -> Tensor:
            gradients = gradients_of(evaluation.total, leaves)
            return torch.cat([evaluation.total.detach().reshape(1).to(self.dtype), self.space.flatten(gradients, self.dtype)])

        theta = self._point(theta)
        result = self.integrate(both, theta)
        value, gradient = result[0], result[1:]
        if self.l2:
            value, gradient = value + 0.5 * self.l2 * theta.square().sum(), gradient + self.l2 * theta
        return value, gradient

    def integrate(
        self,
        function: Callable[[Evaluation, Mapping[str, Tensor]], Tensor],
        theta: Tensor | None = None,
        *,
        gradients: bool = True,
    ) -> Tensor:
        """Return ``scale`` × the sum over batches of ``function(evaluation, leaves)``.

        Args:
            function: Gets a batch's evaluation and the leaf tensors by name; returns a detached tensor of one fixed shape.
            theta: The point ``(n,)``; None is the current one.
            gradients: Whether ``function`` differentiates in the leaves.
        """
        return self.integrate_pieces(lambda piece: function(piece.evaluate(), piece.leaves), theta, gradients=gradients)

    def integrate_pieces(
        self, function: Callable[[Piece], Tensor], theta: Tensor | None = None, *, gradients: bool = True
    ) -> Tensor:
        """Return ``scale`` × the sum over batches of ``function(piece)``, which evaluates them itself; see ``integrate``."""
        result: Tensor | None = None
        point = self._point(theta)
        with self._evaluator.session(), torch.set_grad_enabled(gradients):
            for piece in self._evaluator.pieces(self._evaluator.leaves(point)):
                part = function(piece)
                result = part if result is None else result + part
        if result is None:
            raise ValueError("`data` must hold at least one example. Got an empty loader on a later pass.")
        return result * self.scale

    def integrate_again(self, function: Callable[[Made], Tensor], made: Sequence[Made]) -> Tensor:
        """Return ``scale`` × the sum of ``function`` over what was made of each piece in an earlier pass."""
        with self._evaluator.session():
            result = function(made[0])
            for one in made[1:]:
                result = result + function(one)
        return result * self.scale

    def in_pieces(self, num_examples: int) -> Objective:
        """Return the same objective, evaluated in pieces of at most so many examples."""
        old = self.model_evaluator("Evaluation in pieces")
        size = min(num_examples, old.batches.micro_batch_size or num_examples)
        return self._with(_evaluator=old.replaced(batches=Batches(old.batches.data, size)))

    @property
    def adds_up(self) -> bool:
        """Whether the loss is a sum over examples, provided that the model does not couple them."""
        return isinstance(self._evaluator, ModelEvaluator) and self._evaluator.adds_up

    def example_inputs(self, num_examples: int = 8) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's positional and keyword arguments for the first examples of the data."""
        evaluator = self.model_evaluator("Example inputs")
        if evaluator.takes_model:
            raise NotSupported("Example inputs are not known when the loss calls the model itself. Pass them explicitly.")
        with evaluator.session():
            args, kwargs, _ = inputs_and_targets(rows(next(evaluator.prepared()), 0, num_examples))
        return args, kwargs

    def model_evaluator(self, what: str) -> ModelEvaluator:
        """Return what evaluates the model, or say that ``what`` does not exist for a closure.

        Raises:
            NotSupported: If the objective was built from a closure.
        """
        if not isinstance(self._evaluator, ModelEvaluator):
            raise NotSupported(f"{what} is not known to an objective made from a closure. Build Objective(model, loss, data).")
        return self._evaluator

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _point(self, theta: Tensor | None) -> Tensor:
        if theta is None:
            return self.theta
        return check_shape("theta", theta, (self.space.size,)).detach().to(self.device, self.dtype)

    def _leaf_types(self) -> Iterable[Tensor]:
        own = self._evaluator.current()
        dtype = self._evaluator.dtype if isinstance(self._evaluator, ModelEvaluator) else None
        return [torch.empty(0, dtype=dtype or own[name].dtype) for name in self.space.names]

    def _inspect(self, check_deterministic: bool) -> None:
        evaluator = self.model_evaluator("The data")
        theta = self.space.flatten(evaluator.current(), self.dtype)
        self._inspection = inspect_data(evaluator, theta, check_deterministic=check_deterministic)

    def _with(self, **attributes: Any) -> Objective:
        result = copy.copy(self)
        for name, value in attributes.items():
            setattr(result, name, value)
        return result

    def __repr__(self) -> str:
        return (
            f"Objective(parameters={self.space.size}, examples={self.num_examples}, reduction={self.reduction!r}, l2={self.l2:g})"
        )


def _named(params: Any) -> dict[str, Tensor]:
    if isinstance(params, Tensor):
        return {"0": params}
    if not isinstance(params, Mapping | Iterable):
        raise TypeError(f"`params` must be leaf tensors in order or by name. Got {type(params).__name__}.")
    return dict(params) if isinstance(params, Mapping) else {str(i): p for i, p in enumerate(params)}


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ValueError(f"`dtype` must be a real floating point type such as torch.float64, or None. Got {dtype!r}.")
    return dtype
