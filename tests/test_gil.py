"""What C does while it holds the GIL, no other thread can: it makes no system call then, and computes for moments.

That no call is made, by whatever binding, is looked for in all tests that run in this process or on several ranks
(``_gil``); here are those that nothing else would show.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpring import _C

ROWS = 300_000


def _directory(folder: Path) -> None:
    syncs = _C.Syncs(None)
    syncs.directory(str(folder))
    syncs.above(str(folder))
    syncs.wait()


def _memory(folder: Path) -> None:
    memory = mmap.mmap(-1, 1 << 20)
    for advice in ("huge pages", "give back"):
        _C.advise(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), 1 << 20, advice)


def _barrier(folder: Path) -> None:
    memory = bytearray(8)
    _C.barrier_end(memory)
    assert not _C.barrier_wait(memory, 2, 1)


def _files(folder: Path) -> None:
    syncs = _C.Syncs(None)
    _C.write_file(str(folder), "a", False, b"abc", syncs)
    _C.link_file(str(folder), "a", str(folder), "b", 3, False, syncs)
    syncs.wait()
    _C.rename_file(str(folder), "b", "c", True)
    _C.remove_files(str(folder), ["c"])
    _C.file_system(str(folder))
    _C.probe_directory(str(folder))
    _C.probe_space(str(folder))
    _C.probe_cached(str(folder), "a")
    _C.release_kept()


@pytest.mark.parametrize("make", [_directory, _memory, _barrier, _files])
def test_no_system_call_is_made_with_the_gil(make: Callable[[Path], None], tmp_path: Path) -> None:
    """The fixture of all tests says so; these calls are made by few others."""
    make(tmp_path)


# ---- syncs are one call's at a time ----


@pytest.fixture
def slow_open() -> Iterator[None]:
    _C.arm_fault("open_dir", 1, 0, True, 20)
    yield
    _C.disarm_fault()


def _refused(call: Callable[[], Any], other: Callable[[], Any]) -> str:
    """What ``other`` says while ``call`` is under way in another thread: both are made until it says something."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        thread = threading.Thread(target=call)
        thread.start()
        try:
            while thread.is_alive():
                other()
        except ValueError as error:
            return str(error)
        finally:
            thread.join()
    return ""


@pytest.mark.usefixtures("slow_open")
@pytest.mark.parametrize("other", ["wait", "file", "link", "writer"])
def test_syncs_that_are_in_use_are_not_lent_again(other: str, tmp_path: Path) -> None:
    syncs, folder, numbers = _C.Syncs(None), str(tmp_path), itertools.count()
    Path(tmp_path, "old").write_bytes(b"old")

    def finish() -> None:
        file = _C.FileWriter(folder, f"{next(numbers)}", 0, ("auto", 0, 8, 4 << 20, 2, True, 1, None))
        try:
            file.write_bytes([b"abc"])
            file.finish(syncs)
        finally:
            file.close()

    others: dict[str, Callable[[], Any]] = {
        "wait": syncs.wait,
        "file": lambda: _C.write_file(folder, f"{next(numbers)}", False, b"new", syncs),
        "link": lambda: _C.link_file(folder, "old", folder, f"{next(numbers)}", 3, False, syncs),
        "writer": finish,
    }

    def call() -> None:
        with contextlib.suppress(ValueError):  # the other one was first
            syncs.directory(folder)

    said = _refused(call, others[other])
    syncs.wait()
    assert said == "the set of syncs is in use by another thread"


# ---- what only computes ----


def _places() -> list[tuple[Any, ...]]:
    return [("f", 0, at * 4096, 4096, at * 4096 + 512, 1024, b"abcd") for at in range(ROWS)]


def _filled() -> _C.StorageIndex:
    storage = _C.StorageIndex(ROWS)
    storage.put(_places())
    return storage


def _put() -> Callable[[], Any]:
    storage, places = _C.StorageIndex(ROWS), _places()
    return lambda: storage.put(places)


def _encode() -> Callable[[], Any]:
    storage = _filled()
    return storage.encode


def _merge() -> Callable[[], Any]:
    storage, into = _filled(), [_C.StorageIndex(ROWS) for _ in range(20)]
    indices = array.array("I", range(ROWS)).tobytes()
    return lambda: [one.merge(storage, indices) for one in into]


def _names() -> Callable[[], Any]:
    names = [f"model.layers.{at}.weight" for at in range(ROWS)]
    table = _C.make_table(names, None, [None] * ROWS, bytes(ROWS), None)
    return table.names


def _convert() -> Callable[[], Any]:
    data = bytes(64 << 20)
    return lambda: _C.convert("float32", "bfloat16", data)


def _crcs() -> Callable[[], Any]:
    handles = _C.Tensors([torch.ones(64 << 20)])
    return handles.crcs


@pytest.mark.parametrize("make", [_put, _encode, _merge, _names, _convert, _crcs])
def test_other_threads_run_while_c_computes(make: Callable[[], Callable[[], Any]]) -> None:
    """They come to run in the midst of one call of C's: it has begun, and does not end before they have."""
    compute, during = make(), 0
    inside, over = threading.Event(), threading.Event()

    def count() -> None:
        nonlocal during
        inside.wait()
        while not over.is_set():
            during += 1

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(50):  # a machine that is busy may not have run the other thread during the first
        before = during
        inside.set()
        compute()
        if during > before + 1:
            break
    over.set()
    thread.join()
    assert during > before + 1
