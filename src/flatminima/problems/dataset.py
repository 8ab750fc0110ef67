"""Dataset: labelled examples for training and for testing, held in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flatminima._checks import check_at_least

__all__ = ["Dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled examples, split once and for all into a training and a test part.

    Attributes:
        inputs: Training inputs, shape ``(num_train, ...)``, float32.
        targets: Training classes, shape ``(num_train,)``, int64.
        test_inputs: Test inputs, shape ``(num_test, ...)``, float32.
        test_targets: Test classes, shape ``(num_test,)``, int64.
        name: What it is called in tables and reports.
        source: Where the examples come from.
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    name: str
    source: str

    def batches(self, batch_size: int, *, num_examples: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the first training examples, in their fixed order, as ``(inputs, targets)`` pairs; the last may be smaller.

        Args:
            batch_size: Examples in a batch, at least 1.
            num_examples: How many examples in all; None or a number beyond the training part means all of them.

        Raises:
            ValueError: If ``batch_size`` or ``num_examples`` is below 1.
        """
        check_at_least("batch_size", batch_size, 1)
        total = len(self.targets) if num_examples is None else check_at_least("num_examples", num_examples, 1)
        inputs, targets = self.inputs[:total], self.targets[:total]
        return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, num_train={len(self.targets)}, num_test={len(self.test_targets)})"
