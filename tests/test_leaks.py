"""Files, threads and memory over many saves and loads, each check in a process of its own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _prepared
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _kinds import everything, failure, load, poisoned, save

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter, empty_cache

MIB = 1 << 20
SANITIZED = "DCPRING_SANITIZED" in os.environ
"""The sanitizers keep freed memory for a while."""


def _status(name: str) -> int:
    """A number of /proc/self/status; memory in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    value = int(line.split()[1])
    return value // 1024 if line.endswith("kB") else value


def _open_files() -> set[str]:
    empty_cache()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # listdir's own
            continue
    return found


def _peak_over(work: Callable[[], Any]) -> int:
    """MiB of resident memory that the work took at its peak, beyond what was there before."""
    gc.collect()
    empty_cache()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS:")
    work()
    return _status("VmHWM:") - before


# ---- what runs in the subprocess ----


def steady(folder: str, engine: str) -> None:
    """Saves and loads again and again, some failing: no file, thread or memory is left behind."""
    state = everything() | {"object": list(range(1000)), "sparse": torch.eye(50).to_sparse()}
    target = {key: poisoned(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    target["sparse"] = torch.zeros(50, 50).to_sparse()
    path = Path(folder, "c")

    def turn() -> None:
        save(state, path, engine=engine)
        load(target, path, engine=engine)
        assert failure(lambda: save({"a": torch.ones(5), "b": lambda: None}, path, engine=engine))
        assert failure(lambda: load(target | {"transposed": torch.zeros(2)}, path, engine=engine))
        file = next(path.glob("*.distcp"))
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        assert failure(lambda: load(target, path, engine=engine))
        file.write_bytes(data)

    for _ in range(5):
        turn()
    files, threads, memory = _open_files(), _status("Threads:"), _status("VmRSS:")
    for _ in range(15):
        turn()
    assert _open_files() == files
    assert _status("Threads:") == threads and threading.active_count() == 1
    gc.collect()  # DCP's own cycles of errors and frames, which Python 3.14 leaves for longer
    grown = _status("VmRSS:") - memory
    assert SANITIZED or grown < 24, f"{grown} MiB more than after 5 turns"
    names = sorted(os.listdir(path))
    assert len(names) == 2 and names[0] == ".metadata", names


def big_memory(folder: str, engine: str, direct: str, size: str) -> None:
    """So many MiB, half of them in 4 large tensors, half in small ones, and a transposed one."""
    half = int(size) // 2
    state = {f"large.{i}": torch.full((half * MIB // 16,), float(i)) for i in range(4)}
    state |= {f"small.{i}": torch.full((MIB // 4,), float(i)) for i in range(half - 16)}
    state |= {"transposed": torch.full((1024, 4096), 1.5).t()}
    assert sum(tensor.nbytes for tensor in state.values()) == int(size) * MIB
    options: dict[str, Any] = {"engine": engine, "direct": direct == "direct"}
    save({"warm": torch.ones(2 * MIB)}, Path(folder, "warm"), **options)
    load({"warm": torch.zeros(2 * MIB)}, Path(folder, "warm"), **options)
    writer, reader = RingWriter(folder, **options), RingReader(folder, **options)
    saving = _peak_over(lambda: dcp.save(state, storage_writer=writer))
    for tensor in state.values():
        tensor.zero_()
    loading = _peak_over(lambda: dcp.load(state, storage_reader=reader))
    assert all(bool((state[f"large.{i}"] == i).all()) for i in range(4))
    assert all(bool((state[f"small.{i}"] == i).all()) for i in range(half - 16))
    print(f"saving took {saving} MiB, loading {loading}")
    assert saving <= 64 and loading <= 64, (saving, loading)
    if size == "256":
        _check_casting(state, folder, options)
    empty_cache()
    assert _status("Threads:") <= _threads_of_torch()


def _check_casting(state: dict[str, torch.Tensor], folder: str, options: dict[str, Any]) -> None:
    halves = {key: torch.ones(tensor.shape, dtype=torch.bfloat16) for key, tensor in state.items()}
    state.clear()
    casting = _peak_over(lambda: load(halves, Path(folder), **options))
    assert casting <= 128, f"casting took {casting} MiB"


def memory_of_others(folder: str) -> None:
    """Conjugate views, which are resolved to be saved, and objects: a bounded number of both at a time."""
    views = {f"{i}": torch.ones(2 * MIB, dtype=torch.complex64).conj() for i in range(12)}
    save({"warm": torch.ones(MIB)}, Path(folder, "warm"))
    saving = _peak_over(lambda: compact_save(views, folder))
    assert saving <= 80, f"saving 192 MiB of views took {saving} MiB"
    objects = {f"{i}": (os.urandom(4 * MIB),) for i in range(48)}
    saving = _peak_over(lambda: compact_save(objects, folder))
    loaded = dict.fromkeys(objects)
    loading = _peak_over(
        lambda: dcp.load(loaded, storage_reader=RingReader(folder), planner=RingLoadPlanner(), no_dist=True)
    )
    assert loaded == objects
    assert saving <= 190 and loading <= 192 + 140, (saving, loading)


def compact_save(state: dict[str, Any], folder: str) -> None:
    dcp.save(state, storage_writer=RingWriter(folder), planner=RingSavePlanner(), no_dist=True)


def _threads_of_torch() -> int:
    """The main thread and those of torch's own pools."""
    return 1 + torch.get_num_threads() + torch.get_num_interop_threads()


def dropped(folder: str) -> None:
    """Writers that are never finished or closed clean up after themselves."""
    from dcpring import _C
    from dcpring.options import IOOptions

    source = torch.ones(3 * MIB)
    files, threads = _open_files(), _status("Threads:")
    for engine in ("uring", "threads"):
        for turn in range(20):
            options = IOOptions(engine=engine).for_core(True)  # type: ignore[arg-type]
            writer = _C.FileWriter(folder, f"file.{turn}", 1 << 24, options)
            writer.write_tensors(_C.Tensors([source]), _C.StorageIndex(1))
            del writer
    gc.collect()
    assert _open_files() == files and _status("Threads:") == threads
    assert os.listdir(folder) == []


def references(folder: str) -> None:
    """No tensor, plan or buffer outlives its save or load."""
    import weakref

    state = {"x": torch.ones(1000), "y": torch.ones(10, 10).t(), "o": [1]}
    watched = [weakref.ref(value) for value in state.values() if isinstance(value, torch.Tensor)]
    counts = []
    for _ in range(6):
        save(state, Path(folder))
        load(state, Path(folder))
        counts.append((sys.getrefcount(state["x"]), sys.getrefcount(state["y"])))
    assert len(set(counts)) == 1
    assert failure(lambda: load({"x": torch.zeros(7)}, Path(folder)))
    state.clear()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


# ---- the tests ----


def _in_a_process(function: Callable[..., None], *args: str) -> None:
    code = _calling(function, *args)
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    malloc = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": f"{MIB}"}  # what is freed is given back
    environment = os.environ | malloc | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _in_a_forked_process(function: Callable[..., None], *args: str) -> None:
    """Where memory is not measured."""
    done = _prepared.run(["-W", "ignore", "-c", _calling(function, *args)], timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def _calling(function: Callable[..., None], *args: str) -> str:
    return f"import test_leaks; test_leaks.{function.__name__}(*{args!r})"


@pytest.mark.skipif(SANITIZED, reason="the sanitizers take memory of their own")
def test_memory_of_views_and_objects_is_bounded(tmp_path: Path) -> None:
    _in_a_process(memory_of_others, str(tmp_path))


@pytest.mark.slow(but=["uring"])
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_nothing_is_left_behind(tmp_path: Path, engine: str) -> None:
    _in_a_process(steady, str(tmp_path), engine)


@pytest.mark.skipif(SANITIZED, reason="the sanitizers take memory of their own")
@pytest.mark.slow(but=["uring-direct-1024"])
@pytest.mark.parametrize(
    ("engine", "direct", "size"),
    [("uring", "direct", "1024"), ("uring", "buffered", "256"), ("threads", "direct", "256")],
)
def test_memory_beyond_the_state_dict(tmp_path: Path, engine: str, direct: str, size: str) -> None:
    _in_a_process(big_memory, str(tmp_path), engine, direct, size)


def test_writers_that_are_dropped(tmp_path: Path) -> None:
    _in_a_forked_process(dropped, str(tmp_path))


def test_references(tmp_path: Path) -> None:
    _in_a_forked_process(references, str(tmp_path))
