"""RingStager: copies for async_save in memory that is kept, and that is not written to while a save needs it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import (
    _C,
    Checkpointer,
    CheckpointError,
    RingReader,
    RingSavePlanner,
    RingStager,
    RingWriter,
    empty_cache,
)
from dcpring.move import staging
from dcpring.store import stager as stagers

SIZE = 1 << 16
WAIT = 60.0
"""Seconds after which something that has to happen has not."""


pytestmark = pytest.mark.usefixtures("group_of_one")


def _state(value: float, size: int = SIZE) -> dict[str, Any]:
    w = torch.full((size,), float(value))
    return {"model": {"w": w, "tied": w, "gaps": torch.full((8, 8), float(value))[:, ::2]}, "step": int(value)}


def _change(state: dict[str, Any], value: float) -> None:
    for tensor in state["model"].values():
        tensor.fill_(value)


def _assert_holds(path: Path, value: float, size: int = SIZE) -> None:
    loaded = {**_state(0, size), "step": 0}
    dcp.load(loaded, storage_reader=RingReader(path))
    assert loaded["step"] == int(value)
    for tensor in loaded["model"].values():
        assert bool((tensor == value).all())


def _save(state: Any, path: Path, stager: Any, **options: Any) -> AsyncSaveResponse:
    options.setdefault("storage_writer", RingWriter(path))
    response: Any = dcp.async_save(state, async_stager=stager, **options)
    assert isinstance(response, AsyncSaveResponse)
    return response


class Held(RingWriter):
    """Writes when it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_writing, self.go = threading.Event(), threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.is_writing.set()
        assert self.go.wait(WAIT)
        return super().write_data(plan, planner)


