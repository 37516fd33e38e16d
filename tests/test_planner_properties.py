"""RingSavePlanner on random layouts, without processes: against stock's planner, and against what must be true."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from _kinds import DTYPES
from _kinds import random as random_tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcpring import _C, RingSavePlanner
from dcpring.errors import CheckpointError
from dcpring.format.properties import decode_properties, encode_properties
from dcpring.plan import table as plans
from dcpring.plan.flatten import flatten, path_code
from dcpring.plan.items import Items
from dcpring.plan.messages import LocalMessage, RingPlan

ROUNDS = 40
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""

# ---- layouts ----


@dataclass
class Layout:
    """What each rank of a world holds: the items that stock planners would send, and the names' paths."""

    world: int
    items: list[list[WriteItem]] = field(default_factory=list)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.items = [[] for _ in range(self.world)]

    def add_object(self, name: str, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.items[rank].append(WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO))

    def add_tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: Callable[[int], Box | None]
    ) -> None:
        for rank in range(self.world):
            box = boxes(rank)
            if box is None:
                continue
            offsets, sizes = map(torch.Size, box)
            whole = sizes == torch.Size(shape)
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size(shape)
            )
            kind = WriteItemType.TENSOR if whole else WriteItemType.SHARD
            self.items[rank].append(WriteItem(index=MetadataIndex(name, offsets), type=kind, tensor_data=data))


def part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of a part, as torch.chunk and DTensor have it: the last ones may be empty."""
    each = -(-size // parts)
    start = min(index * each, size)
    return start, min(each, size - start)


def grid(shape: tuple[int, ...], mesh: dict[int, tuple[int, Callable[[int], int]]]) -> Callable[[int], Box]:
    """Boxes of a tensor whose dimensions are cut: into so many parts, which part is a rank's."""

    def box(rank: int) -> Box:
        offsets, sizes = [0] * len(shape), list(shape)
        for dim, (parts, index) in mesh.items():
            offsets[dim], sizes[dim] = part(shape[dim], parts, index(rank))
        return tuple(offsets), tuple(sizes)

    return box


def replicated(shape: tuple[int, ...]) -> Callable[[int], Box]:
    return grid(shape, {})


