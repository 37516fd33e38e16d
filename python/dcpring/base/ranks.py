"""The ranks of a job: a process group of their own, and the operations that they take part in together.

    with ranks.operation("save") as joint:
        state = collect()                               # may raise on one rank: all others learn of it ...
        notes = joint.gather("notes", note_of(state))   # ... here
        joint.run_dcp("cannot save", lambda group: dcp.save(..., process_group=group))

``base.joint`` has how they tell each other. An exception that leaves one of DCP's collectives on one rank alone is the
one thing that cannot be told so, as the others still wait there. Then the group is given up, which ends their wait, and
the next operation makes a new one.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcpring.base import groups
from dcpring.base.joint import Joint, Lost, T, failure_of, joined, together
from dcpring.base.text import spans
from dcpring.base.whose import saying_whose, tell_host
from dcpring.errors import CheckpointError
from dcpring.torchside.groups import address_key, destroy_group, new_group, set_timeout, timeout_of

R = TypeVar("R")

_AGAIN_SECONDS = 300.0
"""How long ranks wait for each other to make a new group in the place of one that was given up, at most."""

_TWIN_SECONDS = 25.0
"""The same for a second group, where all have just told each other that they make it."""


_DESTROYED = "the process groups have been destroyed; close the Checkpointer before that, and make another one after"


class Ranks:
    """The members of a gloo group of its own, or this process alone.

    Args:
        parent: the process group whose members these are; None: all, or this process where there is no group.

    Raises:
        ValueError: this process is no member.
        Lost: not all members have come.

    Attributes:
        rank, world_size: this process's place among them, and their number.
        group: None where this process is alone, and after the group was given up.
        timeout: how long they wait for each other in the group: as in the parent, as long as nothing else is set.
    """

    def __init__(self, parent: dist.ProcessGroup | None = None) -> None:
        members: list[int] = []
        self.timeout = timedelta.max
        if groups.has_group():
            members = dist.get_process_group_ranks(parent or dist.group.WORLD)
            if dist.get_rank() not in members:
                raise ValueError(
                    f"global rank {dist.get_rank()} is no member of the process group given, global {spans(members)}"
                )
            tell_host()
            self.timeout = timeout_of(parent)
        self._begin(members, lambda: groups.name_for(members, self.timeout.total_seconds()))

    def set_timeout(self, timeout: timedelta) -> None:
        """Of the group that there is, and of those that will be made."""
        self.timeout = timeout
        if self.group is not None:
            set_timeout(timeout, self.group)

    def twin(self) -> Ranks:
        """The same ranks with another group: collectives of two threads must not meet in one."""
        twin, base = Ranks.__new__(Ranks), f"{self._name}/twin"
        twin.timeout = self.timeout
        twin._begin(self._members, lambda: twin._assemble(base, _TWIN_SECONDS))
        if twin.rank == 0:
            groups.remove_note(groups.counter_of(base))
        return twin

    def _begin(self, members: list[int], name: Callable[[], str]) -> None:
        self._members = members
        self.rank, self.world_size = members.index(dist.get_rank()) if members else 0, len(members) or 1
        self.group: dist.ProcessGroup | None = None
        self._name = self._lost = self._ended = ""
        self._may_return = False
        if members:
            self._connect(name)

    def _assemble(self, base: str, seconds: float) -> str:
        return groups.assemble(base, self.world_size, seconds, self._check_ended)

    def _check_ended(self) -> None:
        if self._ended:
            raise Lost(self._ended)

    def _connect(self, name: Callable[[], str]) -> None:
        try:
            self._name = name()
        except TimeoutError as error:
            raise Lost(f"not all ranks have come to make a process group: {error}") from error
        self.group = new_group(self._members, self._name, self.timeout)

    @contextlib.contextmanager
    def operation(self, call: str) -> Iterator[Operation]:
        """What all members do together; all of them call it, in the same order. See the module's docstring."""
        with saying_whose(lambda: self._members), joined(Operation(self, call)) as operation:
            yield operation

    def close(self) -> None:
        """Gives the group back, for good. Members that wait for this one get an error."""
        self._lost, self._may_return = self._lost or "this rank has closed it", False
        self._drop()

    def _drop(self) -> None:
        if self.group is not None:
            groups.forget_finished()
            destroy_group(self.group)
            groups.remove_note(address_key(self._name, self.rank))
        self.group = None

    # ---- the channel ----

    def gather(self, data: bytes, is_first: bool, held: groups.HeldInterrupt) -> list[bytes]:
        if not self._members:
            return [data]
        if is_first and self.group is None:
            self._connect_again()
        try:
            return self._run(groups.gather, data, held)
        except Lost:
            if not is_first or self._lost or self._ended:
                raise
        self._connect_again()  # one has given the group up after this one's part in the last operation was over
        return self._run(groups.gather, data, held)

    def common_bits(self, data: bytes, held: groups.HeldInterrupt) -> bytes:
        """The bits that all have set, which are about to ask for that."""
        return self._run(groups.common_bits, data, held) if self._members else data

    def _run(self, collective: Callable[..., R], data: bytes, held: groups.HeldInterrupt) -> R:
        if self.group is None:
            raise Lost(self._lost)
        try:
            return collective(self.group, data, held, self._look)
        except Lost:
            self._drop()
            raise
        except groups.Interrupted as interrupted:
            self.give_up(f"rank {self.rank}: {interrupted}")
            raise
        except (RuntimeError, ValueError) as error:
            raise Lost(self.lose(error)) from error

    def lose(self, error: Exception, what: str = "") -> str:
        """The group is lost, with an error of its own: why, in the same words on all ranks that have lost it.

        Args:
            what: could not be done; "" where that is added to each error.
        """
        note = groups.find_note(self._broken)
        _release_frames(error)
        self._drop()  # which ends the waits of others, so that they come to the roll call as well
        if note:
            return note
        is_late = _is_late(error)
        if not groups.has_group():
            text = _DESTROYED
        elif "gloo" not in str(error):
            text = f"the other ranks cannot be reached any more: {error}"
        else:
            if is_late:
                groups.leave_note(self._late, "yes")
            roll = f"{self._name}/roll"
            text = groups.roll_call(roll, self.rank, self.world_size, lambda missing: self._verdict(missing, error))
        self._lost, self._may_return = text, is_late or groups.find_note(self._late) != ""
        return f"{what}: {text}" if what else text

    def _verdict(self, missing: list[int] | None, error: Exception) -> str:
        """What it means that only these ranks have not lost others, or that nothing is known of them."""
        waited = f"for {self.timeout.total_seconds():.0f} s"
        who = spans(missing) if missing else "all ranks have lost each other"
        if missing is None:
            who = "the other ranks cannot be reached, and the store of the process group does not answer either"
        elif missing and groups.find_note(self._late):
            cure = "give the Checkpointer a longer timeout, if ranks may take that long"
            return f"{who} did not answer {waited} ({cure}): {error}"
        elif missing:
            return f"{who} ended, or closed the Checkpointer: {error}"
        return f"{who}, having waited {waited}: {error}" if _is_late(error) else f"{who}: {error}"

    # ---- a group that is given up, as ranks are no longer in step in it ----

    @property
    def _broken(self) -> str:
        """Where a rank that gives the group up leaves why."""
        return f"{self._name}/broken"

    @property
    def _late(self) -> str:
        """Where a rank says that it has waited for too long."""
        return f"{self._name}/late"

    def _look(self) -> None:
        note = self._ended or groups.find_note(self._broken)
        if note:
            raise Lost(note)

    def check(self) -> None:
        """Raises Lost if a rank has given the group up."""
        if self.group is not None:
            self._look()

    def give_up(self, text: str) -> str:
        """Ends the group, and so the waits of others in it; gives the text of the first rank that has done so."""
        if self.group is None:
            return text
        first = groups.leave_note(self._broken, text)
        self._drop()
        return first

    @contextlib.contextmanager
    def ended(self, text: str) -> Iterator[None]:
        """Gives the group up while another thread of this rank may be in it, which has left it when this is left."""
        if self.group is not None:
            groups.leave_note(self._broken, text)  # before the thread hears of it, and drops the group
        self._ended = text
        yield
        self.give_up(text)
        self._ended = ""

    def _connect_again(self) -> None:
        if (self._lost and not self._may_return) or not groups.has_group():
            raise Lost(self._lost or _DESTROYED)
        self._lost = ""
        name, notes = self._name, (self._broken, self._late)
        seconds = min(_AGAIN_SECONDS, self.timeout.total_seconds())
        self._connect(lambda: self._assemble(f"{name}/again", seconds))
        if self.rank == 0:
            for note in notes:
                groups.remove_note(note)
            groups.end_roll_call(f"{name}/roll", self.world_size)


