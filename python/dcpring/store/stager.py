"""RingStager: DCP's stager on memory that is kept, and whose copies are made beside training.

The calling thread opens the state; a thread of the stager's copies the tensors. DCP then saves the copy in a thread of
its own, or hands it to a process. A buffer is written to again when that save is over, which is known in one of two
ways: nobody refers to what lies in the buffer, or the thread has ended in which DCP asked for the copy. (A planner or
the traceback of an error may refer to the copy for long after its save.)

DCP's threads are held back until the save before is over. Two that saved at the same time would mix up the collectives
of one group, and its process in the background takes saves in any order and answers whoever reads first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager

from dcpring.base.groups import GroupBefore, agree, digest, rank_in
from dcpring.base.joint import failure_of
from dcpring.base.whose import about_ranks
from dcpring.errors import CheckpointError
from dcpring.move.staging import Opened, SideStreams, StagingBuffer
from dcpring.torchside.dcp import (
    background_process_failure,
    end_background_process,
    forget_background_process,
    future_of_process_save,
    has_background_process,
    is_called_by_executor,
    members_of_process_save,
)

__all__ = ["RingStager"]

logger = logging.getLogger("dcpring")

_TELL_SECONDS = 30.0
"""After so long a wait for a buffer the log says what is waited for."""

_UNASKED_SECONDS = 120.0
"""A copy that nobody has asked for by then is none of ``async_save``'s, whose process takes some time to start."""


