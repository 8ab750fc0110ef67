"""Plain training to a point of small gradient, repeatable from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatminima._checks import check_at_least, check_generator, check_positive
from flatminima._progress import Progress, no_progress
from flatminima.problems.dataset import Dataset

__all__ = ["Training", "TrainingResult", "evaluate", "seeded", "train"]

_EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Training:
    """How to train: SGD with Nesterov momentum on the cross-entropy, its rate rising over the first tenth of the steps, then
    falling to 0 along a half cosine. Without the rise the first steps can switch off ReLU units for good.

    Attributes:
        epochs: Passes over the training examples, at most; at least 1.
        lr: Largest learning rate.
        batch_size: Examples in a minibatch.
        momentum: Momentum, in [0, 1).
        weight_decay: Weight decay, on all parameters.
        settle_epochs: So many of the last epochs run in eval mode, in which the network is measured later. With BatchNorm that
            is another function than in train mode, so it is trained there too.
        target_loss: Stop after the first epoch that ends with the training loss below this; 0 never stops early.
    """

    epochs: int
    lr: float
    batch_size: int
    momentum: float = 0.9
    weight_decay: float = 0.0
    settle_epochs: int = 0
    target_loss: float = 0.0

    def __post_init__(self) -> None:
        check_at_least("epochs", self.epochs, 1)
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("settle_epochs", self.settle_epochs, 0)
        check_positive("lr", self.lr)
        check_positive("weight_decay", self.weight_decay, allow_zero=True)
        check_positive("target_loss", self.target_loss, allow_zero=True)
        if check_positive("momentum", self.momentum, allow_zero=True) >= 1:
            raise ValueError(f"`momentum` must be below 1 (the velocity would grow without bound). Got {self.momentum}.")
        if self.settle_epochs > self.epochs:
            raise ValueError(f"`settle_epochs` must be at most `epochs` ({self.epochs}). Got {self.settle_epochs}.")


@dataclass(frozen=True)
class TrainingResult:
    """What a training reached, in eval mode.

    Attributes:
        train_loss: Mean cross-entropy over the training examples, in nats.
        train_accuracy: Share of the training examples that are classified rightly.
        test_loss: Mean cross-entropy over the test examples, in nats.
        test_accuracy: Share of the test examples that are classified rightly.
        num_epochs: Epochs run.
    """

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    num_epochs: int


def train(
    model: nn.Module,
    data: Dataset,
    settings: Training,
    *,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
) -> TrainingResult:
    """Train the model in place; it is left in eval mode, without gradients.

    With a generator the result repeats bit for bit on one machine with one number of threads, and the global RNG is left as
    it was even where the model draws from it (dropout).

    Args:
        model: Gives logits ``(batch, classes)``, on the CPU.
        data: Training and test examples.
        settings: How to train.
        generator: Source of the order of the examples.
        progress: Called after every epoch.

    Returns:
        Losses and accuracies at the end.

    Raises:
        TypeError: If ``generator`` is neither a torch.Generator nor None.
        ValueError: If the loss stops being finite (a smaller ``lr`` helps).
    """
    check_generator(generator)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.momentum > 0,
        fused=True,
    )
    num_steps = settings.epochs * math.ceil(len(data.targets) / settings.batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share_of_lr, num_steps=num_steps))
    epoch = 0
    with _own_randomness(generator), torch.enable_grad():
        while epoch < settings.epochs:
            model.train(epoch < settings.epochs - settings.settle_epochs)
            _one_epoch(model, data, settings.batch_size, optimizer, scheduler, generator)
            epoch += 1
            loss, accuracy = evaluate(model, data.inputs, data.targets)
            if not math.isfinite(loss):
                raise ValueError(f"The training loss must stay finite. Got {loss} after epoch {epoch}. Use a smaller `lr`.")
            progress(epoch, settings.epochs, f"training: loss {loss:.4f}, accuracy {accuracy:.3f}")
            if loss < settings.target_loss:
                break
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return TrainingResult(loss, accuracy, *evaluate(model, data.test_inputs, data.test_targets), epoch)


def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the mean cross-entropy and the accuracy in eval mode; the model's modes are left as they were."""
    modes = {module: module.training for module in model.modules()}
    loss, num_right = 0.0, 0
    model.eval()
    try:
        with torch.no_grad():
            for x, y in zip(inputs.split(_EVALUATION_BATCH), targets.split(_EVALUATION_BATCH), strict=True):
                logits = model(x)
                loss += float(cross_entropy(logits.double(), y, reduction="sum"))
                num_right += int((logits.argmax(dim=1) == y).sum())
    finally:
        for module, mode in modes.items():
            module.training = mode
    return loss / len(targets), num_right / len(targets)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Give torch's global CPU generator this seed inside the block, and its old state back afterwards."""
    with torch.random.fork_rng(devices=[]):  # torch.manual_seed would reach the GPUs' generators too, which are not restored
        torch.default_generator.manual_seed(seed)
        yield


def _share_of_lr(step: int, num_steps: int) -> float:
    """Return the factor on the learning rate at a step: up over the first tenth, then down along a half cosine."""
    num_rising = max(1, num_steps // 10)
    return min((step + 1) / num_rising, 0.5 * (1 + math.cos(math.pi * step / num_steps)))


@contextmanager
def _own_randomness(generator: torch.Generator | None) -> Iterator[None]:
    if generator is None:
        yield
        return
    with seeded(int(torch.randint(2**62, (), generator=generator, device=generator.device))):
        yield


def _one_epoch(
    model: nn.Module,
    data: Dataset,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    generator: torch.Generator | None,
) -> None:
    device = generator.device if generator is not None else "cpu"
    order = torch.randperm(len(data.targets), generator=generator, device=device).to(data.targets.device)
    for batch in order.split(batch_size):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(data.inputs[batch]), data.targets[batch]).backward()
        optimizer.step()
        scheduler.step()
