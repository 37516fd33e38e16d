"""Peer sharing: who reads what several ranks need. ``move.load.peers`` reads it.

1. With its load plan every rank sends what it will read, as a table of units: each stands for a piece (``pieces``).
2. The coordinator merges the tables as it merges save plans, and gives each unit that several ranks need a reader.
"""

from __future__ import annotations

import functools
import secrets
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.plan.rows import TENSOR_ROW
from dcpring.plan.strategy import BALANCED

Share = Literal["auto", "host", "all", "off"]

Holders = tuple[tuple[int, ...], ...]
"""Ranks, by host."""

ROUND_BYTES = 32 << 20
"""How many bytes are read before they are shared."""

ROUNDS_IN_MEMORY = 3
"""One round is read while what the one before has left is taken, on some ranks still of that before it."""

_ALIGNMENT = 16
"""Of units in shared memory: that of any element."""


@dataclass(frozen=True)
class Needs:
    """What a rank will read.

    Attributes:
        place: the rank in the process group that shares.
        size: of that group.
        host: the same string on all ranks of a machine.
        share: "host" or "all".
        units: an encoded table: a row for each piece that can be shared.
    """

    place: int
    size: int
    host: str
    share: Share
    units: bytes


class Unit(NamedTuple):
    """A unit that several ranks need, as one of them sees it.

    Attributes:
        row: in this rank's units.
        round: in which it is read.
        offset: in the shared memory of a round; units of a round are sent in this order.
        size: bytes that it has there.
        reader: the rank that reads it from the disk.
        holders: the ranks that need it, by host.
    """

    row: int
    round: int
    offset: int
    size: int
    reader: int
    holders: Holders

    def here(self, rank: int) -> tuple[int, ...]:
        """Those on the host of one of them, who have it in shared memory if they are several."""
        return next(ranks for ranks in self.holders if rank in ranks)

    def carriers(self) -> list[int]:
        """A rank of each host, the reader first. The ranks of a host, and the hosts, take turns from unit to unit."""
        turn = zlib.crc32(b"%d %d" % (self.round, self.offset))
        others = [ranks[turn % len(ranks)] for ranks in self.holders if self.reader not in ranks]
        first = turn % max(len(others), 1)
        return [self.reader, *others[first:], *others[:first]]


class Hop(NamedTuple):
    """A unit goes from one host to another.

    Attributes:
        level: all hops of one come before those of the next.
        is_sent: by this rank; else it receives.
        peer: the other rank.
    """

    level: int
    is_sent: bool
    peer: int


def hops(carriers: Sequence[int], rank: int) -> list[Hop]:
    """What a carrier receives and sends: on each level all that have a unit send it, so that twice as many have it."""
    if rank not in carriers:
        return []
    own, count = carriers.index(rank), len(carriers)
    begin = own.bit_length()
    received = [Hop(begin - 1, False, carriers[own - (1 << begin - 1)])] if own else []
    levels = range(begin, (count - 1).bit_length())
    return received + [Hop(level, True, carriers[own + (1 << level)]) for level in levels if own + (1 << level) < count]


@dataclass(frozen=True)
class Sharing:
    """What the coordinator answers: the rounds that all ranks go through, and this rank's part.

    Attributes:
        rounds: 0: nothing is shared.
        leader: the rank of this host that makes the shared memory.
        room: bytes of shared memory for one round.
        ranks_here: how many ranks are on this host.
        is_far: something goes from host to host.
        sets: of ranks that need the same.
        table: this rank's units, in the order of the rounds: a row of six int32 for each, the last of them the set.
        token: names this load's meeting.
    """

    rounds: int = 0
    leader: int = 0
    room: int = 0
    ranks_here: int = 0
    is_far: bool = False
    sets: list[Holders] = field(default_factory=list)
    table: bytes = b""
    token: str = ""

    @functools.cached_property
    def units(self) -> list[Unit]:
        return [Unit._make((*about, self.sets[at])) for *about, at in struct.iter_unpack("=6i", self.table)]


def units_table(names: list[str], sizes: list[int]) -> bytes:
    """The encoded table of units: each is a row of bytes, rounded up to the alignment."""
    encoding = b"torch.uint8\0torch.strided\0\0\0\0"
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    rows: list[Any] = [(TENSOR_ROW, (size,), (0,), (size,), encoding, len(b"torch.uint8"), 1, 0) for size in aligned]
    return _C.make_table(names, None, rows, bytes(len(names)), _never).encode()


def _never(*_: Any) -> Any:
    raise AssertionError("there are no tensors among the units")


def are_those_of(needs: Sequence[Needs]) -> bool:
    """Whether the group that every planner was given is that of the load."""
    return [need.place for need in needs] == list(range(len(needs))) and {need.size for need in needs} == {len(needs)}


