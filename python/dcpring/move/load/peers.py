"""Peer sharing: what several ranks need is read by one of them.

Who reads what was planned with the load (``plan.sharing``). Then the ranks meet, and share only if all of them have
come. In rounds of bounded size every rank reads its units into memory that the ranks of its host share, and all wait
for each other. Then each takes what it needs from that memory, or, between hosts, through the process group, while the
next round is being read.

The page cache would share as well, but a cold read through it takes two to four times as long as a direct one, more
than sharing saves. Where the disk is fast, so does sharing itself: a copy through shared memory costs more CPU than a
direct read with its checksum. So "auto" shares where reads cross a network, and what ranks would else read in full for
some columns of it.

A rank may fail before it comes, anywhere in DCP, in a planner's or a storage's own code, and then goes to DCP's next
collective. So ranks meet through the store of the process group, and never wait for a rank there for more than some
seconds: if not all have come, each reads for itself, and DCP tells of the failure. Once all have come, what a rank
raises is its next message to all (``base.joint``).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dcpring import _C
from dcpring.base import groups
from dcpring.base.joint import GroupChannel, Joint
from dcpring.errors import CorruptCheckpointError
from dcpring.format.metadata import Placed
from dcpring.move import host_memory
from dcpring.move.host_memory import Rounds
from dcpring.move.load.executor import Executor, ReadStats
from dcpring.move.load.targets import bump_versions
from dcpring.move.load.task import Task
from dcpring.move.load.wanted import BoxRead, CompactPlan, Payload
from dcpring.plan import pieces as cutting
from dcpring.plan.load_planner import RingLoadPlan
from dcpring.plan.pieces import Piece, common_bytes
from dcpring.plan.sharing import ROUNDS_IN_MEMORY, Sharing, Unit, hops
from dcpring.torchside.groups import device_of

logger = logging.getLogger("dcpring")

MEET_SECONDS = 10.0
"""How long ranks wait for all to come. One that comes later costs only the sharing."""


class _Round(NamedTuple):
    """A round that is being read.

    Attributes:
        units: this rank's.
        data: memory for each, by its row.
        result: waits until this rank has read its part.
    """

    units: list[Unit]
    data: dict[int, Tensor]
    result: Callable[[], list[ReadStats]]


class PeerSharing:
    """One rank's part of peer sharing. Either ``run`` or ``fail`` should be called: the others wait, but not for long.

    Args:
        sharing: the coordinator's reply.
        pieces: what each row of the units stands for.
        group: the process group.
    """

    def __init__(self, sharing: Sharing, pieces: list[Piece], group: dist.ProcessGroup) -> None:
        self._sharing = sharing
        self._pieces = pieces
        self._group = group
        self._rank = dist.get_rank(group)
        self._meeting = groups.Meeting(f"dcpring/share/{sharing.token}", dist.get_world_size(group))
        self._joint = Joint(GroupChannel(group), "share reads")
        self._is_one_host = sharing.ranks_here == dist.get_world_size(group)
        self._is_over = False

    def surplus_bytes(self, plan: CompactPlan) -> int:
        """What this rank reads for others alone."""
        own = [self._pieces[unit.row] for unit in self._sharing.units if unit.reader == self._rank]
        used = sum(common_bytes(piece, *plan.match.get(at)[3:]) for piece in own for at in piece.overlaps)
        return sum(piece.size_bytes for piece in own) - used

    def fail(self, error: BaseException) -> None:
        """Tells the others what this rank has raised, if all have come to share; else they need not know."""
        if self._is_over:
            return
        self._is_over = True
        if self._meeting.settle(False):
            self._joint.tell(error)
        self._meeting.leave()

    def run(self, task: Task, plan: CompactPlan, executor: Executor) -> set[int]:
        """Reads what is shared, in rounds. Returns the filled positions; each rank reads the rest for itself."""
        self._plan, self._executor, self._planner = plan, executor, task.planner
        self._stats, self._events, self._meter = task.stats, task.load.events, task.load.meter
        self._filled: set[int] = set()
        self._received: dict[int, int] = {}
        with self._events.span("wait for all", "wait"):
            all_came = self._meeting.wait(MEET_SECONDS)
        if all_came:
            # The others are told of a failure before the thread has ended.
            failed = "a rank has failed that shares what it reads"
            with ThreadPoolExecutor(1, "dcpring-round") as self._pool, self._joint.doing(failed):
                self._share()
        else:
            logger.warning("every rank reads for itself, as not all have come to share within %.0f s", MEET_SECONDS)
        self._is_over = True
        self._meeting.leave()
        own = {unit.row for unit in self._sharing.units}  # what shares nothing is read by each rank
        return self._filled.difference(*(piece.overlaps for row, piece in enumerate(self._pieces) if row not in own))

    def _share(self) -> None:
        with contextlib.ExitStack() as stack:
            rounds = self._shared_memory()
            if rounds is not None:
                stack.callback(rounds.leave)
                self._go_through(rounds)
            with self._events.span("wait for all", "wait"):  # the memory is used until then
                received = self._joint.gather("received", self._received, is_last=True)
        self._stats.sent_bytes += sum(each.get(self._rank, 0) for each in received)

    def _go_through(self, rounds: Rounds) -> None:
        """Shares each round once the one after it has been begun as well."""
        begun: collections.deque[_Round] = collections.deque()
        is_on = True
        for number in range(self._sharing.rounds + 1):
            if number < self._sharing.rounds:
                begun.append(self._begin(rounds, number))
            if number > 0 and is_on:
                with self._events.span(f"peer sharing, round {number}"):
                    is_on = self._share_round(rounds, number - 1, begun.popleft())
            if not is_on:
                break
        for left in begun:
            self._wait(left)

    def _begin(self, rounds: Rounds, number: int) -> _Round:
        """Begins to read a round. All have taken theirs of the one that had its room before: they came to the next."""
        units = [unit for unit in self._sharing.units if unit.round == number]
        room = torch.frombuffer(rounds.room(number), dtype=torch.uint8) if self._sharing.room else torch.empty(0)
        data = {unit.row: self._place_of(unit, room) for unit in units}
        own = [(self._pieces[unit.row], data[unit.row]) for unit in units if unit.reader == self._rank]
        return _Round(units, data, self._pool.submit(self._read_pieces, own).result if own else list)

    def _wait(self, now: _Round) -> None:
        with self._executor.watched():
            self._executor.count(*now.result())

    def _share_round(self, rounds: Rounds, number: int, now: _Round) -> bool:
        """False if all ranks of this host stop, as one is late or has failed: each reads what is left for itself."""
        self._wait(now)
        with self._events.span("wait for all", "wait"):
            if self._is_one_host or self._sharing.is_far:
                rounds.meet(number)
            elif not rounds.come(int(MEET_SECONDS * 1000)):
                logger.warning("ranks of this host read what is left each for itself, as not all came to a round")
                return False
        if self._sharing.is_far:
            self._send(now)
            with self._events.span("wait for all", "wait"):
                self._joint.settle(f"round {number + 1}, sent")
        self._fill(now)
        return True

    def _place_of(self, unit: Unit, room: Tensor) -> Tensor:
        """Memory for a unit: shared, if others on this host take it."""
        size = self._pieces[unit.row].size_bytes
        if len(unit.here(self._rank)) > 1:
            return room[unit.offset : unit.offset + size]
        device = torch.device("cpu") if self._rank == unit.reader else device_of(self._group)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _fill(self, now: _Round) -> None:
        """Takes what this rank needs of a round's units."""
        readers, taken = [], []
        for unit in now.units:
            piece = self._pieces[unit.row]
            readers += [unit.reader] * len(piece.overlaps)
            taken += [(position, piece, now.data[unit.row]) for position in piece.overlaps]
        self._filled.update(position for position, _, _ in taken)
        for reader, size in zip(readers, self._take_pieces(taken), strict=True):
            self._stats.tensor_bytes += size
            if reader != self._rank:
                self._received[reader] = self._received.get(reader, 0) + size
        arrived = sum(self._received.values()) - self._stats.received_bytes
        self._stats.received_bytes += arrived
        self._meter.advance(arrived)

    def _send(self, now: _Round) -> None:
        """Sends and receives what goes from host to host, once to each: by levels, and in the order of the units."""
        device = device_of(self._group)
        levels: dict[int, list[dist.P2POp]] = {}
        arriving: list[tuple[Tensor, Tensor]] = []
        for unit in now.units:
            data = now.data[unit.row]
            path = hops(unit.carriers(), self._rank)
            buffer = data.to(device) if path and unit.reader == self._rank else data
            if path and buffer.device.type != device.type:
                buffer = torch.empty_like(data, device=device)
                arriving.append((data, buffer))
            for hop in path:
                call = dist.isend if hop.is_sent else dist.irecv
                operation = dist.P2POp(call, buffer, group=self._group, group_peer=hop.peer)
                levels.setdefault(hop.level, []).append(operation)
        for level in sorted(levels):
            for work in dist.batch_isend_irecv(levels[level]):
                work.wait()
        for data, buffer in arriving:
            data.copy_(buffer)

    def _shared_memory(self) -> Rounds | None:
        """The rounds, in memory that all ranks of this host map; None on all ranks where one cannot map it."""
        rooms = ROUNDS_IN_MEMORY, self._sharing.room
        memory, problem = host_memory.share(self._joint, self._rank, self._sharing.leader, Rounds.size_of(*rooms))
        if problem:
            logger.warning("every rank reads for itself, as ranks of a host cannot share memory: %s", problem)
            return None
        has_barrier = not self._sharing.is_far
        return Rounds(self._joint, self._sharing.ranks_here, *rooms, memory, is_one_host=has_barrier)

    # ---- pieces ----

    def _read_pieces(self, pieces: list[tuple[Piece, Tensor]]) -> list[ReadStats]:
        """Reads pieces of records into memory, in the thread of the rounds."""
        executor, boxes = self._executor, list[BoxRead]()
        for piece, memory in pieces:
            stored = self._plan.storage.get(piece.row)
            assert stored is not None
            place = Placed(*stored)
            if place.payload_bytes != piece.record_bytes:
                raise CorruptCheckpointError(
                    f"{executor.explain.name(piece.overlaps[0])}: the record has {place.payload_bytes} bytes, its "
                    f"shape and dtype need {piece.record_bytes}",
                    f"{executor.explain.path}/{place.file}",
                    place.payload_offset,
                )
            sizes, offsets, lengths = piece.as_bytes()
            where = executor.inputs.numbers[place.file], place.payload_offset, place.payload_bytes
            source = Payload(*where, place.crcs, None, sizes, torch.uint8)
            boxes.append(BoxRead(piece.overlaps[0], source, offsets, lengths, memory.view(lengths)))
        return [executor.read_once(boxes, executor.options)]

    def _take_pieces(self, taken: list[tuple[int, Piece, Tensor]]) -> list[int]:
        """Fills positions with what they have of pieces that are in memory. Returns the bytes of each."""
        plan = self._plan
        self._executor.explain.filled.append([position for position, _, _ in taken])
        boxes = [plan.match.get(position)[3:] for position, _, _ in taken]
        by_core = [plan.mask[position] and piece.box is None and data.is_cpu for position, piece, data in taken]
        chosen = list(itertools.compress(taken, by_core))
        ranges = [(position, *piece.byte_range) for position, piece, _ in chosen]
        memory = _C.Tensors([data for _, _, data in chosen])
        _C.take_matched(plan.match, plan.storage, plan.tensors, ranges, memory)
        bump_versions(plan.filled(position for position, _, _ in chosen))
        for (position, piece, data), box, is_done in zip(taken, boxes, by_core, strict=True):
            if not is_done:
                with torch.no_grad():
                    cutting.take(piece, data, *box, self._planner.resolve_tensor(plan.items.make(position)))
        return [common_bytes(piece, *box) for (_, piece, _), box in zip(taken, boxes, strict=True)]


@contextlib.contextmanager
def sharing_of(plan: RingLoadPlan, group: dist.ProcessGroup | None) -> Iterator[PeerSharing | None]:
    """This rank's part of peer sharing, as it was planned. Others hear of what is raised within.

    Gives None where every rank reads for itself.
    """
    if plan.sharing is None or not plan.sharing.rounds or group is None:
        yield None
        return
    sharing = PeerSharing(plan.sharing, plan.pieces, group)
    try:
        yield sharing
    except BaseException as error:
        sharing.fail(error)
        raise
