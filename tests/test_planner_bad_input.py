"""Plans, replies and storage indices that are garbled, or wrongly typed: errors, never a crash, and nothing leaks."""

from __future__ import annotations

import gc
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcpring import _C, RingSavePlanner
from dcpring.errors import CheckpointError
from dcpring.format.properties import encode_properties
from dcpring.plan.items import Items, SentItems
from dcpring.plan.messages import LocalMessage, RingPlan

ERRORS = (ValueError, CheckpointError, TypeError, OverflowError, MemoryError, SystemError)
ENCODING, DTYPE_BYTES = encode_properties(TensorProperties(dtype=torch.float32))


def row(size: Any = (4, 2), offsets: Any = (0, 0), lengths: Any = (4, 2), **changed: Any) -> tuple[Any, ...]:
    kind, item_bytes, encoding = changed.get("kind", 2), changed.get("item_bytes", 4), changed.get("encoding", ENCODING)
    return kind, size, offsets, lengths, encoding, changed.get("dtype_bytes", DTYPE_BYTES), item_bytes, 2


def make(values: dict[str, Any]) -> _C.Table:
    return _C.make_table(list(values), None, list(values.values()), bytes(len(values)), lambda tensor: row())


def plan() -> bytes:
    chunks = [row((8, 2), (start, 0), (4, 2)) for start in (0, 4)]
    return make({"step": None, "weights": chunks, "scalar": row((), (), ()), "elsewhere": ..., "größe": row()}).encode()


def storage_index() -> bytes:
    made = _C.StorageIndex(3)
    made.put(
        [("__0_0.distcp", 0, 0, 100, 64, 8, b"crc!"), ("f", 1, 100, 50, 100, 50, None), ("f", 2, 150, 9, 0, 0, None)]
    )
    return made.encode()


def with_crc(data: bytes) -> bytes:
    return data[:4] + zlib.crc32(data[8:]).to_bytes(4, "little") + data[8:]