class RingStager(AsyncStager):
    """Stages states for ``dcp.async_save``, in a thread or in a process, in memory that is taken once.

        stager = RingStager()
        for batch in loader:
            loss(model, batch).backward()
            stager.synchronize()  # the last copy is complete: the state may change
            optimizer.step()
            if ...:
                response = dcp.async_save(state, storage_writer=RingWriter(path), async_stager=stager)
        response.upload_completion.result()
        stager.close()

    ``async_save`` returns an ``AsyncSaveResponse`` as soon as copying has begun: objects of the state are copied by
    then, tensors may change when ``synchronize`` returns, or when the response's ``staging_completion`` is done.

    The memory is one mapping with one descriptor, whatever the number of tensors. A save in a process
    (``AsyncCheckpointerType.PROCESS``) maps it there and copies nothing. What lies on an accelerator is copied to
    pinned memory on a stream of its own, behind what the calling thread has given to the current stream.

    Args:
        buffers: states that are held at most. With 1 a save waits for the one before to be written; with 2 it can be
            copied meanwhile.
        workers: threads that copy what lies in host memory; default: 2, or one on a single processor.
        unchanged: "trust": parameters of the state that require no gradient are not copied again, unless they are seen
            to have changed (see docs/async.md). "copy", the default, copies everything.

    Raises:
        ValueError: an argument is out of range.
    """

    _synchronize_after_execute = False

    def __init__(
        self, buffers: int = 1, workers: int | None = None, unchanged: Literal["copy", "trust"] = "copy"
    ) -> None:
        for name, value in (("buffers", buffers), ("workers", workers)):
            if value is not None and (not isinstance(value, int) or not 1 <= value <= 64):
                raise ValueError(f"{name}={value!r}: must be an int from 1 to 64")
        if unchanged not in ("copy", "trust"):
            raise ValueError(f'unchanged={unchanged!r}: must be "copy" or "trust"')
        self._most, self._workers = buffers, workers
        self._frozen: Collection[Tensor] | None = () if unchanged == "trust" else None
        self._is_open = True
        self._begin()

    def _begin(self) -> None:
        self._turns: list[Turn] = []
        self._line = Line()
        self._last: Future[None] | None = None
        self._now: BackgroundSave | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._let_go = 0

    @property
    def allocations(self) -> int:
        """How often memory was taken: it stays the same from the second save on, while states have the same sizes."""
        return self._let_go + sum(turn.buffer.allocations for turn in self._turns)

    @property
    def size_bytes(self) -> int:
        """The memory that is held now."""
        return sum(turn.buffer.size_bytes for turn in self._turns)

    def stage(self, state_dict: Any) -> Future[Any]:
        """Begins a copy. The state's tensors must not change until the Future is done.

        Returns:
            A Future of the copy. It is valid until its save by ``async_save`` is over; who asks for the result
            otherwise has it for as long as something refers to its tensors.

        Raises:
            RuntimeError: the stager is closed.
        """
        turn = self._claim()
        try:
            is_sent = renew_background_process()  # when the save whose buffer this was has told how it ended
        except CheckpointError as error:  # which DCP shall hand to whoever waits for the save
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        turn.save = save = (_of_process if is_sent else self._line).join(_UNASKED_SECONDS)
        staged, self._last = StagedFuture(save), save.copied
        try:
            opened = turn.buffer.open(state_dict, SideStreams(), self._frozen)
            self._begin_to_fill(staged, turn.buffer, opened)
        except Exception as error:
            staged.fail(error)
        except BaseException:
            save.failed()
            raise
        return staged

    def _begin_to_fill(self, staged: StagedFuture, buffer: StagingBuffer, opened: Opened) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="dcpring-stage")
        try:
            self._executor.submit(_fill, staged, buffer, opened)
        except RuntimeError:  # no thread can be started: there is none, and what was queued waits for one
            self._executor = None
            raise

    def stage_now(self, state_dict: Any) -> Any:
        """The copy, complete. It is valid until the threads that ``saved_here`` has noted for it have ended."""
        turn = self._claim()
        tree = turn.buffer.stage(state_dict, self._frozen)
        turn.save = self._now = BackgroundSave(0)
        self._now.copied.set_result(None)
        return tree

    def saved_here(self) -> None:
        """This thread saves what ``stage_now`` has copied last, and does nothing else with it."""
        if self._now is not None and self._process == os.getpid():
            self._now.saved_by(threading.current_thread())

    def synchronize(self) -> None:
        """Returns when the last copy is complete, and the state may change. Raises what went wrong with it, once."""
        last, self._last = self._last, None
        if last is not None and self._process == os.getpid():
            try:
                last.result()
            except BaseException:
                if not last.done():  # Ctrl-C has ended the wait, not the copy
                    self._last = last
                raise

    def synchronize_staging(self) -> None:
        """DCP's name for ``synchronize``."""
        self.synchronize()

    def close(self) -> None:
        """Gives the memory back, that of a save that is still being written when it is over."""
        self._is_open = False
        if self._process == os.getpid() and self._executor is not None:
            self._executor.shutdown()
        for turn in self._turns:
            turn.buffer.release()
        self._turns, self._executor, self._last, self._now = [], None, None, None

    def __enter__(self) -> RingStager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _claim(self) -> Turn:
        """A buffer that nobody needs any more."""
        if not self._is_open:
            raise RuntimeError("this RingStager is closed; make another one")
        if self._process != os.getpid():  # the parent's memory and thread are not this process's
            self._begin()
        began, is_told = time.monotonic(), False
        for pause in _pauses():
            free = next((turn for turn in self._turns if turn.is_free), None)
            if free is not None:
                return free
            if len(self._turns) == self._most:
                self._let_go_of_one()
            if len(self._turns) < self._most:
                self._turns.append(Turn(StagingBuffer(self._workers, is_shared=True)))
                return self._turns[-1]
            if not is_told and time.monotonic() > began + _TELL_SECONDS:
                is_told = True
                logger.warning(
                    "staging waits for an earlier save to be written, whose memory it will use; "
                    "RingStager(buffers=%d) lets the next save be copied meanwhile",
                    self._most + 1,
                )
            time.sleep(pause)
        raise AssertionError

    def _let_go_of_one(self) -> None:
        left = next((turn for turn in self._turns if turn.is_left), None)
        if left is not None:
            self._let_go += left.buffer.allocations
            self._turns.remove(left)


