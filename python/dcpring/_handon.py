"""Loading once and handing on: what several ranks need is read by one of them.

On one host the page cache hands on: the reader reads through it, and the others find the bytes there. That costs one
copy, where sending costs two and a connection. Between hosts the process group does, where that is asked for.

1. With its load plan every rank sends what it will read, as a table of units: a unit is one box of one record.
2. The coordinator merges the tables as it merges save plans, and gives each unit that several ranks need a reader.
3. In rounds of bounded size, every rank reads its units; all tell each other how that went; what was read is sent,
   received, or read from the page cache.

A rank that fails says so at the end of the round, and takes part until then: nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dcpring import _C
from dcpring._plan import TENSOR_ROW
from dcpring.errors import CheckpointError
from dcpring.options import IOStats

Share = Literal["host", "all", "off"]

ROUND_BYTES = {"host": 2 << 30, "all": 256 << 20}
"""How many shared bytes are read before they are handed on: till then they stay in the page cache, or in buffers."""

_BALANCED = 0


@dataclass(frozen=True)
class Needs:
    """What a rank will read.

    Attributes:
        place: the rank in the process group that hands on.
        size: of that group.
        host: the same string on all ranks of a machine.
        units: an encoded table: a row for each overlap that can be shared.
    """

    place: int
    size: int
    host: str
    units: bytes


@dataclass(frozen=True)
class Unit:
    """A unit that several ranks need, as one of them sees it.

    Attributes:
        row: in this rank's units.
        round: in which it is read.
        reader: the rank that reads it from the disk.
        peers: ranks on other hosts that it is sent to, when this rank is the reader.
        cached: whether it is handed on through the page cache: to this rank, or, when it is the reader, by it.
        order: in which all ranks send and receive.
    """

    row: int
    round: int
    reader: int
    peers: tuple[int, ...]
    cached: bool
    order: int


@dataclass(frozen=True)
class Sharing:
    """What the coordinator answers: the rounds that all ranks go through, and this rank's part."""

    rounds: int
    units: list[Unit] = field(default_factory=list)


def units_table(names: list[str], sizes: list[int]) -> bytes:
    """The encoded table of units: each is a row of bytes."""
    encoding = b"torch.uint8\0torch.strided\0\0\0\0"
    rows = [(TENSOR_ROW, (size,), (0,), (size,), encoding, len(b"torch.uint8"), 1, 0) for size in sizes]
    return _C.make_table(names, None, list(rows), bytes(len(names)), None).encode()  # type: ignore[arg-type]


def plan_sharing(needs: Sequence[Needs], share: Share) -> list[Sharing]:
    """Gives each unit that several ranks need a reader, evenly by bytes; on each host, or in all."""
    if [need.place for need in needs] != list(range(len(needs))) or {need.size for need in needs} != {len(needs)}:
        raise CheckpointError(
            f"the process_group given to RingLoadPlanner has {needs[0].size} ranks, and is not that of the load, which "
            f"has {len(needs)}; give both the same"
        )
    merge = _C.Merge(len(needs))
    for need in needs:
        merge.add(need.units, b"")
    merge.check(False)
    merge.assign(_BALANCED, 0, bytes(4 * len(needs)), 1)
    shared = merge.shared()
    limit = ROUND_BYTES[share] * (len({need.host for need in needs}) if share == "host" else 1)
    rounds = max((before // limit + 1 for rows in shared for _, _, _, before in rows), default=0)
    hosts = [need.host for need in needs]
    return [
        Sharing(rounds, [_unit(rank, shared_row, hosts, limit) for shared_row in sorted(rows, key=lambda row: row[3])])
        for rank, rows in enumerate(shared)
    ]


def _unit(rank: int, shared: tuple[int, int, tuple[int, ...], int], hosts: list[str], limit: int) -> Unit:
    row, reader, holders, before = shared
    near = [other for other in holders if hosts[other] == hosts[reader]]
    away = tuple(other for other in holders if hosts[other] != hosts[reader]) if rank == reader else ()
    return Unit(row, before // limit, reader, away, rank in near and len(near) > 1, before)


Read = Callable[[set[int], bool], None]
"""Reads the overlaps at these positions; True: through the page cache."""


class Exchange:
    """One rank's part of handing on.

    Args:
        sharing: the coordinator's answer.
        positions: the overlap that each row of the units stands for.
        group: the process group.
        read: reads overlaps into their tensors.
        part: the memory that an overlap fills.
    """

    def __init__(
        self,
        sharing: Sharing,
        positions: list[int],
        group: dist.ProcessGroup,
        read: Read,
        part: Callable[[int], Tensor],
        stats: IOStats,
    ) -> None:
        self._rounds = sharing.rounds
        self._units = sharing.units
        self._positions = positions
        self._group = group
        self._read = read
        self._part = part
        self._stats = stats
        self._rank = dist.get_rank(group)

    def run(self, positions: set[int]) -> None:
        """Reads the overlaps at all positions: what is shared in rounds, then the rest."""
        rest = positions - {self._positions[unit.row] for unit in self._units}
        failure: BaseException | None = None
        for number in range(self._rounds):
            units = [unit for unit in self._units if unit.round == number]
            own = [unit for unit in units if unit.reader == self._rank]
            if failure is None:
                failure = self._attempt([unit for unit in own if unit.cached], buffered=True)
            if failure is None:
                failure = self._attempt([unit for unit in own if not unit.cached], buffered=False)
            self._agree(failure)
            self._transfer(units)
            failure = self._attempt([u for u in units if u.cached and u.reader != self._rank], buffered=False)
        if failure is not None:
            raise failure
        self._read(rest, False)

    def _attempt(self, units: list[Unit], buffered: bool) -> BaseException | None:
        try:
            self._read({self._positions[unit.row] for unit in units}, buffered)
        except BaseException as error:  # the others wait for this rank's word: it is raised after that
            return error
        return None

    def _agree(self, failure: BaseException | None) -> None:
        """Tells all ranks how the round went; raises on all when it failed on one."""
        word = None if failure is None else f"{type(failure).__name__}: {failure}"
        words: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(words, word, group=self._group)
        if failure is not None:
            raise failure
        failed = [rank for rank, other in enumerate(words) if other is not None]
        if failed:
            raise CheckpointError(f"rank {failed[0]} could not read what it was to hand on: {words[failed[0]]}")

    # ---- between hosts ----

    def _transfer(self, units: list[Unit]) -> None:
        device = _device_of(self._group)
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, Tensor]] = []
        for unit in units:
            part = self._part(self._positions[unit.row])
            if unit.peers:
                data = _as_bytes(part, device)
                operations += [dist.P2POp(dist.isend, data, group=self._group, group_peer=peer) for peer in unit.peers]
                self._stats.sent_bytes += data.numel() * len(unit.peers)
            elif unit.reader != self._rank and not unit.cached:
                room = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
                operations.append(dist.P2POp(dist.irecv, room, group=self._group, group_peer=unit.reader))
                arriving.append((room, part))
                self._stats.received_bytes += part.nbytes
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        with torch.no_grad():
            for room, part in arriving:
                part.copy_(room.view(part.dtype).view(part.shape) if part.dim() else room.view(part.dtype)[0])
                self._stats.tensor_bytes += part.nbytes


def _as_bytes(part: Tensor, device: torch.device) -> Tensor:
    return part.detach().to(device).contiguous().flatten().view(torch.uint8)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must lie for the group to send them."""
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0])
