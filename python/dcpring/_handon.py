"""Loading once and handing on: what several ranks need is read by one of them.

1. With its load plan every rank sends what it will read, as a table of units: a unit is one box of one record.
2. The coordinator merges the tables as it merges save plans, and gives each unit that several ranks need a reader.
3. In rounds of bounded size every rank reads its units, puts those that ranks of its host need into memory that they
   share, and tells all how that went. Then it takes what others have read, from that memory, or, between hosts, through
   the process group.

The page cache would hand on as well, but a cold read through it takes two to four times as long as a direct one, more
than handing on saves. Where the disk is fast, so does handing on itself: a copy through shared memory costs more CPU
than a direct read with its checksum. So "auto" hands on where reads cross a network.

A rank that fails says so at the end of the round, and takes part until then: nobody waits for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dcpring import _C, _shared_memory
from dcpring._plan import TENSOR_ROW
from dcpring._strategy import BALANCED
from dcpring._trace.phases import Phases
from dcpring.errors import CheckpointError
from dcpring.options import IOStats
from dcpring.torchside.groups import device_of

logger = logging.getLogger("dcpring")

Share = Literal["auto", "host", "all", "off"]

ROUND_BYTES = 64 << 20
"""How many shared bytes are read before they are handed on; more where one unit is larger. Twice that is shared."""

_ALIGNMENT = 16
"""Of units in shared memory: that of any element."""


@dataclass(frozen=True)
class Needs:
    """What a rank will read.

    Attributes:
        place: the rank in the process group that hands on.
        size: of that group.
        host: the same string on all ranks of a machine.
        share: "host" or "all".
        units: an encoded table: a row for each overlap that can be shared.
    """

    place: int
    size: int
    host: str
    share: Share
    units: bytes


@dataclass(frozen=True)
class Unit:
    """A unit that several ranks need, as one of them sees it.

    Attributes:
        row: in this rank's units.
        round: in which it is read.
        offset: in the shared memory of a round; units of a round are sent in this order.
        size: bytes that it has there.
        reader: the rank that reads it from the disk.
        near: ranks of the reader's host that take it from shared memory, but for the reader.
        away: ranks on other hosts that it is sent to.
    """

    row: int
    round: int
    offset: int
    size: int
    reader: int
    near: tuple[int, ...]
    away: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """What the coordinator answers: the rounds that all ranks go through, and this rank's part.

    Attributes:
        leader: the rank of this host that makes the shared memory.
        room: bytes of shared memory for one round.
    """

    rounds: int = 0
    leader: int = 0
    room: int = 0
    units: list[Unit] = field(default_factory=list)


def units_table(names: list[str], sizes: list[int]) -> bytes:
    """The encoded table of units: each is a row of bytes, rounded up to the alignment."""
    encoding = b"torch.uint8\0torch.strided\0\0\0\0"
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    rows: list[Any] = [(TENSOR_ROW, (size,), (0,), (size,), encoding, len(b"torch.uint8"), 1, 0) for size in aligned]
    return _C.make_table(names, None, rows, bytes(len(names)), _never).encode()


def _never(_: Tensor) -> Any:
    raise AssertionError("there are no tensors among the units")


# ---- the coordinator ----


def plan_sharing(needs: Sequence[Needs]) -> list[Sharing]:
    """Gives each unit that several ranks need a reader, evenly by bytes; on each host, or in all."""
    if [need.place for need in needs] != list(range(len(needs))) or {need.size for need in needs} != {len(needs)}:
        raise CheckpointError(
            f"the process_group given to RingLoadPlanner has {needs[0].size} ranks, and is not that of the load, which "
            f"has {len(needs)}; give both the same"
        )
    hosts = [need.host for need in needs]
    together = [list(range(len(needs)))]
    if needs[0].share == "host":
        together = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    units: dict[int, list[Unit]] = {}
    for ranks in together:
        units |= _share_among(ranks, needs, hosts)
    rounds = _number_densely(units)
    rooms = {host: _room(units[rank] for rank, other in enumerate(hosts) if other == host) for host in set(hosts)}
    return [Sharing(rounds, hosts.index(host), rooms[host], units[rank]) for rank, host in enumerate(hosts)]


def _number_densely(units: dict[int, list[Unit]]) -> int:
    """A unit that is larger than a round leaves numbers without units: closes the gaps; the number of rounds."""
    numbers = sorted({unit.round for part in units.values() for unit in part})
    dense = {number: place for place, number in enumerate(numbers)}
    for rank, part in units.items():
        units[rank] = [replace(unit, round=dense[unit.round]) for unit in part]
    return len(numbers)


def _room(parts: Iterable[list[Unit]]) -> int:
    return max((unit.offset + unit.size for part in parts for unit in part if unit.near), default=0)


def _share_among(ranks: list[int], needs: Sequence[Needs], hosts: list[str]) -> dict[int, list[Unit]]:
    merge = _C.Merge(len(ranks))
    for rank in ranks:
        merge.add(needs[rank].units, b"")
    merge.check(False)
    merge.assign(BALANCED, 0, bytes(4 * len(ranks)), 1)
    result: dict[int, list[Unit]] = {}
    for rank, rows in zip(ranks, merge.shared(), strict=True):
        units = []
        for row, reader_place, holders, before, size in rows:
            reader = ranks[reader_place]
            others = [ranks[holder] for holder in holders if ranks[holder] != reader]
            near = tuple(other for other in others if hosts[other] == hosts[reader])
            away = tuple(other for other in others if hosts[other] != hosts[reader])
            units.append(Unit(row, before // ROUND_BYTES, before % ROUND_BYTES, size, reader, near, away))
        result[rank] = sorted(units, key=lambda unit: (unit.round, unit.offset))
    return result


# ---- every rank ----

Read = Callable[[set[int]], None]
"""Reads the overlaps at these positions into their tensors."""


class Exchange:
    """One rank's part of handing on. Either ``run`` or ``fail`` must be called: the other ranks wait for its word.

    Args:
        sharing: the coordinator's answer.
        positions: the overlap that each row of the units stands for.
        group: the process group.
    """

    def __init__(self, sharing: Sharing, positions: list[int], group: dist.ProcessGroup) -> None:
        self._sharing = sharing
        self._positions = positions
        self._group = group
        self._rank = dist.get_rank(group)
        self._has_spoken = False
        self._phases = Phases()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank has failed, if they do not know yet: they wait for its first word."""
        if not self._has_spoken:
            self._gather(("", _word_of(error)))

    def run(
        self,
        positions: set[int],
        read: Read,
        part: Callable[[int], Tensor],
        stats: IOStats,
        phases: Phases,
        advance: Callable[[int], None],
    ) -> None:
        """Reads the overlaps at all positions: what is shared in rounds, then the rest.

        Args:
            read: reads overlaps into their tensors.
            part: the memory that an overlap fills.
            stats: counts what is sent and received.
            phases: of the load.
            advance: is told of bytes that were received.
        """
        self._read, self._part, self._stats, self._phases, self._advance = read, part, stats, phases, advance
        memory = self._shared_memory()
        if memory is None:
            read(positions)
            return
        units = self._sharing.units
        failure: BaseException | None = None
        for number in range(self._sharing.rounds):
            with phases.span(f"hand-on round {number + 1}"):
                now = [unit for unit in units if unit.round == number]
                room = memory[number % 2]
                self._begin_transfer()
                failure = failure or self._attempt(self._read_own, now, room)
                failure = failure or self._attempt(self._prepare_transfer, now, room)
                self._agree(failure)
                self._transfer()
                failure = self._attempt(self._take, now, room)
        self._agree(failure)  # the memory is used until here
        read(positions - {self._positions[unit.row] for unit in units})

    def _attempt(
        self, action: Callable[[list[Unit], Tensor], None], units: list[Unit], room: Tensor
    ) -> BaseException | None:
        try:
            action(units, room)
        except BaseException as error:  # the others wait for this rank's word: it is raised after that
            return error
        return None

    def _gather(self, word: Any) -> list[Any]:
        self._has_spoken = True
        words: list[Any] = [None] * dist.get_world_size(self._group)
        with self._phases.span("wait for all", "wait"):
            dist.all_gather_object(words, word, group=self._group)
        return words

    def _agree(self, failure: BaseException | None) -> None:
        """Tells all ranks how the round went; raises on all when it failed on one."""
        words = self._gather(None if failure is None else _word_of(failure))
        if failure is not None:
            raise failure
        _raise_first(words)

    def _own_part(self, unit: Unit) -> Tensor:
        return self._part(self._positions[unit.row])

    # ---- on a host ----

    def _shared_memory(self) -> list[Tensor] | None:
        """Memory for two rounds that all ranks of this host map; None on all ranks where one cannot map it."""
        sharing, descriptor, path, failure = self._sharing, -1, "", None
        try:
            if sharing.room and self._rank == sharing.leader:
                descriptor, path = _shared_memory.create(2 * sharing.room)
        except OSError as error:
            failure = _word_of(error)
        try:
            words = self._gather((path, failure))
            _raise_first([word for _, word in words])
            memory, problem = _map(words[sharing.leader][0], 2 * sharing.room)
            problems = [word for word in self._gather(problem) if word]
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if problems:
            logger.warning("every rank reads for itself, as ranks of a host cannot share memory: %s", problems[0])
            return None
        return [memory[: sharing.room], memory[sharing.room :]]

    def _read_own(self, units: list[Unit], room: Tensor) -> None:
        own = [unit for unit in units if unit.reader == self._rank]
        self._read({self._positions[unit.row] for unit in own})
        for unit in own:
            if unit.near:
                part = self._own_part(unit).detach()
                _like(part, room[unit.offset :]).copy_(part)
                self._stats.sent_bytes += part.nbytes * len(unit.near)

    def _take(self, units: list[Unit], room: Tensor) -> None:
        for unit in units:
            if self._rank in unit.near:
                self._fill(unit, room[unit.offset :])

    def _fill(self, unit: Unit, data: Tensor) -> None:
        part = self._own_part(unit)
        with torch.no_grad():
            part.copy_(_like(part, data))
        self._stats.received_bytes += part.nbytes
        self._advance(part.nbytes)
        self._stats.tensor_bytes += part.nbytes

    # ---- between hosts ----

    def _begin_transfer(self) -> None:
        self._operations: list[dist.P2POp] = []
        self._arriving: list[tuple[Unit, Tensor]] = []

    def _prepare_transfer(self, units: list[Unit], _: Tensor) -> None:
        """Makes all buffers before the round's word is given: nothing can fail between that and the transfer."""
        device = device_of(self._group)
        for unit in units:
            if unit.away and unit.reader == self._rank:
                data = self._own_part(unit).detach().to(device).contiguous().flatten().view(torch.uint8)
                sends = [dist.P2POp(dist.isend, data, group=self._group, group_peer=peer) for peer in unit.away]
                self._operations += sends
                self._stats.sent_bytes += data.numel() * len(unit.away)
            elif self._rank in unit.away:
                data = torch.empty(self._own_part(unit).nbytes, dtype=torch.uint8, device=device)
                self._operations.append(dist.P2POp(dist.irecv, data, group=self._group, group_peer=unit.reader))
                self._arriving.append((unit, data))

    def _transfer(self) -> None:
        for work in dist.batch_isend_irecv(self._operations) if self._operations else []:
            work.wait()
        for unit, data in self._arriving:
            self._fill(unit, data)


def _word_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _raise_first(words: Sequence[str | None]) -> None:
    failed = [rank for rank, word in enumerate(words) if word is not None]
    if failed:
        raise CheckpointError(f"rank {failed[0]} could not read what it was to hand on: {words[failed[0]]}")


def _map(word: str, size: int) -> tuple[Tensor, str]:
    """The memory that a word stands for, and what went wrong, or ""."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8), ""
    try:
        return torch.frombuffer(_shared_memory.open_word(word, size), dtype=torch.uint8), ""
    except (OSError, ValueError) as error:
        return torch.empty(0, dtype=torch.uint8), str(error)


def _like(part: Tensor, data: Tensor) -> Tensor:
    """The first of some bytes, as a tensor like the part."""
    return data[: part.nbytes].view(part.dtype).reshape(part.shape)