class Turn:
    """A buffer, and the save that it holds a copy for."""

    def __init__(self, buffer: StagingBuffer) -> None:
        self.buffer = buffer
        self.save = BackgroundSave(0)
        self.save.copied.set_result(None)

    @property
    def is_free(self) -> bool:
        """Whether the buffer may be written to."""
        return self.save.copied.done() and (self.save.needs_no_copy or not self.buffer.is_used)

    @property
    def is_left(self) -> bool:
        """Whether the buffer is not to be waited for: somebody has the copy, and no save of it will end."""
        return self.save.copied.done() and self.save.is_nobodys


class BackgroundSave:
    """What is known of the save that a copy is made for.

    Args:
        patience: seconds in which somebody is expected to save the copy.
        before: the save that has to be over before this one begins.

    Attributes:
        copied: done when the copy is.
    """

    def __init__(self, patience: float, before: BackgroundSave | None = None) -> None:
        self.copied: Future[None] = Future()
        self._before = None if before is None or before.is_over else before
        self._savers: list[threading.Thread] = []
        self._has_failed = self._is_by_hand = False
        self._until = time.monotonic() + patience

    def failed(self, error: BaseException | None = None) -> None:
        """Nobody has got a copy; the error is for whoever waits for it."""
        self._has_failed = True
        if error is None:
            self.copied.set_result(None)
        else:
            self.copied.set_exception(error)

    def saved_by(self, thread: threading.Thread) -> None:
        """A thread that is saving the copy, and has finished that when it ends."""
        self._savers.append(thread)

    def by_hand(self) -> None:
        """Somebody else has the copy, for as long as he likes."""
        self._is_by_hand = True

    def wait_for_those_before(self) -> None:
        """Called by the thread that saves the copy."""
        if self._before is not None:
            _wait_until(lambda: self._before is None or self._before.is_over)
            self._before = None

    @property
    def is_over(self) -> bool:
        """Whether nobody saves the copy, now or later."""
        return self._is_saved if self._savers else self._has_failed or self.is_nobodys

    @property
    def needs_no_copy(self) -> bool:
        """Whether the copy may change, whoever refers to it."""
        return self._has_failed or (self._is_saved and not self._is_by_hand)

    @property
    def is_nobodys(self) -> bool:
        """Whether no thread of DCP's is going to save it, so that nothing tells its end."""
        return self._is_by_hand or (not self._savers and time.monotonic() > self._until)

    @property
    def _is_saved(self) -> bool:
        return bool(self._savers) and not any(map(_is_at_work, list(self._savers)))


class Line:
    """Saves that begin one after the other, in the order of their copies, which is the same on all ranks."""

    def __init__(self) -> None:
        self._last = BackgroundSave(0)

    def join(self, patience: float) -> BackgroundSave:
        """The next one."""
        self._last = BackgroundSave(patience, self._last)
        return self._last

    @property
    def is_over(self) -> bool:
        """Whether the last one is."""
        return self._last.is_over


_of_process = Line()
"""All that DCP's process saves: there is one, for all stagers."""


def _is_at_work(thread: threading.Thread) -> bool:
    """A thread that asks this itself has come back from what it did before."""
    return thread.is_alive() and thread is not threading.current_thread()


class StagedFuture(Future[Any]):
    """A copy in the making, which notes who takes it."""

    def __init__(self, save: BackgroundSave) -> None:
        super().__init__()
        self._save, self._group = save, GroupBefore()
        self._quiet = threading.local()

    def result(self, timeout: float | None = None) -> Any:
        if not getattr(self._quiet, "is_called_back", False):
            if is_called_by_executor():
                self._save.saved_by(threading.current_thread())
                self._save.wait_for_those_before()
                watch_background_process()
                return self._for_saving()
            self._save.by_hand()
        return super().result(timeout)

    def _for_saving(self) -> Any:
        try:
            copied = super().result()
        except Exception as error:
            copied = uncopied(error)
        self._group.note()
        self._group.require()
        return copied

    def fill(self, buffer: StagingBuffer, opened: Opened) -> None:
        """Makes the copy."""
        try:
            tree = buffer.fill(opened)
        except BaseException as error:
            self.fail(error)
        else:
            self._save.copied.set_result(None)
            self.set_result(tree)

    def fail(self, error: BaseException) -> None:
        """There is no copy."""
        self._save.failed(error)
        self.set_exception(error)

    def add_done_callback(self, fn: Callable[[Future[Any]], Any]) -> None:
        """As a Future does it. A callback that asks for the result, as DCP's does to see an error, does not take it."""

        def call(future: Future[Any]) -> None:
            self._quiet.is_called_back = True
            try:
                fn(future)
            finally:
                self._quiet.is_called_back = False

        super().add_done_callback(call)


