"""The digits that scikit-learn ships: 1,797 real handwritten 8×8 images, so a demonstration needs no download."""

from __future__ import annotations

import torch

from flatminima._checks import check_at_least
from flatminima.problems.dataset import Dataset

__all__ = ["digits"]

_NUM_EXAMPLES = 1797
_NUM_GREYS = 16.0


def digits(*, num_test: int = 360, seed: int = 0) -> Dataset:
    """Load the digits, with pixels scaled from 0…16 to 0…1 and a split that depends on ``seed`` alone.

    Args:
        num_test: Images that are kept for testing, between 1 and 1,796.
        seed: Seed of the permutation that splits the images; the global RNG is neither used nor changed.

    Returns:
        Dataset with inputs of shape ``(1797 − num_test, 1, 8, 8)`` and ``(num_test, 1, 8, 8)``.

    Raises:
        ValueError: If ``num_test`` leaves no image for training or none for testing.

    References:
        Alpaydin & Kaynak (1998), "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository; scikit-learn
        ships its test part.

    Example:
        >>> digits()
        Dataset('digits', num_train=1437, num_test=360)
    """
    from sklearn.datasets import load_digits  # costs half a second: only when asked for

    if check_at_least("num_test", num_test, 1) >= _NUM_EXAMPLES:
        raise ValueError(f"`num_test` must be below {_NUM_EXAMPLES} (some images are needed for training). Got {num_test}.")
    raw = load_digits()
    images = torch.from_numpy(raw.images).to(torch.float32).unsqueeze(1) / _NUM_GREYS
    classes = torch.from_numpy(raw.target).to(torch.int64)
    order = torch.randperm(_NUM_EXAMPLES, generator=torch.Generator().manual_seed(seed), device="cpu")
    train, test = order[num_test:], order[:num_test]
    return Dataset(images[train], classes[train], images[test], classes[test], "digits", "scikit-learn load_digits")