def mutations(data: bytes, count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(8, len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        found.append(with_crc(bytes(changed[: rng.randrange(8, len(data) + 1) if rng.random() < 0.2 else len(data)])))
    return found


def look_at(table: _C.Table) -> None:
    """Everything that Python does with a table."""
    table.encode(), table.types(), table.flags(), table.sizes()
    encodings = table.properties()
    for index in range(len(table)):
        try:
            table.row(index)
        except UnicodeDecodeError:
            continue
    for use in (table.names, lambda: table.pickle(None, [b"N"] * len(encodings), b"N", b"N", True)):
        try:
            use()
        except ERRORS:
            continue


def coordinate(sent: list[bytes]) -> None:
    merge = _C.Merge(len(sent))
    for data in sent:
        merge.add(data, b"")
    merge.check(False)
    for strategy in range(5):
        merge.assign(strategy, 1, bytes(4 * len(sent)), 1)
        for rank, data in enumerate(sent):
            items = Items(data, merge.reply(rank))
            assert len(items.kept) == merge.sums()[rank][0]
        look_at(merge.table())


@pytest.mark.parametrize("decode", [_C.decode_table, _C.decode_storage_index], ids=["table", "storage_index"])
def test_every_truncation_and_changed_byte_is_refused(decode: Callable[[bytes], Any]) -> None:
    data = plan() if decode is _C.decode_table else storage_index()
    assert len(decode(data))
    for size in range(len(data)):
        for cut in (data[:size], with_crc(data[:size])) if size >= 8 else (data[:size],):
            with pytest.raises(ValueError, match="garbled or truncated"):
                decode(cut)
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 1 << index % 8
        with pytest.raises(ValueError, match="garbled or truncated"):
            decode(bytes(changed))
    with pytest.raises(ValueError, match="garbled"):
        decode(with_crc(data + b"\0"))


def test_mutated_plans() -> None:
    survivors = 0
    for data in mutations(plan(), 1500):
        try:
            look_at(_C.decode_table(data))
            survivors += 1
            coordinate([plan(), data])
        except ERRORS:
            continue
    assert survivors > 100


def test_mutated_storage_index() -> None:
    survivors = 0
    for data in mutations(storage_index(), 1500):
        try:
            decoded = _C.decode_storage_index(data)
        except ValueError:
            continue
        survivors += 1
        assert _C.decode_storage_index(decoded.encode()).encode() == decoded.encode()
        try:
            decoded.file_sizes()
            [decoded.get(index) for index in range(len(decoded))]
        except UnicodeDecodeError:
            continue
    assert survivors > 100


def test_entries_of_a_storage_index() -> None:
    """Some at a time, in any order; those that are not set are not stored."""
    made = _C.StorageIndex(4)
    entries: list[Any] = [(f"f{kind}", kind, 10, 20, 12, 8, bytes(4)) for kind in range(3)]
    made.put(entries[:2], [3, 0])
    made.put(entries[2:], [2])
    assert [made.get(index) for index in range(4)] == [entries[1], None, entries[2], entries[0]]
    assert _C.decode_storage_index(made.encode()).get(3) == entries[0]
    for indices, error in (([0, 4], IndexError), ([-1, 0], IndexError), ([0], ValueError), ([0, "1"], TypeError)):
        with pytest.raises(error):
            made.put(entries[:2], indices)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many entries"):
        made.put(entries)


def test_mutated_replies() -> None:
    merge = _C.Merge(2)
    for _ in range(2):
        merge.add(make({f"w{index}": row((64, 8), (0, 0), (64, 8)) for index in range(20)}).encode(), b"")
    merge.check(True)
    merge.assign(1, 0, bytes(8), 1)
    reply = merge.reply(0)
    assert any(isinstance(kept, tuple) for kept in _C.read_reply(reply, 20))
    for rows in (0, 19, 21, -1, -(1 << 62)):
        with pytest.raises(ValueError):
            _C.read_reply(reply, rows)
    with pytest.raises(ValueError):
        _C.read_reply(b"\xff" * 9 + b"\1", -1)
    rng = random.Random(1)
    for _ in range(1000):
        changed = bytearray(reply[: rng.randrange(len(reply) + 1)])
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            _C.read_reply(bytes(changed), 20)
        except ValueError:
            continue


def test_a_garbled_plan_names_its_rank() -> None:
    sent = [
        RingPlan(SentItems(), message=LocalMessage(rank, "h", data, str(rank), b"", False))
        for rank, data in enumerate([plan(), plan()[:-1]])
    ]
    with pytest.raises(CheckpointError, match=r"the plan of rank 1: .*garbled or truncated"):
        RingSavePlanner().create_global_plan(sent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        row(size=(-1, 2)),
        row(offsets=(-1, 0)),
        row(lengths=(-4, 2)),
        row(size=(1 << 40, 1 << 40)),
        row(lengths=(1 << 40, 1 << 40)),
        row(offsets=((1 << 63) - 1, 0)),
        row(size=(1 << 64, 1)),
        row(size=(4,)),
        row(offsets=(0,)),
        row(lengths=(4, 2, 1)),
        row(size=[4, 2]),
        row(size=("4", "2")),
        row(size=(1,) * 65, offsets=(0,) * 65, lengths=(1,) * 65),
        row(encoding=b"x" * 5000),
        row(encoding="text"),
        row(dtype_bytes=100),
        row()[:-1],
        [row(), "no row"],
        "no tensor",
        7,
    ],
)
def test_bad_rows(value: Any) -> None:
    with pytest.raises(ERRORS):
        make({"before": row(), "key": value})


def test_bad_names() -> None:
    with pytest.raises(ValueError, match=r"'a' comes twice"):
        _C.make_table(["a", "a"], None, [None, None], bytes(2), lambda tensor: row())
    for bad in (
        (["a"], None, [], b"\0", None),
        (["a"], None, [None], b"", None),
        (["a"], [], [None], b"\0", None),
        (["a"], ["text"], [None], b"\0", None),
        ([1], None, [None], b"\0", None),
        (("a",), None, [None], b"\0", None),
        (["a"], None, None, b"\0", None),
    ):
        with pytest.raises(ERRORS):
            _C.make_table(*bad)  # type: ignore[arg-type]
    raw = plan().replace("größe".encode(), b"gr\xff\xfe\xfd\xfce")
    table = _C.decode_table(with_crc(raw))
    with pytest.raises(ValueError):
        table.names()


def test_calls_in_the_wrong_order_or_of_the_wrong_kind() -> None:
    merge, table, stored = _C.Merge(2), make({"a": row()}), _C.StorageIndex(1)
    calls: list[Callable[[], Any]] = [
        merge.sums, merge.table, lambda: merge.reply(0), lambda: merge.items(0), lambda: merge.differing(1),
        lambda: merge.assign(0, 0, bytes(8), 1), lambda: merge.check(True),
        lambda: merge.add("text", b""), lambda: merge.add(b"", b""), lambda: _C.Merge("2"), lambda: table.row(1),
        lambda: table.row(-1), lambda: table.row("0"), lambda: stored.get(1), lambda: stored.put([]),
        lambda: stored.put([("f", 3, 0, 0, 0, 0, None)]), lambda: stored.put([("f", 0, 0, 9, 0, 9, b"123")]),
        lambda: stored.put(["no place"]), lambda: stored.merge(table, b""), lambda: stored.merge(stored, bytes(4)),
        lambda: table.pickle(_C.StorageIndex(2), [b"N"], b"N", b"N", True),
        lambda: table.pickle(None, [], b"N", b"N", True),
        lambda: table.pickle(None, ["N"], b"N", b"N", True), lambda: _C.Match(table, stored),
        lambda: _C.decode_table(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((*ERRORS, IndexError)):
            call()


def test_a_merge_goes_no_further_after_a_bad_plan() -> None:
    merge = _C.Merge(2)
    merge.add(plan(), b"")
    with pytest.raises(ValueError, match="too many fingerprints"):
        merge.add(plan(), bytes(4))
    for call in (lambda: merge.add(plan(), b""), lambda: merge.check(True), lambda: merge.differing(1)):
        with pytest.raises(ValueError):
            call()
    twice = make({"a": [row(), row()]}).encode()
    merge = _C.Merge(1)
    merge.add(twice, b"")
    for call in (lambda: merge.check(True), lambda: merge.differing(1), lambda: merge.assign(2, 0, bytes(4), 1)):
        with pytest.raises(ValueError):
            call()


# ---- files that ranks write together ----

MIB = 1 << 20


def holdings(world: int = 2) -> _C.Holdings:
    """Two ranks hold "w" by columns, 4 MiB, and the first one "b"."""
    held = _C.Holdings(world)
    for rank in range(2):
        table = make({"w": row((1024, 1024), (0, rank * 512), (1024, 512)), "b": None if rank else row()})
        held.add(rank, table, [0, 1][: 2 - rank])
    return held


LAID = [("w", 4, 4096, 4 * MIB), ("b", 4, 4096 + 4 * MIB, 32)]


def test_holdings() -> None:
    held = holdings()
    assert held.tensors() == {"w": ((1024, 1024), ENCODING), "b": ((4, 2), ENCODING)}
    assert (held.holders("w"), held.holders("b")) == ([0, 1], [0])
    (first, second), (stripes,) = held.share(LAID, 4096, MIB, 8 * MIB)
    assert first[0] == second[0] == [] and first[1] + second[1] == 4 * MIB + 32
    assert [(lo, hi) for lo, hi, *_ in stripes] == [
        (max(4096, n * MIB), min((n + 1) * MIB, 4100 * 1024 + 32)) for n in range(5)
    ]
    assert {holders for *_, holders in stripes} == {(0, 1)} and {writer for *_, writer, _ in stripes} == {0, 1}


@pytest.mark.parametrize(
    "call",
    (
        lambda held: _C.Holdings(0),
        lambda held: _C.Holdings(-1),
        lambda held: held.add(2, make({"a": row()}), [0]),
        lambda held: held.add(1, make({"a": row()}), [1]),
        lambda held: held.add(1, make({"a": row()}), [-1]),
        lambda held: held.add(1, make({"a": row()}), ["0"]),
        lambda held: held.add(1, make({"a": row()}), [(0, 3, 2)]),
        lambda held: held.add(1, make({"a": row()}), [(0, -1, 2)]),
        lambda held: held.add(1, make({"a": row()}), [(0, 1, -1)]),
        lambda held: held.add(1, make({"a": None}), [(0, 0, 0)]),
        lambda held: held.add(1, None, [0]),
        lambda held: held.holders("nobody's"),
        lambda held: held.share([("nobody's", 4, 4096, 32)], 4096, MIB, MIB),
        lambda held: held.share([("w", 4, 8192, 4 * MIB)], 4096, MIB, MIB),
        lambda held: held.share([("w", 2, 4096, 4 * MIB)], 4096, MIB, MIB),
        lambda held: held.share([("w", 4, 4096, 1 << 63)], 4096, MIB, MIB),
        lambda held: held.share([("w", 4, 4096)], 4096, MIB, MIB),
        lambda held: held.share(LAID, 4096, 0, MIB),
        lambda held: held.share(LAID, 1 << 63, MIB, MIB),
        lambda held: held.add(0, make({"w": row((1024, 1024))}), [0]) or held.share(LAID, 4096, MIB, MIB),
        lambda held: held.add(0, make({"b": None}), [0]) or held.share(LAID, 4096, MIB, MIB),
        lambda held: held.share(LAID, 4096, MIB, MIB) and held.add(0, make({"a": row()}), [0]),
    ),
)
def test_holdings_that_are_wrong(call: Any) -> None:
    with pytest.raises((ValueError, LookupError, TypeError, OverflowError)):
        call(holdings())


def test_nothing_leaks() -> None:
    bad = [*mutations(plan(), 40), b"", plan()[:-1]]

    def turn() -> None:
        coordinate([plan(), plan()])
        for data in bad:
            try:
                coordinate([plan(), data])
            except ERRORS:
                continue
        stored = _C.decode_storage_index(storage_index())
        _C.StorageIndex(3).merge(stored, b"".join(i.to_bytes(4, "little") for i in range(3)))
        stored.file_sizes()
        held = holdings()
        held.share(LAID, 4096, MIB, MIB)
        with pytest.raises(ValueError):
            held.share(LAID, 0, MIB, MIB)
        for value in (row(size=(-1, 2)), "no tensor", [row(), 1]):
            try:
                make({"a": row(), "b": value})
            except ERRORS:
                continue

    for _ in range(20):
        turn()
    gc.collect()
    before = _resident()
    for _ in range(60):
        turn()
    gc.collect()
    assert "DCPRING_SANITIZED" in os.environ or _resident() - before < 4 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", [name for name, value in vars(_C).items() if isinstance(value, type)])
def test_types_of_c_refuse_keywords_that_they_do_not_know(name: str) -> None:
    with pytest.raises(TypeError):
        getattr(_C, name)(unknown=1)