class Operation(Joint):
    """A Joint of Ranks, which may have DCP's collectives in it.

    Attributes:
        rank: this process's place among them.
    """

    def __init__(self, ranks: Ranks, call: str) -> None:
        super().__init__(ranks, call)
        self.rank = ranks.rank
        self._ranks = ranks

    def common_bits(self, label: str, data: bytes) -> bytes:
        """The bits that all ranks have set, of as many bytes on each: so much is sent, however many ranks there are."""
        with groups.HeldInterrupt() as held:
            self._gather(held, label, None)
            return self._ranks.common_bits(data, held)

    def run_dcp(
        self, label: str, what: str, work: Callable[[dist.ProcessGroup | None], T], is_wanted: bool = True
    ) -> T | None:
        """Runs one of DCP's collectives, whose own exception tells all ranks of each one's.

        Args:
            label: the place in the operation.
            what: could not be done, where it fails.
            work: the call, in the group that it is given; it raises nothing outside of DCP's collective.
            is_wanted: where it is on no rank, nothing is done.
        """
        is_begun = False
        try:
            with groups.HeldInterrupt() as held:  # whose end raises Ctrl-C when the others may be on their way into DCP
                is_begun = any(self._gather(held, label, is_wanted))
            if not is_begun:
                return None
            self._ranks.check()
            return work(self._ranks.group)
        except CheckpointException as error:
            self._is_told = True
            own = error.failures.get(self._ranks.rank)
            if own is not None and isinstance(own[0], KeyboardInterrupt):
                raise own[0] from None
            failures = {rank: failure_of(cause, what) for rank, (cause, _) in error.failures.items()}
            raise together(failures) from error
        except BaseException as error:
            if not is_begun:
                raise
            self._is_told = True  # as far as can be: the others wait for this rank in DCP
            if isinstance(error, Exception) and _is_of_group(error):
                text = self._ranks.lose(error, what)
            else:
                _release_frames(error)
                text = self._ranks.give_up(str(together({self._ranks.rank: failure_of(error, what)})))
            if isinstance(error, Exception):
                raise CheckpointError(text) from error
            raise


def _is_of_group(error: Exception) -> bool:
    """Whether it says no more than that others cannot be reached."""
    if isinstance(error, ValueError):
        return not groups.has_group()
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def _is_late(error: Exception) -> bool:
    return "imed out" in str(error)


def _release_frames(error: BaseException) -> None:
    """Frames of DCP that have ended, and are kept for the traceback, hold the group, and its connections."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__
    del link
    gc.collect()
