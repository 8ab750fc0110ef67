from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from flatminima.problems import mnist

_KERAS = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}
_IDX = {
    "train_images": "train-images",
    "train_labels": "train-labels",
    "test_images": "t10k-images",
    "test_labels": "t10k-labels",
}


@pytest.fixture
def parts() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "train_images": rng.integers(0, 256, (7, 28, 28), dtype=np.uint8),
        "train_labels": rng.integers(0, 10, 7, dtype=np.uint8),
        "test_images": rng.integers(0, 256, (3, 28, 28), dtype=np.uint8),
        "test_labels": rng.integers(0, 10, 3, dtype=np.uint8),
    }


def write_idx(folder: Path, parts: dict[str, np.ndarray], dot: str = "-", packed: bool = False) -> None:
    for part, array in parts.items():
        content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
        name = f"{_IDX[part]}{dot}idx{array.ndim}-ubyte"
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("layout", ["archive", "keras", "folder", "idx", "idx with dots", "idx packed"])
def test_every_layout_gives_the_same_data(tmp_path: Path, parts: dict[str, np.ndarray], layout: str) -> None:
    path = tmp_path
    if layout in ("archive", "folder"):
        np.savez(tmp_path / "mnist.npz", **parts)
        path = tmp_path / "mnist.npz" if layout == "archive" else tmp_path
    elif layout == "keras":
        path = tmp_path / "keras.npz"
        np.savez_compressed(path, **{_KERAS[part]: array for part, array in parts.items()})
    else:
        write_idx(tmp_path, parts, dot="." if "dots" in layout else "-", packed="packed" in layout)
    data = mnist(path)
    for images, labels, split in [(data.inputs, data.targets, "train"), (data.test_inputs, data.test_targets, "test")]:
        expected = torch.from_numpy(parts[f"{split}_images"]).float()[:, None] / 255
        assert torch.equal(images, expected)
        assert torch.equal(labels, torch.from_numpy(parts[f"{split}_labels"]).long())


def test_limits_keep_the_first_images(tmp_path: Path, parts: dict[str, np.ndarray]) -> None:
    np.savez(tmp_path / "mnist.npz", **parts)
    data = mnist(str(tmp_path), num_train=2, num_test=1)
    assert data.inputs.shape == (2, 1, 28, 28)
    assert data.targets.tolist() == parts["train_labels"][:2].tolist()
    assert data.test_targets.tolist() == parts["test_labels"][:1].tolist()


def test_a_missing_path_is_named_with_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no such file or folder\. Looked for mnist\.npz or train-images-idx3-ubyte"
    ) as caught:
        mnist(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold MNIST\. Looked for mnist\.npz"):
        mnist(tmp_path)


def test_an_incomplete_folder_names_the_missing_file(tmp_path: Path, parts: dict[str, np.ndarray]) -> None:
    write_idx(tmp_path, parts)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"Missing: t10k-labels-idx1-ubyte\[\.gz\]\.$"):
        mnist(tmp_path)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    path.write_text("not found")
    with pytest.raises(ValueError, match=r"mnist\.npz must be an \.npz archive of plain arrays\. Got something else"):
        mnist(path)


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "mnist.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"Got a single array"):
        mnist(tmp_path / "mnist.npy")


def test_pickled_objects_are_never_read(tmp_path: Path, parts: dict[str, np.ndarray]) -> None:
    parts["train_labels"] = np.array([{"a": 1}] * 7, dtype=object)
    np.savez(tmp_path / "mnist.npz", **parts)
    with pytest.raises(ValueError, match="must hold plain arrays"):
        mnist(tmp_path)


def test_a_damaged_archive_is_refused(tmp_path: Path, parts: dict[str, np.ndarray]) -> None:
    path = tmp_path / "mnist.npz"
    np.savez_compressed(path, **parts)
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        mnist(path)


def test_an_archive_without_labels_is_refused(tmp_path: Path, parts: dict[str, np.ndarray]) -> None:
    del parts["test_labels"]
    np.savez(tmp_path / "mnist.npz", **parts)
    with pytest.raises(ValueError, match=r"Missing: test_labels"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("part", "wrong", "match"),
    [
        (
            "train_images",
            np.zeros((7, 28, 27), np.uint8),
            r"train images .* must have shape \('num', 28, 28\).*Got \(7, 28, 27\)",
        ),
        ("test_images", np.zeros((0, 28, 28), np.uint8), r"test images .* num at least 1\. Got \(0, 28, 28\)"),
        ("train_labels", np.array(3), r"train labels .* must have shape"),
        ("train_labels", np.full(7, 10), r"train labels .* integers from 0 to 9\. Got 10 to 10"),
        ("train_labels", np.full(7, -1), r"train labels .* integers from 0 to 9\. Got -1 to -1"),
        ("train_labels", np.full(7, 0.5), r"train labels .* integers from 0 to 9\. Got float64"),
        ("train_images", np.full((7, 28, 28), 256), r"train images .* integers from 0 to 255\. Got 256 to 256"),
        ("test_labels", np.zeros(4, np.uint8), r"as many test labels as images\. Got 4 and 3"),
    ],
)
def test_wrong_content_is_refused(tmp_path: Path, parts: dict[str, np.ndarray], part: str, wrong: np.ndarray, match: str) -> None:
    np.savez(tmp_path / "mnist.npz", **{**parts, part: wrong})
    with pytest.raises(ValueError, match=match):
        mnist(tmp_path)


def test_real_mnist_has_the_published_sizes_and_first_labels(mnist_path: Path) -> None:
    data = mnist(mnist_path)
    assert data.inputs.shape == (60000, 1, 28, 28)
    assert data.test_inputs.shape == (10000, 1, 28, 28)
    assert data.targets[:5].tolist() == [5, 0, 4, 1, 9]
    assert float(data.inputs.max()) == 1.0
    # The pixels' mean and standard deviation that are usually quoted for MNIST.
    assert float(data.inputs.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(data.inputs.std()) == pytest.approx(0.3081, abs=5e-5)