def _fill(staged: StagedFuture, buffer: StagingBuffer, opened: Opened) -> None:
    try:
        staged.fill(buffer, opened)
    finally:
        del opened


def uncopied(error: Exception) -> dict[str, Any]:
    """What is to be saved in the place of a state that could not be copied on this rank: all ranks get its error.

    An error before DCP's collectives would leave the others in them, waiting for this rank.
    """
    text = str(error) if isinstance(error, CheckpointError) else f"cannot copy the state: {failure_of(error).text}"
    return {"state": _Uncopied(text)}


class _Uncopied:
    """Raises when it is planned, which DCP does in a collective."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __create_write_items__(self, *_: object) -> None:
        raise CheckpointError(self._text)


# ---- DCP's process in the background ----


def renew_background_process() -> bool:
    """Has all ranks start a new process for ``async_save`` where that of one has died; called by ``stage``.

    DCP goes on sending saves to a process that has died. Starting one is collective, so ranks have to agree for each
    save, and none waits: the first to come says what it has. One that finds its process dead after another has said
    "go" lets this save fail, and with it the processes of all (``watch_background_process``), so that the first to come
    to the next one has none either.

    Returns:
        Whether such a process will save.

    Raises:
        CheckpointError: this rank has no process, and others go on with theirs.
    """
    members = members_of_process_save()
    if members is None:
        return False
    _wait_until(lambda: has_background_process() or _of_process.is_over)  # DCP would start one for each save
    failure, rank = background_process_failure(), members.index(rank_in())
    own = "go" if failure == "" else "start" if failure is None else f"on rank {rank}, of {failure}"
    word = agree(f"dcpring/background/{digest(members)}", own) or own
    if word == "go" != own:
        was = "could not be started" if failure is None else f"has died, of {failure}"
        text = f"the process of rank {rank} that saves in the background {was}; the next save starts another one"
        raise CheckpointError(text + about_ranks(text, members))
    if word not in ("go", "start"):
        logger.warning("the process that saves in the background has died %s; another one is started", word)
    if word != "go":
        _wait_until(lambda: _of_process.is_over)  # what is under way looks for the process when it is sent
        forget_background_process()
    return True


def watch_background_process() -> None:
    """Ends the process if the save fails that is about to be sent to it, in any way that DCP has not told all ranks.

    A connection has ended then, or a rank has not come: the processes cannot reach each other any more, and those of
    other ranks may wait for this one. Called by DCP's thread.
    """
    future = future_of_process_save()
    if future is not None:
        future.__class__ = _FutureOfSentSave


class _FutureOfSentSave(Future[Any]):
    """Tells of a failure when the process has ended: who hears of it may begin the next save at once."""

    def set_exception(self, exception: BaseException | None) -> None:
        if exception is not None and not isinstance(exception, CheckpointException):
            _end_background_process(exception)
        super().set_exception(exception)


def _end_background_process(error: BaseException) -> None:
    if background_process_failure() == "":
        logger.warning(
            "the process that saves in the background has failed alone, or cannot reach those of other ranks, and is "
            "ended, as they may wait for it: %s",
            error,
        )
        end_background_process()


def _wait_until(is_so: Callable[[], bool]) -> None:
    for pause in _pauses():
        if is_so():
            return
        time.sleep(pause)


def _pauses() -> Iterator[float]:
    """How long to sleep before each next look."""
    pause = 0.001
    while True:
        yield pause
        pause = min(1.3 * pause, 0.05)
