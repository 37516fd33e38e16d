"""What a process keeps between files, saves and loads: it is used again, bounded, and goes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fault._support import equal, load, run_python, save

from dcpring import _C, empty_cache
from dcpring.options import IOOptions

MOST_KEPT_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    empty_cache()
    yield
    empty_cache()


def state_of(mib: int, value: float = 1.0) -> dict[str, Any]:
    return {f"w{number}": torch.full((1 << 18,), value + number) for number in range(mib)} | {"step": 3}


def calls(name: str, work: Callable[[], Any]) -> int:
    """How often the core makes a system call, from a cold start."""
    _C.arm_fault(name, 0, 0, False)
    try:
        work()
    finally:
        counted = _C.disarm_fault()
    return counted


@pytest.mark.parametrize(("engine", "call"), (("uring", "uring_init"), ("threads", "map")))
def test_saves_and_loads_after_the_first_set_nothing_up(tmp_path: Path, engine: str, call: str) -> None:
    state, options = state_of(20), {"engine": engine}

    def work(times: int) -> None:
        for _ in range(times):
            save(state, tmp_path / "c", **options)
        for _ in range(times):
            assert equal(load(state, tmp_path / "c", **options), state)

    first = calls(call, lambda: save(state, tmp_path / "c", **options))
    assert first > 0
    assert calls(call, lambda: work(1)) == calls(call, lambda: work(3)) == first


def test_a_save_that_needs_no_thread_leaves_its_ring_to_the_next(tmp_path: Path) -> None:
    """Of one block, which nobody syncs; somebody has to let go of what is kept."""

    def work() -> None:
        for _ in range(3):
            save({"w": torch.ones(4)}, tmp_path, engine="uring", sync_files=False)

    assert calls("uring_init", work) == 1
    assert _C.kept()[0] == 1


def test_one_file_per_item_is_one_ring_for_all(tmp_path: Path) -> None:
    state = state_of(24)
    counted = calls("uring_init", lambda: save(state, tmp_path, single_file_per_rank=False, engine="uring"))
    assert len(list(tmp_path.glob("*.distcp"))) == 25
    assert 1 <= counted <= 2
    assert equal(load(state, tmp_path), state)


def test_it_is_bounded_and_given_back_on_request(tmp_path: Path) -> None:
    state = state_of(20)
    save(state, tmp_path / "c")
    engines, _, size = _C.kept()
    assert engines == 2 and 32 << 20 <= size <= MOST_KEPT_BYTES
    for block in (1, 2, 8, 16):
        save(state, tmp_path / "c", block_size_bytes=block << 20, workers=4, queue_depth=16)
        assert _C.kept()[2] <= MOST_KEPT_BYTES
    empty_cache()
    assert _C.kept()[0] == _C.kept()[2] == 0
    save(state, tmp_path / "c")
    assert equal(load(state, tmp_path / "c"), state)


def test_it_goes_when_nobody_uses_it(tmp_path: Path) -> None:
    _C.keep_for(100)
    try:
        save(state_of(20), tmp_path)
        end = time.monotonic() + 60
        while _C.kept() != (0, 0, 0) and time.monotonic() < end:
            time.sleep(0.02)
        assert _C.kept() == (0, 0, 0)
    finally:
        empty_cache()
        _C.keep_for(30000)


def test_a_failed_save_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Neither its engine, nor the blocks that were in flight."""
    state = state_of(20)
    save(state, tmp_path, engine="uring")
    for call in ("uring_result", "uring_submit", "uring_wait"):
        _C.arm_fault(call, 3, 5, False)
        try:
            with pytest.raises(BaseException, match="Input/output error"):
                save(state_of(20, 100.0), tmp_path, engine="uring")
        finally:
            _C.disarm_fault()
        assert _C.kept()[0] <= 1  # that of the worker that had no failure
        assert equal(load(state, tmp_path, engine="uring"), state)
        save(state, tmp_path, engine="uring")
        assert equal(load(state, tmp_path, engine="uring"), state)


def test_threads_share_what_is_kept(tmp_path: Path) -> None:
    def work(number: int) -> bool:
        state, path = state_of(6, 10.0 * number), tmp_path / str(number)
        for _ in range(5):
            save(state, path)
        return equal(load(state, path), state)

    before = threading.active_count()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert _C.kept()[2] <= MOST_KEPT_BYTES
    gc.collect()
    assert threading.active_count() == before


FORKS = """
import os, sys
from fault._support import Path, _C, equal, load, save, tensor_state

path, state = Path(sys.argv[1]), tensor_state(1)
save(state, path / "c", engine=sys.argv[2])
kept = _C.kept()
assert kept[0] > 0
child = os.fork()
if child == 0:
    assert _C.kept() == (0, 0, 0), "a child has nothing of its parent's"
    assert equal(load(state, path / "c", engine=sys.argv[2]), state)
    save(state, path / "child", engine=sys.argv[2])
    os._exit(0 if _C.kept()[0] > 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert _C.kept()[0] == kept[0]
save(state, path / "c", engine=sys.argv[2])
assert equal(load(state, path / "c", engine=sys.argv[2]), state)
assert _C.kept()[0] == kept[0]
"""


@pytest.mark.parametrize("engine", ("uring", "threads"))
def test_a_forked_child_begins_with_nothing(tmp_path: Path, engine: str) -> None:
    run_python(FORKS, str(tmp_path), engine)


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_writes_go_on_when_the_threads_that_began_them_end(tmp_path: Path, engine: str) -> None:
    """The kernel gives up what such a thread has begun; it is begun again."""
    tensors = [torch.randn(3 << 18) for _ in range(40)]
    file = _C.FileWriter(str(tmp_path), "f", 0, IOOptions(engine=engine).for_core(True, None))
    file.overlap()
    storage = _C.StorageIndex(len(tensors))
    for number, tensor in enumerate(tensors):
        file.write_tensors(_C.Tensors([tensor]), storage, [number])
        empty_cache()
    file.finish()
    file.close()
    data = (tmp_path / "f").read_bytes()
    for number, tensor in enumerate(tensors):
        start, size = storage.get(number)[4:6]  # type: ignore[index]
        assert data[start : start + size] == tensor.numpy().tobytes()
