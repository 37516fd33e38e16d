"""The process group, where there is one: who is in it, and how its ranks meet, agree and talk.

Two ways lead from rank to rank. The store of the process group needs no one else at the same time: ``agree`` and
``meet`` go through it, and whoever waits there does so in slices of Python, hears Ctrl-C, and ends by itself. A
collective, ``gather``, needs all ranks of a group at once. It is waited for in slices too, and ends with the group's
timeout, or when a connection ends because a process has.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pathlib
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcpring.errors import CheckpointError
from dcpring.torchside.groups import default_store, device_of, group_of_caller

logger = logging.getLogger("dcpring")

T = TypeVar("T")

_attempts_lock = threading.Lock()
_attempts: Counter[str] = Counter()
"""How often this process has begun each thing that ranks agree on."""

_GRACE_SECONDS = 5.0
"""How long a collective goes on after Ctrl-C: a rank that left one would leave the others waiting in it."""

_FIRST_BYTES = 1024
"""What a gather sends in its first collective; a second one takes the rest, if any rank has more."""


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in a group, None for all; 0 where there is no group."""
    return dist.get_rank(group) if has_group() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """The ranks of a group, None for all; 1 where there is no group."""
    return dist.get_world_size(group) if has_group() else 1


def rank_here() -> int:
    """This process's rank in the group of the ``dcp.save`` or ``dcp.load`` that is calling, as DCP's errors name it."""
    return rank_in(group_of_caller())


def host_id() -> str:
    """The same on all ranks of a machine, and on no other."""
    return f"{socket.gethostname()}/{_boot_id()}"


@functools.cache
def _boot_id() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# ---- through the store ----


def _store() -> dist.Store | None:
    """The store of all processes; None where there is none: without a process group, or with MPI."""
    return default_store() if has_group() else None


def _the_store() -> dist.Store:
    store = _store()
    if store is None:
        raise CheckpointError(
            "the ranks cannot meet: their process group has no store (MPI has none, gloo and NCCL have one)"
            if has_group()
            else "the process groups have been destroyed, and with them the store by which ranks meet"
        )
    return store


def times_begun(what: str) -> int:
    """How often this process has begun something that all ranks do: this is the n-th time."""
    with _attempts_lock:
        _attempts[what] += 1
        return _attempts[what]


def agree(what: str, proposal: str) -> str:
    """What the first rank to ask has proposed, for the n-th time that each does this; "" where there is no store."""
    store = _store()
    if store is None:
        return ""
    return bytes(store.compare_set(f"{what}/{times_begun(what)}", "", proposal)).decode()


def agree_among(members: Sequence[int], what: str, proposal: str) -> str:
    """What the first of some ranks to come proposes, for each time that all of them do; "" where there is no store.

    Nobody waits: who comes when ``n`` times all have come takes part in the next time, whatever it has done before.
    """
    store = _store()
    if store is None:
        return ""
    key = f"{what}/{digest(members)}"
    turn = (int(store.add(f"{key}/came", 1)) - 1) // len(members)
    store.delete_key(f"{key}/{turn - 2}")  # all have left that one
    return bytes(store.compare_set(f"{key}/{turn}", "", proposal)).decode()


def is_first(what: str) -> bool:
    """Whether no other rank of the job has asked this before; True where that cannot be known. Nobody is waited for."""
    key = hashlib.sha256(what.encode()).hexdigest()[:32]
    return _answer(lambda store: int(store.add(f"dcpring/first/{key}", 1)) == 1, True)


def digest(members: Sequence[int]) -> str:
    """A word for some ranks, to make names of."""
    return hashlib.sha1(repr(list(members)).encode(), usedforsecurity=False).hexdigest()[:16]


def _pauses() -> Iterator[float]:
    """How long to sleep before each next look."""
    pause = 0.0005
    while True:
        yield pause
        pause = min(1.3 * pause, 0.1)


class Meeting:
    """Whether all of some ranks have come, within a bounded time: true on all of them that came, or on none.

    The last to come says yes, and whoever has waited for too long says no. The first word is the verdict for all; one
    that comes later finds it. A rank that cannot come says no at once.

    Args:
        key: the same on all ranks, and of no other meeting.
        size: how many ranks are expected.
    """

    def __init__(self, key: str, size: int) -> None:
        self._came, self._left, self._verdict = f"{key}/came", f"{key}/left", f"{key}/verdict"
        self._size = size
        self._is_over = False

    def wait(self, seconds: float, look: Callable[[], None] = lambda: None) -> bool:
        """Comes, and waits for the others. What ends the wait early, as ``look`` may, is raised."""
        store = _store()
        if store is None:
            return False
        deadline = time.monotonic() + seconds
        if int(store.add(self._came, 1)) == self._size:
            return self.settle(True)
        for pause in _pauses():
            if store.check([self._verdict]) or time.monotonic() > deadline:
                break
            look()
            time.sleep(pause)
        return self.settle(False)

    def settle(self, is_on: bool) -> bool:
        """The verdict; this one, if there is none yet."""
        store = _store()
        return store is not None and bytes(store.compare_set(self._verdict, "", "all" if is_on else "some")) == b"all"

    def leave(self) -> None:
        """This rank does not look at it again. The last to leave removes it from the store."""
        store = _store()
        if store is not None and not self._is_over and int(store.add(self._left, 1)) == self._size:
            for key in (self._came, self._left, self._verdict):
                store.delete_key(key)
        self._is_over = True


