from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatminima.report import replacing


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    with replacing(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
        assert temporary.parent == tmp_path
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.txt"
    target.write_text("old")

    def interrupted() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half of the n")
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_file_has_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        with replacing(tmp_path / "result.txt") as temporary:
            temporary.write_text("new")
    finally:
        os.umask(mask)
    assert (tmp_path / "result.txt").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"), replacing(tmp_path / "nowhere" / "result.txt"):
        pass
