from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatminima.problems.idx import read_idx

_same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)


def encode(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=3), packed=st.booleans())
@_same_folder
def test_reading_inverts_writing(tmp_path: Path, shape: list[int], packed: bool) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.uint8).reshape(shape)
    path = tmp_path / ("array.gz" if packed else "array")
    path.write_bytes(gzip.compress(encode(array)) if packed else encode(array))
    np.testing.assert_array_equal(read_idx(path, len(shape)), array, strict=True)


@given(keep=st.integers(0, 27), packed=st.booleans())
@_same_folder
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, keep: int, packed: bool) -> None:
    whole = encode(np.arange(12).reshape(3, 2, 2))
    assert len(whole) == 28
    path = tmp_path / ("cut.gz" if packed else "cut")
    path.write_bytes(gzip.compress(whole[:keep]) if packed else whole[:keep])
    with pytest.raises(ValueError, match="cut"):
        read_idx(path, 3)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(encode(np.arange(200)))[:-10])
    with pytest.raises(ValueError, match=r"labels\.gz must be a whole gzip file.*Fetch it again"):
        read_idx(path, 1)


def test_a_file_that_is_not_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match="must be a whole gzip file"):
        read_idx(path, 1)


def test_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(encode(np.arange(5)) + b"x")
    with pytest.raises(ValueError, match=r"must be 13 bytes long \(its header says \(5,\)\)\. Got 14"):
        read_idx(path, 1)


@pytest.mark.parametrize("start", ["00000901", "00000803", "01000801", "89504e47"], ids=["type", "dimensions", "zeros", "a PNG"])
def test_another_magic_number_is_refused(tmp_path: Path, start: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(bytes.fromhex(start) + encode(np.arange(5))[4:])
    with pytest.raises(ValueError, match=rf"must begin with the bytes 00000801 .*Got {start}\."):
        read_idx(path, 1)


def test_a_header_of_huge_sizes_is_refused_without_allocating(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1))
    with pytest.raises(ValueError, match=r"bytes long .* Got 16\."):
        read_idx(path, 3)
