"""Large tables do not hold up the rest of the process: others run, and Ctrl-C is heard."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dcpring import _C

ROWS = 1_500_000
CHUNKS = 60_000


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def framed(body: bytes) -> bytes:
    return b"DRT\1" + _C.crc32(body).to_bytes(4, "little") + body


def table_of_names() -> bytes:
    """An object in each row: nothing shared, a name of eight bytes, no path, no properties."""
    rows = np.zeros((ROWS, 13), np.uint8)
    rows[:, 2] = 8
    rows[:, 3:11] = np.arange(ROWS, dtype=np.uint64).view(np.uint8).reshape(ROWS, 8)
    return framed(varint(0) + varint(ROWS) + rows.tobytes())


def table_of_chunks(count: int) -> _C.Table:
    row = [(2, (CHUNKS,), (number,), (1,), b"torch.int8", 10, 1, 0) for number in range(count)]
    return _C.make_table(["w"], None, [row], b"\0", lambda tensor: tensor)


@pytest.fixture(scope="module")
def names() -> bytes:
    return table_of_names()


def merge_names(names: bytes) -> None:
    _C.Merge(1).add(names, b"")


@pytest.fixture(scope="module")
def calls(names: bytes) -> dict[str, Callable[[], Any]]:
    """Each takes a good part of a second."""
    wanted, stored = table_of_chunks(600), table_of_chunks(CHUNKS)
    return {
        "decode": lambda: _C.decode_table(names),
        "merge": lambda: merge_names(names),
        "match": lambda: _C.Match(wanted, stored),
    }


each_call = pytest.mark.parametrize("name", ("decode", "merge", "match"))


@each_call
def test_others_run_meanwhile(calls: dict[str, Callable[[], Any]], name: str) -> None:
    turns: list[None] = []
    over = threading.Event()

    def other() -> None:
        while not over.wait(0.005):
            turns.append(None)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        before = len(turns)
        calls[name]()
        after = len(turns)
    finally:
        over.set()
        thread.join()
    assert after - before >= 3


class Bell(Exception):
    pass


@each_call
def test_a_signal_is_heard(calls: dict[str, Callable[[], Any]], name: str) -> None:
    """After a fifth of the time that the call takes, in time of the processor: a busy machine makes no difference."""
    start = time.process_time()
    calls[name]()
    whole = time.process_time() - start

    def ring(*_: object) -> None:
        raise Bell

    previous = signal.signal(signal.SIGPROF, ring)
    try:
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, whole / 5)
        with pytest.raises(Bell):
            calls[name]()
        heard = time.process_time() - start
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    assert heard < 0.8 * whole, f"after {heard:.2f} of {whole:.2f} s"
