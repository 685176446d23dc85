"""A frozen worker is ended by its number only while that number is still its own; memory is counted without what is
shared."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from actors.process import birth, kill, own_bytes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_a_frozen_process_is_ended(sleeper: subprocess.Popen) -> None:
    born = birth(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    assert born and kill(sleeper.pid, born)
    assert sleeper.wait(60) == -signal.SIGKILL


def test_another_process_under_the_same_number_is_left_alone(sleeper: subprocess.Popen) -> None:
    assert not kill(sleeper.pid, birth(os.getpid()) + "0")
    assert sleeper.poll() is None


@pytest.mark.skipif(not os.path.exists("/proc/self/comm"), reason="the system names no processes")
def test_a_name_that_the_kernel_has_cut_within_a_letter_is_no_obstacle() -> None:
    naming = "open('/proc/self/comm', 'wb').write('14 characters 日'.encode()); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", naming], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert birth(process.pid).isdecimal()
        process.kill()


def test_a_process_that_has_ended_is_nobody(sleeper: subprocess.Popen) -> None:
    born = birth(sleeper.pid)
    sleeper.kill()
    sleeper.wait(60)
    assert birth(sleeper.pid) == "" and not kill(sleeper.pid, born)


@pytest.mark.skipif(not own_bytes(), reason="the system tells no memory by its kind")
def test_memory_of_its_own_is_counted_without_what_others_share() -> None:
    mib, before = 1 << 20, own_bytes()
    with mmap.mmap(-1, 64 * mib) as shared:  # as the object store
        shared.write(b"1" * (64 * mib))
        assert own_bytes() - before < 32 * mib
        mine = b"1" * (64 * mib)
        assert own_bytes() - before > 48 * mib and len(mine) == len(shared)