def refuse_group(needs: Sequence[Needs]) -> None:
    raise CheckpointError(
        f"the process_group given to RingLoadPlanner has {needs[0].size} ranks, and is not that of the load, which "
        f"has {len(needs)}; give both the same"
    )


def plan_sharing(needs: Sequence[Needs]) -> list[Sharing]:
    """Gives each unit that several ranks need a reader, evenly by bytes; on each host, or in all."""
    hosts = [need.host for need in needs]
    of_host = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    together = list(of_host.values()) if needs[0].share == "host" else [list(range(len(needs)))]
    groups = [_Group(ranks, needs, hosts) for ranks in together]
    parts = {rank: part for group in groups for rank, part in group.parts()}
    rounds = max(group.rounds for group in groups)
    is_far = any(group.is_far for group in groups)
    rooms = {host: max(group.rooms.get(host, 0) for group in groups) for host in of_host}
    token = secrets.token_hex(8)
    return [
        Sharing(rounds, of_host[host][0], rooms[host], len(of_host[host]), is_far, *parts[rank], token)
        for rank, host in enumerate(hosts)
    ]


class _Group:
    """Ranks that share among themselves.

    Attributes:
        rounds: that they need.
        rooms: bytes of shared memory for one round, by host.
        is_far: something goes from host to host.
    """

    def __init__(self, ranks: list[int], needs: Sequence[Needs], hosts: list[str]) -> None:
        merge = _C.Merge(len(ranks))
        for rank in ranks:
            merge.add(needs[rank].units, b"")
        merge.check(False)
        merge.assign(BALANCED, 0, bytes(4 * len(ranks)), 1)
        sets, units, self._rows = merge.shared()
        self._ranks = ranks
        self._sets = [_by_host([ranks[place] for place in array("I", each)], hosts) for each in sets]
        self.is_far = any(len(each) > 1 for each in self._sets)
        found = list(struct.iter_unpack("=3Q", units))
        readers = _readers(found, [[rank for some in each for rank in some] for each in self._sets])
        rows = [
            (before // ROUND_BYTES, before % ROUND_BYTES, size, reader, at)
            for (before, size, at), reader in zip(found, readers, strict=True)
        ]
        self.rounds = max((number + 1 for number, *_ in rows), default=0)
        self.rooms: dict[str, int] = {}
        ends = [0] * len(sets)
        for _, offset, size, _, at in rows:
            ends[at] = max(ends[at], offset + size)
        for end, each in zip(ends, self._sets, strict=True):
            for host in (hosts[some[0]] for some in each if len(some) > 1):
                self.rooms[host] = max(self.rooms.get(host, 0), end)
        self._units = torch.tensor(rows, dtype=torch.int32).view(-1, 5)

    def parts(self) -> Iterator[tuple[int, tuple[list[Holders], bytes]]]:
        """For each rank its sets and its table."""
        for rank, data in zip(self._ranks, self._rows, strict=True):
            pairs = torch.frombuffer(bytearray(data), dtype=torch.int32).view(-1, 2) if data else _NO_PAIRS
            units = self._units[pairs[:, 1].long()]
            order = (units[:, 0].long() * ROUND_BYTES + units[:, 1]).argsort()
            used, numbers = units[:, 4].unique(return_inverse=True)
            table = torch.cat([pairs[:, :1], units[:, :4], numbers.int().view(-1, 1)], 1)[order]
            yield rank, ([self._sets[at] for at in used.tolist()], table.contiguous().numpy().tobytes())


_NO_PAIRS = torch.empty(0, 2, dtype=torch.int32)


def _by_host(ranks: list[int], hosts: list[str]) -> Holders:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(hosts[rank], []).append(rank)
    return tuple(map(tuple, found.values()))


def _readers(units: Sequence[tuple[int, int, int]], sets: Sequence[Sequence[int]]) -> list[int]:
    """Who reads each unit: ranks take turns in every round, each with units that follow each other in the files.

    Small units that lie between those of another rank would be read by both, as the core reads over small gaps.

    Args:
        units: of each the bytes that are shared before, its size and its set.
        sets: of holders.
    """
    readers = [0] * len(units)
    total: dict[int, int] = {}
    turn: dict[tuple[int, int], tuple[int, int]] = {}
    of_set: dict[tuple[int, int], int] = {}
    for before, size, at in units:
        key = before // ROUND_BYTES, at
        of_set[key] = of_set.get(key, 0) + size
    for number in sorted(range(len(units)), key=lambda number: units[number][0]):
        before, size, at = units[number]
        key = before // ROUND_BYTES, at
        reader, read = turn.get(key, (-1, 0))
        if reader < 0 or (2 * read + size) * len(sets[at]) > 2 * of_set[key]:
            reader, read = min(sets[at], key=lambda holder: total.get(holder, 0)), 0
        readers[number] = reader
        turn[key] = reader, read + size
        total[reader] = total.get(reader, 0) + size
    return readers