def boxes_of(rng: random.Random, world: int, shape: tuple[int, ...]) -> Callable[[int], Box | None]:
    """DDP, FSDP, HSDP, TP x FSDP, or one of them on some of the ranks only."""
    inner = rng.choice([n for n in range(1, world + 1) if world % n == 0])
    kind = rng.choice(["ddp", "fsdp", "hsdp", "grid", "some"])
    if kind == "ddp" or not shape:
        return replicated(shape)
    if kind == "fsdp":
        return grid(shape, {0: (world, lambda rank: rank)})
    if kind == "hsdp":
        return grid(shape, {0: (inner, lambda rank: rank % inner)})
    if kind == "grid" and len(shape) > 1:
        return grid(shape, {0: (world // inner, lambda rank: rank // inner), 1: (inner, lambda rank: rank % inner)})
    stage = rng.randrange(world // inner)
    within = grid(shape, {0: (inner, lambda rank: rank % inner)})
    return lambda rank: within(rank) if rank // inner == stage else None


def random_layout(seed: int) -> Layout:
    rng = random.Random(seed)
    layout = Layout(rng.choice([1, 2, 3, 4, 6, 8]))
    for index in range(rng.randrange(12)):
        parts = ["model", f"layers.{index}", rng.choice(["weight", "bias", "größe", ""])]
        name = ".".join(parts)
        layout.paths[name] = tuple(parts)
        if rng.random() < 0.2:
            everywhere = rng.random() < 0.5
            layout.add_object(name, range(layout.world) if everywhere else [rng.randrange(layout.world)])
            continue
        shape = tuple(rng.choice([0, 1, 2, 3, 7, 64]) for _ in range(rng.randrange(4)))
        layout.add_tensor(name, shape, rng.choice(DTYPES), boxes_of(rng, layout.world, shape))
    name = "optim.groups.0.lr"
    layout.paths[name] = ("optim", "groups", 0, "lr")
    layout.add_object(name, range(layout.world))
    return layout


def table(items: list[WriteItem], paths: dict[str, tuple[Any, ...]], divisible: bool = True) -> _C.Table:
    """As ``plans.table_of_items``, but of chunks that may be cut."""
    names, values, codes = [], [], []
    for item in items:
        row = plans._row_of_item(item)
        names.append(item.index.fqn)
        values.append(None if row is None else (*row[:-1], plans.DIVISIBLE if divisible else 0))
        codes.append(path_code(paths, item.index.fqn))
    return _C.make_table(names, codes, values, bytes(len(names)), lambda tensor: pytest.fail("no tensor"))


def global_plan(
    layout: Layout, hosts: Sequence[str] | None = None, **options: Any
) -> tuple[list[list[WriteItem]], Metadata, RingSavePlanner]:
    """What RingSavePlanner makes of the layout: the items that each rank is left with."""
    planner = RingSavePlanner(**options)
    sent: list[SavePlan] = []
    for rank, items in enumerate(layout.items):
        made = table(items, layout.paths)
        host = hosts[rank] if hosts else f"host{rank}"
        message = LocalMessage(rank, host, made.encode(), str(rank), b"", True)
        sent.append(RingPlan(items=Items(made), message=message))  # type: ignore[arg-type]
    answered, metadata = planner.create_global_plan(sent)
    return [list(plan.items) for plan in answered], metadata, planner


def stock_plan(layout: Layout) -> tuple[list[SavePlan], Metadata]:
    deduplicated = dedup_save_plans([SavePlan(items) for items in layout.items])
    local, metadata = create_default_global_save_plan(deduplicated)
    metadata.planner_data = {name: layout.paths[name] for items in layout.items for name in _names(items)}
    return local, metadata


def _names(items: list[WriteItem]) -> list[str]:
    return [item.index.fqn for item in items]


# ---- what must be true ----

Key = tuple[str, Box | None]


def key(item: WriteItem) -> Key:
    if item.tensor_data is None:
        return item.index.fqn, None
    chunk = item.tensor_data.chunk
    assert item.index.offset == chunk.offsets
    return item.index.fqn, (tuple(chunk.offsets), tuple(chunk.sizes))


def held(layout: Layout) -> list[set[Key]]:
    return [{key(item) for item in items} for items in layout.items]


def check_written_once(layout: Layout, written: list[list[WriteItem]]) -> None:
    """Every chunk and object exactly once, by a rank that holds it, described as that rank did."""
    count = Counter(key(item) for items in written for item in items)
    assert set(count) == set().union(*held(layout)) and set(count.values()) <= {1}
    for rank, items in enumerate(written):
        own = {key(item): item for item in layout.items[rank]}
        for item in items:
            assert own[key(item)].tensor_data == item.tensor_data
            if item.tensor_data is None:
                assert item.type == WriteItemType.BYTE_IO


def check_pieces(layout: Layout, written: list[list[WriteItem]]) -> None:
    """Pieces along dimension 0 tile the chunks that they are of, and are written by ranks that hold these."""
    todo = {k: 0 for rank in held(layout) for k in rank}
    for rank, items in enumerate(written):
        own = held(layout)[rank]
        for item in items:
            if key(item) in own:
                found = [key(item)]
            else:
                found = [k for k in own if k[0] == item.index.fqn and _is_piece(key(item)[1], k[1])]
            assert len(found) == 1
            box = key(item)[1]
            todo[found[0]] += 1 if box is None else torch.Size(box[1]).numel() or 1
    assert todo == {k: 1 if k[1] is None else torch.Size(k[1][1]).numel() or 1 for k in todo}
    ends: dict[str, list[Box]] = {}
    for items in written:
        for item in items:
            name, box = key(item)
            if box is None or 0 in box[1]:
                continue
            for offsets, sizes in ends.setdefault(name, []):  # nothing overlaps
                assert any(
                    a + n <= b or b + m <= a for a, n, b, m in zip(offsets, sizes, box[0], box[1], strict=True)
                ), name
            ends[name].append(box)


def _is_piece(piece: Box | None, whole: Box | None) -> bool:
    if piece is None or whole is None or not piece[0]:
        return False
    same = piece[0][1:] == whole[0][1:] and piece[1][1:] == whole[1][1:]
    return same and whole[0][0] <= piece[0][0] and piece[0][0] + piece[1][0] <= whole[0][0] + whole[1][0]


def comparable(metadata: Metadata) -> dict[str, Any]:
    """Without the order of keys and chunks."""
    found: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            found[name] = "object"
        else:
            chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks)
            found[name] = (stored.properties, stored.size, chunks)
    return found | {"planner_data": metadata.planner_data}


def loads_of(written: Sequence[Sequence[WriteItem]]) -> list[int]:
    return [sum(_bytes(item) for item in items) for items in written]


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


# ---- random layouts ----

WHOLE = ["balanced", "first_replica", 100, "per_node"]


@pytest.mark.parametrize("writers", WHOLE)
def test_like_stock_but_for_who_writes(writers: Any) -> None:
    for seed in range(ROUNDS):
        layout = random_layout(seed)
        written, metadata, planner = global_plan(layout, writers=writers)
        check_written_once(layout, written)
        stock, expected = stock_plan(layout)
        assert Counter(key(item) for items in written for item in items) == Counter(
            key(item) for plan in stock for item in plan.items
        )
        assert comparable(metadata) == comparable(expected), seed
        ranks = planner.report().ranks
        assert [rank.items for rank in ranks] == [len(items) for items in written]
        assert [rank.bytes for rank in ranks] == loads_of(written)


@pytest.mark.parametrize("writers", ["split", "auto"])
def test_pieces(writers: Any) -> None:
    for seed in range(ROUNDS):
        layout = random_layout(seed)
        written, metadata, _ = global_plan(
            layout, writers=writers, split_bytes=random.Random(seed).choice([1, 64, 999])
        )
        check_pieces(layout, written)
        chunks = {
            (name, (tuple(chunk.offsets), tuple(chunk.sizes)))
            for name, stored in metadata.state_dict_metadata.items()
            for chunk in getattr(stored, "chunks", [])
        }
        assert chunks == {key(item) for items in written for item in items if item.tensor_data}
        stock = stock_plan(layout)[1]
        assert metadata.planner_data == stock.planner_data
        for name, stored in metadata.state_dict_metadata.items():
            other = stock.state_dict_metadata[name]
            assert type(stored) is type(other)
            assert getattr(stored, "size", None) == getattr(other, "size", None)
            assert getattr(stored, "properties", None) == getattr(other, "properties", None)


@pytest.mark.parametrize("writers", [*WHOLE, "split"])
def test_the_metadata_pickles_as_a_plain_one(writers: Any) -> None:
    for seed in range(0, ROUNDS, 4):
        _, metadata, _ = global_plan(random_layout(seed), writers=writers)
        for protocol in (2, 4, 5):
            loaded = pickle.loads(pickle.dumps(metadata, protocol))
            assert type(loaded) is Metadata
            assert comparable(loaded) == comparable(metadata)
            assert list(loaded.state_dict_metadata) == list(metadata.state_dict_metadata)


@pytest.mark.parametrize("writers", [*WHOLE, "split", "auto"])
def test_the_same_plans_give_the_same_result(writers: Any) -> None:
    for seed in range(0, ROUNDS, 2):
        first, again = (global_plan(random_layout(seed), writers=writers, split_bytes=64)[0] for _ in range(2))
        assert first == again


def test_a_core_without_planner() -> None:
    """The same through _C.Merge alone, with tables of items that a subclass has made."""
    for seed in range(ROUNDS):
        layout = random_layout(seed)
        tables = [plans.table_of_items(items, layout.paths) for items in layout.items]
        merge = _C.Merge(layout.world)
        for made in tables:
            merge.add(made.encode(), b"")
        merge.check(True)
        for strategy in range(3):
            merge.assign(strategy, 0, bytes(4 * layout.world), 1)
            replies = [merge.reply(rank) for rank in range(layout.world)]
            written = [list(Items(made, reply)) for made, reply in zip(tables, replies, strict=True)]
            check_written_once(layout, written)
            assert [total for _, total, _, _ in merge.sums()] == loads_of(written)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_few_writers_or_an_error_that_names_the_shard(limit: int) -> None:
    possible = 0
    for seed in range(2 * ROUNDS):
        layout = random_layout(seed)
        try:
            written = global_plan(layout, writers=limit)[0]
        except CheckpointError as error:
            assert any(f"'{name}'" in str(error) for name in layout.paths)
            assert limit < layout.world
            continue
        possible += 1
        check_written_once(layout, written)
        assert sum(map(bool, written)) <= limit
    assert possible > 10


def test_one_writer_for_each_host() -> None:
    for replicas in (2, 3):
        layout = Layout(4 * replicas)
        for index in range(30):
            layout.paths[f"w{index}"] = (f"w{index}",)
            layout.add_tensor(
                f"w{index}", (60, 8), torch.float32, grid((60, 8), {0: (replicas, lambda rank: rank // 4)})
            )
        hosts = [f"host{rank // 4}" for rank in range(layout.world)]  # every shard is whole on one host
        written = global_plan(layout, hosts, writers="per_node")[0]
        check_written_once(layout, written)
        assert [any(written[4 * host : 4 * host + 4]) for host in range(replicas)] == [True] * replicas
        assert sum(map(bool, written)) == replicas
        assert max(loads_of(written)) == sum(loads_of(written)) / replicas


# ---- balance and size ----


def half_and_half() -> Layout:
    """Four ranks; as many bytes are replicated as are sharded."""
    rng = random.Random(1)
    layout = Layout(4)
    for index in range(40):
        name, shape = f"model.layers.{index}.weight", (64 * rng.randrange(1, 30), 128)
        for prefix, boxes in (("a.", replicated(shape)), ("b.", grid(shape, {0: (4, lambda rank: rank)}))):
            layout.paths[prefix + name] = (prefix + name,)
            layout.add_tensor(prefix + name, shape, torch.float32, boxes)
    return layout


@pytest.mark.parametrize("writers", ["balanced", "split", "auto"])
def test_the_largest_file_is_within_5_percent(writers: Any) -> None:
    layout = half_and_half()
    written = global_plan(layout, writers=writers)[0]
    loads = loads_of(written)
    assert max(loads) <= 1.05 * sum(loads) / 4
    stock = loads_of([plan.items for plan in stock_plan(layout)[0]])
    assert sum(stock) == sum(loads) and max(stock) > max(loads)


def test_one_large_tensor_is_cut() -> None:
    layout = Layout(4, paths={"w": ("w",), "v": ("v",)})
    layout.add_tensor("w", (1000, 1024), torch.float32, replicated((1000, 1024)))
    layout.add_tensor("v", (10, 1024), torch.float32, replicated((10, 1024)))
    for writers, most in (("balanced", 4.0), ("split", 1.05), ("auto", 1.05)):
        written, _, planner = global_plan(layout, writers=writers, split_bytes=1 << 16)
        check_pieces(layout, written)
        loads = loads_of(written)
        assert max(loads) <= most * sum(loads) / 4
        assert planner.report().writers == ("split" if writers == "auto" else writers)
    small = global_plan(layout, writers="split", split_bytes=1 << 30)[0]
    assert sum(len(items) for items in small) == 2


def llama(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    names = [f"layers.{layer}.{name}.weight" for layer in range(layers) for name in projections]
    moments = [f"optim.state.model.{name}.{moment}" for moment in ("exp_avg", "exp_avg_sq") for name in names]
    return [(name, (4096, 4096)) for name in (*(f"model.{name}" for name in names), *moments)]


def test_bytes_sent_for_an_item() -> None:
    layout = Layout(4)
    for name, shape in llama(32):
        layout.paths[name] = tuple(name.split(".", 1))
        layout.add_tensor(name, shape, torch.bfloat16, grid(shape, {0: (64, lambda rank: 21 * rank)}))
    for rank in range(4):
        encoded = table(layout.items[rank], layout.paths).encode()
        assert len(encoded) / len(layout.items[rank]) <= 40


# ---- one process: real state dicts ----


def random_nest(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 4 else 6)
    if kind < 2:
        return random_tensor(rng.choice(DTYPES), *(rng.randrange(4) for _ in range(rng.randrange(3))))
    if kind < 6:
        return rng.choice([None, 1, "text", b"bytes", 2.5, (1, 2), (), [], {}, [1, [2]], (torch.ones(2),), {1, 2}])
    values = [random_nest(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 9:
        return {rng.choice([f"k{index}", index, "größe", f"dotted.{index}"]): v for index, v in enumerate(values)}
    return values if kind < 11 else tuple(values)


def test_flattening_is_stocks() -> None:
    refused = 0
    for seed in range(600):
        rng = random.Random(seed)
        state = {f"top{index}" if index else 0: random_nest(rng) for index in range(rng.randrange(6))}
        try:
            values, mappings = flatten_state_dict(state)  # type: ignore[arg-type]
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="duplicated"):
                flatten(state)  # type: ignore[arg-type]
            continue
        flat = flatten(state)  # type: ignore[arg-type]
        assert list(flat.values) == list(values)
        assert all(flat.values[name] is values[name] for name in values)
        assert flat.mappings == mappings
        assert flat.codes == [path_code(mappings, name) for name in values]
    with pytest.raises(ValueError, match="duplicated"):
        flatten({"a": {"b": 1}, "a.b": 2})
    assert refused < 300


def test_planning_a_state_dict_is_stocks() -> None:
    compared = 0
    for seed in range(250):
        rng = random.Random(seed)
        state: dict[str, Any] = {f"top{index}": random_nest(rng) for index in range(rng.randrange(1, 6))}
        try:
            flatten_state_dict(state)
        except ValueError:
            continue
        results = []
        for planner in (RingSavePlanner(), DefaultSavePlanner()):
            planner.set_up_planner(state, is_coordinator=True)
            (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
            final = planner.finish_plan(plan)
            results.append((metadata, final, planner))
        (ours, plan, ring), (expected, stock, default) = results
        assert comparable(ours) == comparable(expected), seed
        assert list(ours.state_dict_metadata) == list(expected.state_dict_metadata)
        assert sorted(map(repr, plan.items)) == sorted(map(repr, _without_hints(stock.items)))
        for item in plan.items:
            assert ring.lookup_object(item.index) is default.lookup_object(item.index)
        compared += 1
    assert compared > 100


def _without_hints(items: Sequence[WriteItem]) -> list[WriteItem]:
    return [
        WriteItem(index=MetadataIndex(item.index.fqn, item.index.offset), type=item.type, tensor_data=item.tensor_data)
        for item in items
    ]


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr, torch._mkldnn], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last, torch.preserve_format], ids=str)
def test_properties_round_trip(layout: torch.layout, form: torch.memory_format) -> None:
    for dtype in (*DTYPES, torch.qint8, torch.quint8, torch.qint32, torch.bits8, torch.uint4):
        for flags in range(4):
            properties = TensorProperties(dtype, layout, bool(flags & 1), form, bool(flags & 2))
            encoded, dtype_bytes = encode_properties(properties)
            assert decode_properties(encoded) == properties
            assert encoded[:dtype_bytes].decode() == str(dtype)