def counter_of(base: str) -> str:
    """Where the store numbers the meetings at a base; when there will be no more, it can be removed."""
    return f"{base}/now"


def assemble(base: str, size: int, seconds: float, look: Callable[[], None] = lambda: None) -> str:
    """Waits until all have come, and gives a name that no other meeting has had.

    Meetings at one base are numbered by the store, whatever each process has been through before. What ``look`` raises,
    as it is called while this waits, ends the wait.

    Raises:
        TimeoutError: some have not come.
        CheckpointError: there is no store.
    """
    store, now = _the_store(), counter_of(base)
    while True:
        number = bytes(store.compare_set(now, "", "0")).decode()
        name = f"{base}/{number}"
        if not store.check([f"{name}/verdict"]):
            break
        store.compare_set(now, number, str(int(number) + 1))
    meeting = Meeting(name, size)
    try:
        is_on = meeting.wait(seconds, look)
    except BaseException:
        meeting.settle(False)
        raise
    if not is_on:
        raise TimeoutError(f"{store.add(f'{name}/came', 0)} of {size} ranks came within {seconds:.0f} s")
    store.compare_set(now, number, str(int(number) + 1))
    meeting.leave()
    return name


_ANSWER_SECONDS = 10.0
"""How long the store may take to answer. A process whose network is cut would wait for it for ever."""

_unanswered: list[threading.Thread] = []
"""What has asked, and waits. It keeps all others from asking."""


def _answer(ask: Callable[[dist.Store], T], otherwise: T) -> T:
    """What the store answers; ``otherwise`` where there is none, or it cannot be reached."""
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = _store()
            if store is not None:
                answers.append(ask(store))

    if any(thread.is_alive() for thread in _unanswered):
        return otherwise
    thread = threading.Thread(target=run, name="dcpring-ask", daemon=True)
    try:
        thread.start()
        thread.join(_ANSWER_SECONDS)
    except RuntimeError:  # there can be no more threads
        run()
    _unanswered[:] = [thread] if thread.is_alive() else []
    return answers[0] if answers else otherwise


def leave_note(key: str, text: str) -> str:
    """Leaves a text for ranks that will look for it; gives what another has left first."""
    return _answer(lambda store: bytes(store.compare_set(key, "", text)).decode(), text)


def find_note(key: str) -> str:
    """A text that a rank has left; "" if none has, or the store cannot be reached."""
    return _answer(lambda store: bytes(store.get(key)).decode() if store.check([key]) else "", "")


def remove_note(key: str) -> None:
    _answer(lambda store: store.delete_key(key), False)


_QUIET_SECONDS, _ROLL_SECONDS = 2.0, 10.0
"""A roll call is over when nobody has come for so long, or after so long in all."""


def roll_call(key: str, rank: int, size: int, verdict_of: Callable[[list[int] | None], str]) -> str:
    """What has become of ranks that others have lost. Each that has comes, and all get the verdict of one.

    Args:
        key: of this roll call alone.
        verdict_of: says what it means that these ranks have not come; None: the store cannot be reached.
    """
    verdict, by, came = f"{key}/verdict", f"{key}/by", f"{key}/came"
    leave_note(f"{key}/{rank}", "here")
    count = _answer(lambda store: int(store.add(came, 1)), 0)
    if not count:
        return verdict_of(None)
    began = last = time.monotonic()
    while count < size and time.monotonic() < min(last + _QUIET_SECONDS, began + _ROLL_SECONDS):
        found = find_note(verdict)
        if found:
            return found
        before, count = count, _answer(lambda store: int(store.add(came, 0)), count)
        last = last if count == before else time.monotonic()
        time.sleep(0.1)
    while leave_note(by, str(rank)) != str(rank) and time.monotonic() < began + 2 * _ROLL_SECONDS:
        found = find_note(verdict)  # of the one that looks
        if found:
            return found
        time.sleep(0.1)
    missing = [each for each in range(size) if not find_note(f"{key}/{each}")]
    return leave_note(verdict, verdict_of(None if rank in missing else missing))  # the store may have gone meanwhile


