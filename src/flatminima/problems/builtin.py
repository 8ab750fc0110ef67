"""The built-in audit targets: small networks on real images, trained in seconds from a fixed seed until they stand still."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatminima._checks import check_one_of
from flatminima._progress import Progress, no_progress
from flatminima.problems.dataset import Dataset
from flatminima.problems.digits import digits
from flatminima.problems.initialisation import center_preactivations
from flatminima.problems.mnist import mnist
from flatminima.problems.networks import digits_cnn, mlp, mnist_cnn
from flatminima.problems.training import Training, TrainingResult, seeded, train

if TYPE_CHECKING:
    from flatminima.objective import Objective

__all__ = ["Problem", "build", "describe", "names"]


@dataclass(frozen=True, eq=False)
class Problem:
    """A trained network with the loss and the data on which it is measured.

    Attributes:
        name: Name of the built-in target.
        description: Network and data, in one line.
        model: The trained network, in eval mode, float32, on the CPU.
        loss: The loss that was trained, ``loss(logits, targets)``.
        data: Batches ``(inputs, targets)`` of the training examples, on which to measure.
        result: Losses and accuracies that the training reached.
        settings: What repeats the run, as plain values: seed, training, data, number of threads, PyTorch's version.
    """

    name: str
    description: str
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    data: list[tuple[Tensor, Tensor]]
    result: TrainingResult
    settings: Mapping[str, Any]

    def objective(self) -> Objective:
        """Return the loss on ``data`` as a function of the network's parameters."""
        from flatminima.objective import Objective

        return Objective(self.model, self.loss, self.data)


#: Training examples over which the start is centred.
_NUM_CENTRING = 2000


@dataclass(frozen=True)
class _Recipe:
    description: str
    load: Callable[..., Dataset]
    network: Callable[[], nn.Sequential]
    training: Training
    batch_size: int
    needs_path: bool = False


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "digits-mlp": _Recipe(
            "fully connected 64-32-32-10 with ReLU, on scikit-learn's digits",
            digits,
            partial(mlp, (64, 32, 32, 10)),
            Training(epochs=60, lr=0.05, batch_size=32),
            batch_size=2048,  # all at once: so small a network is faster that way
        ),
        "digits-cnn": _Recipe(
            "two convolutions with BatchNorm, ReLU and max pooling, on 700 of scikit-learn's digits",
            partial(digits, num_test=1097),
            digits_cnn,
            Training(epochs=24, lr=0.05, batch_size=32, settle_epochs=12),
            batch_size=700,
        ),
        "mnist-cnn": _Recipe(
            "two convolutions of stride 2 and two Linear layers with ReLU, on the first 1,000 images of MNIST",
            partial(mnist, num_train=1000),  # few, since what is trained on is measured on: elsewhere it would be no minimum
            mnist_cnn,
            Training(epochs=60, lr=0.03, batch_size=64),
            batch_size=500,
            needs_path=True,
        ),
    }
)


def names() -> tuple[str, ...]:
    """Return the names of the built-in targets.

    Example:
        >>> names()
        ('digits-mlp', 'digits-cnn', 'mnist-cnn')
    """
    return tuple(_RECIPES)


def describe(name: str) -> str:
    """Return the network and data of a built-in target in one line.

    Raises:
        ValueError: If there is no such target; the nearest name is given.
    """
    return _RECIPES[check_one_of("name", name, _RECIPES)].description


def build(
    name: str,
    *,
    data: str | PathLike[str] | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Problem:
    """Train a built-in target from a seed.

    The result repeats bit for bit on one machine with one number of threads. The global RNG is left as it was.

    Args:
        name: One of ``names()``.
        data: File or folder of MNIST for ``"mnist-cnn"``, see ``mnist``; None for the others, whose data are installed.
        seed: Seed of the initial parameters, the order of the examples, and nothing else.
        progress: Called after every epoch.

    Returns:
        The trained problem.

    Raises:
        ValueError: If the name is unknown (the nearest is given), or ``data`` is missing, not wanted, or no MNIST.
        FileNotFoundError: If ``data`` names nothing.
    """
    recipe = _RECIPES[check_one_of("name", name, _RECIPES)]
    if recipe.needs_path and data is None:
        raise ValueError(f"`data` must name a file or folder of MNIST for {name}. Got None. Give the path of mnist.npz.")
    if not recipe.needs_path and data is not None:
        raise ValueError(f"`data` must be None for {name} (its data come with scikit-learn). Got {str(data)!r}. Leave it out.")
    examples = recipe.load(data) if recipe.needs_path else recipe.load()
    with torch.device("cpu"), seeded(seed):
        model = recipe.network()
        center_preactivations(model, examples.inputs[:_NUM_CENTRING])
        result = train(model, examples, recipe.training, generator=torch.Generator().manual_seed(seed), progress=progress)
    batches = examples.batches(recipe.batch_size)
    settings = {
        "seed": seed,
        "training": asdict(recipe.training),
        "data": examples.source,
        "num_train": len(examples.targets),
        "num_test": len(examples.test_targets),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return Problem(name, recipe.description, model, cross_entropy, batches, result, MappingProxyType(settings))
