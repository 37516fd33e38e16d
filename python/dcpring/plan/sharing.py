"""Who reads what several ranks need: planned as the share of a save is, for ``move.load.handon``.

1. With its load plan every rank sends what it will read, as a table of units: each stands for a piece (``pieces``).
2. The coordinator merges the tables as it merges save plans, and gives each unit that several ranks need a reader.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.plan.strategy import BALANCED
from dcpring.plan.table import TENSOR_ROW

Share = Literal["auto", "host", "all", "off"]

ROUND_BYTES = 32 << 20
"""How many bytes are read before they are handed on."""

ROUNDS_IN_MEMORY = 3
"""One round is read while what the one before has left is taken, on some ranks still of that before it."""

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
        units: an encoded table: a row for each piece that can be shared.
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
        rounds: 0: nothing is handed on.
        leader: the rank of this host that makes the shared memory.
        room: bytes of shared memory for one round.
        is_one_host: all ranks are on this one.
        token: names this load's meeting.
    """

    rounds: int = 0
    leader: int = 0
    room: int = 0
    is_one_host: bool = False
    units: list[Unit] = field(default_factory=list)
    token: str = ""


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
    together = [list(range(len(needs)))]
    if needs[0].share == "host":
        together = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    units: dict[int, list[Unit]] = {}
    for ranks in together:
        units |= _share_among(ranks, needs, hosts)
    rounds = max((unit.round + 1 for part in units.values() for unit in part), default=0)
    rooms = {host: _room(units[rank] for rank, other in enumerate(hosts) if other == host) for host in set(hosts)}
    token = secrets.token_hex(8)
    return [
        Sharing(rounds, hosts.index(host), rooms[host], len(rooms) == 1, units[rank], token)
        for rank, host in enumerate(hosts)
    ]


def _room(parts: Iterable[list[Unit]]) -> int:
    return max((unit.offset + unit.size for part in parts for unit in part if unit.near), default=0)


def _share_among(ranks: list[int], needs: Sequence[Needs], hosts: list[str]) -> dict[int, list[Unit]]:
    merge = _C.Merge(len(ranks))
    for rank in ranks:
        merge.add(needs[rank].units, b"")
    merge.check(False)
    merge.assign(BALANCED, 0, bytes(4 * len(ranks)), 1)
    shared = merge.shared()
    readers = _readers({before: (size, holders) for rows in shared for _, _, holders, before, size in rows})
    result: dict[int, list[Unit]] = {}
    for rank, rows in zip(ranks, shared, strict=True):
        units = []
        for row, _, holders, before, size in rows:
            reader = ranks[readers[before]]
            others = [ranks[holder] for holder in holders if ranks[holder] != reader]
            near = tuple(other for other in others if hosts[other] == hosts[reader])
            away = tuple(other for other in others if hosts[other] != hosts[reader])
            units.append(Unit(row, before // ROUND_BYTES, before % ROUND_BYTES, size, reader, near, away))
        result[rank] = sorted(units, key=lambda unit: (unit.round, unit.offset))
    return result


def _readers(units: dict[int, tuple[int, tuple[int, ...]]]) -> dict[int, int]:
    """Who reads each unit: ranks take turns in every round, each with units that follow each other in the files.

    Small units that lie between those of another rank would be read by both, as the core reads over small gaps.

    Args:
        units: size and holders, by the bytes that are shared before.
    """
    readers: dict[int, int] = {}
    total: dict[int, int] = {}
    turn: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    of_holders: dict[tuple[int, tuple[int, ...]], int] = {}
    for before, (size, holders) in units.items():
        key = before // ROUND_BYTES, holders
        of_holders[key] = of_holders.get(key, 0) + size
    for before in sorted(units):
        size, holders = units[before]
        key = before // ROUND_BYTES, holders
        reader, read = turn.get(key, (-1, 0))
        if reader < 0 or (2 * read + size) * len(holders) > 2 * of_holders[key]:
            reader, read = min(holders, key=lambda holder: total.get(holder, 0)), 0
        readers[before] = reader
        turn[key] = reader, read + size
        total[reader] = total.get(reader, 0) + size
    return readers