def end_roll_call(key: str, size: int) -> None:
    """Removes what was left at one."""
    for name in ("verdict", "by", "came", *range(size)):
        remove_note(f"{key}/{name}")


def name_for(members: Sequence[int], seconds: float) -> str:
    """A name for a group of these ranks that none has had, whatever groups each has been in. All members call this.

    ``dist.new_group`` names a group by how many there are in this process: ranks that are members of different numbers
    of groups wait for each other by different names, for ever.

    Args:
        seconds: how long they wait for each other.

    Raises:
        TimeoutError: some have not come.
    """
    return assemble(f"dcpring/group/{digest(members)}", len(members), seconds)


# ---- collectives ----


class Interrupted(Exception):
    """Ctrl-C, and the others have not come: a gather is left in the middle.

    Attributes:
        error: what the handler of the signal has raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__} while the other ranks were waited for")
        self.error = error


class HeldInterrupt:
    """Ctrl-C is noted while this is entered, and handled at its end, or by ``hear`` when it is urgent.

    Python raises KeyboardInterrupt between any two steps, so also after one of the two collectives of a gather: the
    others would then wait in the second.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._times: list[float] = []

    def __enter__(self) -> HeldInterrupt:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, lambda *_: self._times.append(time.monotonic()))
        return self

    def hear(self) -> None:
        """Handles a Ctrl-C that was pressed twice, or some time ago."""
        if self._times and (len(self._times) > 1 or time.monotonic() > self._times[0] + _GRACE_SECONDS):
            self._times.clear()
            try:
                self._handler(signal.SIGINT, None)
            except BaseException as error:
                raise Interrupted(error) from error

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._times:
                self._handler(signal.SIGINT, None)


_unfinished: list[tuple[dist.Work, Any]] = []
"""Collectives that were left, with all that they use: their group, too, must not go before they have ended."""


def gather(
    group: dist.ProcessGroup, data: bytes, held: HeldInterrupt, look: Callable[[], None] | None = None
) -> list[bytes]:
    """The bytes of all ranks of a group.

    Args:
        held: holds Ctrl-C, as long as that is not urgent.
        look: called about once a second while this waits; what it raises ends the wait.

    Raises:
        RuntimeError: by torch: the connection to a rank has ended, or it did not come within the group's timeout.
        Interrupted: Ctrl-C is urgent.
    """
    wait = _waiting(held, look)
    body = len(data).to_bytes(8, "little") + data
    heads = _all_gather(group, body[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), wait)
    sizes = [8 + int.from_bytes(head[:8], "little") for head in heads]
    tails = [b""] * len(heads)
    if max(sizes) > _FIRST_BYTES:
        tails = _all_gather(group, body[_FIRST_BYTES:].ljust(max(sizes) - _FIRST_BYTES, b"\0"), wait)
    return [(head + tail)[8:size] for head, tail, size in zip(heads, tails, sizes, strict=True)]


def common_bits(
    group: dist.ProcessGroup, data: bytes, held: HeldInterrupt, look: Callable[[], None] | None = None
) -> bytes:
    """The bits that all ranks of a group have set, of as many bytes on each. Else as ``gather``."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))
    work = dist.all_reduce(own, dist.ReduceOp.BAND, group=group, async_op=True)
    _finish(work, _waiting(held, look), group, own)
    return own.cpu().numpy().tobytes()


def _waiting(held: HeldInterrupt, look: Callable[[], None] | None) -> Callable[[], None]:
    """What is called in the wait for a collective."""
    forget_finished()
    looked = time.monotonic()

    def wait() -> None:
        nonlocal looked
        held.hear()
        if look is not None and time.monotonic() > looked + 1:
            look()
            looked = time.monotonic()

    return wait


def _all_gather(group: dist.ProcessGroup, data: bytes, wait: Callable[[], None]) -> list[bytes]:
    device = device_of(group)
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty(len(data), dtype=torch.uint8, device=device) for _ in range(dist.get_world_size(group))]
    _finish(dist.all_gather(parts, own, group=group, async_op=True), wait, group, own, parts)
    return [part.cpu().numpy().tobytes() for part in parts]


def _finish(work: dist.Work | None, wait: Callable[[], None], *used: Any) -> None:
    """Waits for a collective, with all that it uses."""
    assert work is not None
    try:
        for pause in _pauses():
            if work.is_completed():
                break
            wait()
            time.sleep(min(pause, 0.02))
    except BaseException:
        _unfinished.append((work, used))
        raise
    work.wait()


def forget_finished() -> None:
    """Lets go of collectives that were left and have ended since."""
    _unfinished[:] = [left for left in _unfinished if not left[0].is_completed()]
