"""What Ctrl-C does to the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatminima.cli import interrupts


def _press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_press_in_a_hurry_is_no_second_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupts.one_at_a_time():
        with pytest.raises(KeyboardInterrupt):
            _press_ctrl_c()
        _press_ctrl_c()
        monkeypatch.setattr(interrupts, "_IMPATIENCE", 0.0)
        with pytest.raises(KeyboardInterrupt):
            _press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_put_off_is_counted_and_not_raised() -> None:
    with interrupts.put_off() as came:
        _press_ctrl_c()
        _press_ctrl_c()
    assert came == [signal.SIGINT, signal.SIGINT]


def test_where_interruptions_are_ignored_they_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.one_at_a_time(), interrupts.put_off() as came:
            _press_ctrl_c()
        assert came == []
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc, to see when torch is being imported")
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_ctrl_c_twice_while_torch_is_imported_gives_one_line_and_status_130(tmp_path: Path, seconds: float) -> None:
    command = [Path(sys.executable).parent / "flatminima", "audit", "digits-mlp"]
    started = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "libtorch" not in Path(f"/proc/{started.pid}/maps").read_text(encoding="utf-8"):
        time.sleep(0.01)
    time.sleep(seconds)
    started.send_signal(signal.SIGINT)
    time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    assert started.communicate(timeout=60) == ("", "flatminima: interrupted before there was anything to report.\n")
    assert started.returncode == 130
    assert list(tmp_path.iterdir()) == []