class Failing(RingWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("writer", [RingWriter, FileSystemWriter])
@pytest.mark.parametrize("planner", [DefaultSavePlanner, RingSavePlanner])
def test_saves_are_copies_in_memory_that_is_taken_once(tmp_path: Path, writer: Any, planner: Any) -> None:
    state = _state(0)
    with RingStager() as stager:
        assert isinstance(stager, AsyncStager)
        for n in range(1, 4):
            _change(state, n)
            state["step"] = n
            path = tmp_path / str(n)
            response = _save(state, path, stager, storage_writer=writer(path), planner=planner())
            state["step"] = -1
            stager.synchronize()
            _change(state, -1)
            response.staging_completion.result(WAIT)
            response.upload_completion.result(WAIT)
        assert stager.allocations == 1
        assert stager.size_bytes == SIZE * 4 + 8 * 4 * 4
    for n in range(1, 4):
        _assert_holds(tmp_path / str(n), n)


def test_a_save_waits_for_the_buffer_of_the_one_before(tmp_path: Path) -> None:
    state, first = _state(1), Held(tmp_path / "1")
    with RingStager() as stager:
        one = _save(state, tmp_path / "1", stager, storage_writer=first)
        stager.synchronize()
        _change(state, 2)
        state["step"] = 2
        assert first.is_writing.wait(WAIT)
        responses: list[AsyncSaveResponse] = []
        other = threading.Thread(target=lambda: responses.append(_save(state, tmp_path / "2", stager)))
        other.start()
        time.sleep(0.2)  # a save that did not wait would have returned, and have written into the first one's memory
        assert not responses and other.is_alive()
        first.go.set()
        other.join(WAIT)
        for response in (one, *responses):
            response.upload_completion.result(WAIT)
        assert stager.allocations == 1
    _assert_holds(tmp_path / "1", 1)
    _assert_holds(tmp_path / "2", 2)


def test_with_two_buffers_the_next_save_begins(tmp_path: Path) -> None:
    state, held = _state(1), [Held(tmp_path / str(n)) for n in (1, 2)]
    with RingStager(buffers=2) as stager:
        responses = []
        for n, writer in enumerate(held, 1):
            _change(state, n)
            state["step"] = n
            responses.append(_save(state, tmp_path / str(n), stager, storage_writer=writer))
            stager.synchronize()
        assert held[0].is_writing.wait(WAIT) and not responses[0].upload_completion.done()
        _change(state, -1)
        for writer in held:
            writer.go.set()
        for response in responses:
            response.upload_completion.result(WAIT)
        state["step"] = 3
        _change(state, 3)
        _save(state, tmp_path / "3", stager).upload_completion.result(WAIT)
        assert stager.allocations == 2
    for n in (1, 2, 3):
        _assert_holds(tmp_path / str(n), n)


class Noting(RingWriter):
    begun: ClassVar[list[str]] = []

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.begun.append(Path(self.path).name)
        return super().write_data(plan, planner)


def test_saves_are_written_one_after_the_other(tmp_path: Path) -> None:
    """Two at the same time would mix up their collectives: ranks write at different speeds."""
    state, held = _state(1), Held(tmp_path / "0")
    Noting.begun.clear()
    with RingStager(buffers=4) as stager:
        responses = [_save(state, tmp_path / "0", stager, storage_writer=held)]
        for n in (1, 2, 3):
            responses.append(_save(state, tmp_path / str(n), stager, storage_writer=Noting(tmp_path / str(n))))
            stager.synchronize()
        assert held.is_writing.wait(WAIT)
        time.sleep(0.2)  # a save that did not wait would have begun
        assert not Noting.begun
        held.go.set()
        for response in responses:
            response.upload_completion.result(WAIT)
        assert Noting.begun == ["1", "2", "3"]


def test_a_planner_that_is_used_again_keeps_no_buffer(tmp_path: Path) -> None:
    """It refers to what it has planned until its next save, which needs the buffer."""
    state, planner = _state(1), RingSavePlanner()
    with RingStager() as stager:
        for n in (1, 2, 3):
            _change(state, n)
            state["step"] = n
            _save(state, tmp_path / str(n), stager, planner=planner).upload_completion.result(WAIT)
            _assert_holds(tmp_path / str(n), n)
        assert stager.allocations == 1


def test_an_error_that_is_kept_keeps_no_buffer(tmp_path: Path) -> None:
    """Its traceback refers to the copy."""
    state, kept = _state(1), []
    with RingStager() as stager:
        for _ in range(2):
            response = _save(state, tmp_path / "bad", stager, storage_writer=Failing(tmp_path / "bad"))
            kept.append(response)
            with pytest.raises(BaseException, match="the disk is gone"):
                response.upload_completion.result(WAIT)
        _save(state, tmp_path / "good", stager).upload_completion.result(WAIT)
        assert stager.allocations == 1
    _assert_holds(tmp_path / "good", 1)


def test_what_was_taken_by_hand_is_never_written_to() -> None:
    state = _state(1)
    with RingStager() as stager:
        first = stager.stage(state).result(WAIT)
        view = first["model"]["w"][5:]
        _change(state, 2)
        second = stager.stage(state).result(WAIT)
        assert first["model"]["w"][0] == 1 and second["model"]["w"][0] == 2
        del first, second
        _change(state, 3)
        third = stager.stage(state).result(WAIT)
        assert view[0] == 1 and third["model"]["w"][0] == 3


def test_memory_of_another_layout_is_not_shared_with_what_somebody_has() -> None:
    with RingStager() as stager:
        kept = stager.stage({"a": torch.ones(1000)}).result(WAIT)["a"]
        other = stager.stage({"a": torch.zeros(10, 10)}).result(WAIT)
        del other
        stager.stage({"a": torch.zeros(20, 10)}).result(WAIT)
        assert bool((kept == 1).all())


def test_a_copy_that_nobody_asks_for_is_left() -> None:
    with RingStager() as stager:
        unasked = stager.stage(_state(1))
        stager.synchronize()
        stager.stage(_state(2)).result(WAIT)
        assert unasked.result(WAIT)["model"]["w"][0] == 1


def test_an_async_save_that_fails_at_its_start_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy, which the error that is kept refers to, has a turn that no thread will begin."""
    monkeypatch.setattr(stagers, "_UNASKED_SECONDS", 0.2)
    with RingStager() as stager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            with pytest.raises(RuntimeError, match="can't start new thread") as kept:
                _save(_state(1), tmp_path, stager)
        _save(_state(2), tmp_path, stager).upload_completion.result(WAIT)
        dcp.save(_state(3), storage_writer=RingWriter(tmp_path / "other"))
        assert kept.value is not None
    _assert_holds(tmp_path, 2)


def test_an_async_save_that_fails_at_its_start_keeps_no_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RingStager() as stager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            with contextlib.suppress(RuntimeError):
                _save(_state(1), tmp_path, stager)
        _save(_state(2), tmp_path, stager).upload_completion.result(WAIT)
        assert stager.allocations == 1
    _assert_holds(tmp_path, 2)


def test_waiting_for_long_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stagers, "_TELL_SECONDS", 0.05)
    held = Held(tmp_path)
    with RingStager() as stager:
        response = _save(_state(1), tmp_path, stager, storage_writer=held)
        assert held.is_writing.wait(WAIT)
        release = threading.Timer(0.3, held.go.set)
        release.start()
        stager.stage(_state(2)).result(WAIT)
        response.upload_completion.result(WAIT)
    assert "RingStager(buffers=2)" in caplog.text


WRITES: dict[str, Any] = {
    "a tensor": lambda state: state["model"]["w"].add_(1),
    "one with gaps": lambda state: state["model"]["gaps"].add_(1),
    "sparse": lambda state: state["sparse"].mul_(2),
    "a subclass": lambda state: state["wrapped"].add_(1),
    "a DTensor": lambda state: state["dtensor"].add_(1),
    "the part of one": lambda state: state["dtensor"].to_local().add_(1),
}
KEYS = {
    **{"a tensor": "'model.tied', 'model.w'", "one with gaps": "'model.gaps'", "sparse": "'sparse'"},
    **{"a subclass": "'wrapped'", "a DTensor": "'dtensor'", "the part of one": "'dtensor'"},
}


class Wrapped(torch.Tensor):
    """A subclass of which dcpring knows nothing."""


def _all_kinds() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,))
    return {
        **{**_state(1), "sparse": torch.eye(3).to_sparse(), "wrapped": torch.ones(3).as_subclass(Wrapped)},
        "dtensor": distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)]),
    }


@pytest.fixture
def while_copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Does something when tensors have been copied, and the copy has not come to its end."""
    has_copied, may_end, copy = threading.Event(), threading.Event(), staging._C.copy_tensors

    def slow(*args: Any) -> None:
        copy(*args)
        has_copied.set()
        assert may_end.wait(WAIT)

    def do(work: Callable[[], Any]) -> None:
        assert has_copied.wait(WAIT)
        with torch.no_grad():
            work()
        may_end.set()

    with monkeypatch.context() as patch:
        patch.setattr(staging._C, "copy_tensors", slow)
        yield do
        may_end.set()


@pytest.mark.parametrize("what", WRITES)
def test_a_state_that_changes_while_it_is_copied_is_an_error(tmp_path: Path, while_copying: Any, what: str) -> None:
    """As without ``synchronize``, and committed without a word."""
    state, words = _all_kinds(), f"{KEYS[what]} changed while the state was copied.*; call synchronize"
    with RingStager() as stager:
        response = _save(state, tmp_path, stager)
        while_copying(lambda: WRITES[what](state))
        with pytest.raises(CheckpointError, match=words):
            stager.synchronize()
        with pytest.raises(CheckpointException, match=words):
            response.upload_completion.result(WAIT)
        assert not (tmp_path / ".metadata").exists()
        _save(_all_kinds(), tmp_path, stager).upload_completion.result(WAIT)


def test_writing_what_is_there_is_no_change(tmp_path: Path, while_copying: Any) -> None:
    """As DistributedDataParallel does with buffers in each forward pass."""
    state = {"x": torch.tensor([1.0, float("nan")]), "z": torch.ones(3, dtype=torch.complex64).conj()}
    with RingStager() as stager:
        response = _save(state, tmp_path, stager)
        while_copying(lambda: [tensor.copy_(tensor.clone()) for tensor in state.values()])
        response.upload_completion.result(WAIT)


def test_a_checkpointer_notices_a_state_that_changes(tmp_path: Path, while_copying: Any) -> None:
    model = torch.nn.Linear(3, 3)
    with Checkpointer(tmp_path, {"model": model}) as checkpointer:
        handle = checkpointer.save(1, blocking=False, async_staging=True)
        while_copying(lambda: model.weight.add_(1))
        with pytest.raises(CheckpointError, match=r"'model\.weight' changed while the state was copied"):
            handle.wait()
        checkpointer.save(2, blocking=False, async_staging=True)
        checkpointer.synchronize()
        with torch.no_grad():
            model.weight.add_(1)
        checkpointer.wait()
        assert checkpointer.steps() == [2]


def test_an_error_while_copying_is_raised_by_all_that_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _state(1)
    with RingStager() as stager, monkeypatch.context() as context:

        def fail(*_: Any) -> None:
            raise MemoryError("there is none")

        context.setattr(staging._C, "copy_tensors", fail)
        response = _save(state, tmp_path / "bad", stager)
        with pytest.raises(MemoryError, match="there is none"):
            stager.synchronize()
        with pytest.raises(CheckpointException, match="cannot copy the state: MemoryError: there is none"):
            response.upload_completion.result(WAIT)
        context.undo()
        _save(state, tmp_path / "good", stager).upload_completion.result(WAIT)
    _assert_holds(tmp_path / "good", 1)


def test_without_a_thread_to_copy_in_the_calling_one_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with RingStager() as stager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            staged = stager.stage(_state(1))
            assert staged.done()
        assert staged.result()["model"]["w"][0] == 1
        assert stager.stage(_state(2)).result(WAIT)["model"]["w"][0] == 2


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_error_that_is_kept_keeps_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, kept = _state(1), []
    dropped = weakref.ref(state["model"]["w"])
    with RingStager() as stager:
        with monkeypatch.context() as patch:
            patch.setattr(staging._C, "copy_tensors", _no_copy)
            kept.append(_save(state, tmp_path, stager).upload_completion.exception(WAIT))
            kept.append(stager.stage(state).exception(WAIT))
        del state
        _save(_state(2), tmp_path, stager).upload_completion.result(WAIT)
        gc.collect()
        assert all(kept) and dropped() is None


def _no_copy(*_: Any) -> None:
    raise MemoryError("there is none")


@pytest.mark.parametrize("options", [{"buffers": 0}, {"buffers": 1.5}, {"workers": 0}, {"workers": 65}])
def test_arguments_out_of_range(options: Any) -> None:
    with pytest.raises(ValueError, match="must be an int from 1 to 64"):
        RingStager(**options)


def test_a_closed_stager_says_so() -> None:
    stager = RingStager()
    stager.close()
    stager.close()
    with pytest.raises(RuntimeError, match="closed"):
        stager.stage({})


# ---- its memory ----


def _mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:dcpring" in line]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_twenty_thousand_tensors_take_one_descriptor_and_one_mapping() -> None:
    state = {"model": {str(n): torch.full((8,), float(n)) for n in range(20_000)}}
    gc.collect()
    before, mapped = _descriptors(), len(_mappings())
    with RingStager() as stager:
        staged = stager.stage(state).result(WAIT)
        assert _descriptors() == before + 1 and len(_mappings()) == mapped + 1
        pickled = ForkingPickler.dumps(staged)
        assert _descriptors() <= before + 4, "the pickle holds one more, and who serves it a socket"
        del staged, pickled
    assert len(_mappings()) == mapped


def test_close_gives_memory_back_that_a_forked_process_has_mapped(tmp_path: Path) -> None:
    with RingStager() as stager:
        _save({"w": torch.ones(1 << 22)}, tmp_path, stager).upload_completion.result(WAIT)
        storage = stager._slots[0].buffer._arena._mapping.blocks[0].storage
        descriptor = os.dup(storage._share_fd_cpu_()[0])
        del storage
        assert os.fstat(descriptor).st_blocks * 512 >= 16 << 20
        while any(not slot.is_free for slot in stager._slots):  # DCP's thread is ending
            time.sleep(0.001)
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def _stage_in_a_child(stager: RingStager, sent: Any) -> None:
    staged = stager.stage(_state(2, 8)).result(WAIT)  # small: torch's own threads do not outlive a fork
    sent.put((float(staged["model"]["w"][0]), stager.allocations))


def test_a_forked_process_takes_memory_of_its_own() -> None:
    fork = mp.get_context("fork")
    with RingStager() as stager:
        staged = stager.stage(_state(1, 8)).result(WAIT)
        sent = fork.SimpleQueue()
        child = fork.Process(target=_stage_in_a_child, args=(stager, sent))
        child.start()
        assert sent.get() == (2.0, 1)
        child.join(WAIT)
        assert float(staged["model"]["w"][0]) == 1


def test_without_shared_memory_it_is_ordinary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with RingStager() as stager:
        _save(_state(1), tmp_path, stager).upload_completion.result(WAIT)
    _assert_holds(tmp_path, 1)


def test_ctrl_c_while_copying() -> None:
    """The copy in this thread ends."""
    source = torch.ones(64 << 20)
    handles = _C.Tensors([source] * 80)  # 20 GiB to copy, of one and into one
    main = threading.main_thread().ident
    assert main is not None
    begun = threading.Event()

    def interrupt() -> None:
        assert begun.wait(WAIT)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            begun.set()
            _C.copy_tensors(handles, handles, b"\1" * 80, 1)
    finally:
        thread.join()


# ---- objects ----


def test_objects_are_copied_at_once(tmp_path: Path) -> None:
    """The loop goes on counting before the tensors are copied."""
    history = [1, [2]]
    with RingStager() as stager:
        future: Future[Any] = stager.stage({"history": history, "model": {"w": torch.ones(3)}})
        history[1].append(3)  # type: ignore[attr-defined]
        assert future.result(WAIT)["history"] == [1, [2]]


# ---- RingWriter without a stager ----


def test_a_writer_stages_into_memory_that_goes_with_its_save(tmp_path: Path) -> None:
    _give_back_memory()
    state, writer, size = _state(1, 1 << 24), Held(tmp_path), 64 << 20
    before = _anonymous_bytes()
    future: Any = dcp.async_save(state, storage_writer=writer)
    _change(state, 2)
    assert writer.is_writing.wait(WAIT)
    assert not _mappings(), "nobody else maps it"
    assert _anonymous_bytes() >= before + size
    writer.go.set()
    future.result(WAIT)
    del future
    deadline = time.monotonic() + WAIT
    while _anonymous_bytes() >= before + size // 2 and time.monotonic() < deadline:
        _give_back_memory()  # DCP of some versions leaves the state in a cycle
        time.sleep(0.01)
    assert _anonymous_bytes() < before + size // 2
    _assert_holds(tmp_path, 1, 1 << 24)


def _give_back_memory() -> None:
    """All that nobody uses, also what malloc would give out again."""
    gc.collect()
    empty_cache()
    ctypes.CDLL(None).malloc_trim(0)


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def test_a_writer_keeps_its_memory_where_it_is_asked_to(tmp_path: Path) -> None:
    """Stock's raises on a machine without an accelerator."""
    writer, planner = RingWriter(tmp_path, cache_staged_state_dict=True), RingSavePlanner()
    state = _state(0)
    for n in (1, 2, 3):
        _change(state, n)
        state["step"] = n
        future: Any = dcp.async_save(state, checkpoint_id=tmp_path / str(n), storage_writer=writer, planner=planner)
        _change(state, -1)
        future.result(WAIT)
        _assert_holds(tmp_path / str(n), n)
    assert writer._stager is not None and writer._stager.allocations == 1


def test_what_a_writer_staged_by_hand_is_never_written_to(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, cache_staged_state_dict=True)
    first = writer.stage(_state(1))
    second = writer.stage(_state(2))
    assert float(first["model"]["w"][0]) == 1 and float(second["model"]["w"][0]) == 2
