"""What the coordinator does with the plans of all ranks, by stock DCP and by dcpring.

`write_gathered` makes the bytes that gather_object would bring to the coordinator, rank by rank; `measure` goes from
these to the bytes to scatter, in a process that has done nothing else.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from _contestants import STOCK
from _layouts import ITEM_BYTES, RANKS_PER_HOST, Chunk, Job, Tensor, chunk_bytes
from _measure import Meter, release_free_memory
from torch.distributed.checkpoint import DefaultSavePlanner, default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcpring import _C, RingSavePlanner
from dcpring.format.lazy import LazyMetadata
from dcpring.format.properties import encode_properties
from dcpring.plan import save_planner
from dcpring.plan.flatten import path_code
from dcpring.plan.items import Items
from dcpring.plan.messages import LocalMessage, RingPlan
from dcpring.plan.replicas import MAX_BYTES
from dcpring.plan.table import DIVISIBLE, HASHED, SHARD_ROW, TENSOR_ROW

UNPICKLE, DEDUP, METADATA, VALIDATE, PICKLE, OTHER = "unpickle", "dedup", "metadata", "validate", "pickle", "other"
STEPS = (UNPICKLE, DEDUP, METADATA, VALIDATE, PICKLE, OTHER)

MOST_OBJECTS = 3_000_000
"""More items are not made into Python objects: that takes about 1 KB each."""


@dataclass(frozen=True)
class PlanSample:
    """One coordinator's work on one job.

    `cpu_seconds` is from the gathered bytes to the bytes to scatter, and `steps` its parts. `materialise_seconds` and
    `metadata_pickle_seconds` come on top: the Metadata's attributes as Python objects (stock has made them by then;
    None where there are too many), and its pickle. `peak_bytes` counts the gathered bytes too. `balance` is the
    largest rank's bytes over the mean of all ranks.
    """

    layout: str
    tensors: int
    ranks: int
    who: str
    round: int
    strategy: str
    seconds: float
    cpu_seconds: float
    steps: dict[str, float]
    materialise_seconds: float | None
    metadata_pickle_seconds: float
    gathered_bytes: int
    scattered_bytes: int
    metadata_bytes: int
    peak_bytes: int | None
    balance: float
    content: str | None

    @property
    def items(self) -> int:
        return self.tensors * self.ranks


# ---- what the ranks send ----


def write_gathered(path: Path, job: Job, who: str) -> None:
    send = _stock_plan if who == STOCK else _ring_plan
    with open(path, "wb") as out:
        pickle.dump([pickle.dumps(send(job, rank)) for rank in range(job.ranks)], out)


def _stock_plan(job: Job, rank: int) -> SavePlan:
    """What DefaultSavePlanner.create_local_plan makes: each item has its own properties, and the mappings go along."""
    mappings = {tensor.name: tensor.path for tensor in job.tensors}
    chunks = [chunk for _, chunk in job.chunks(rank)]
    items = [
        _write_item(name, tensor, chunk)
        for name, tensor, chunk in zip(mappings, job.tensors, chunks, strict=True)
    ]  # fmt: skip
    return SavePlan(items, planner_data=mappings)


def _write_item(name: str, tensor: Tensor, chunk: Chunk) -> WriteItem:
    offsets = torch.Size(chunk.offsets)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD if chunk.sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk.lengths)),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size(tensor.size),
        ),
    )


def _ring_plan(job: Job, rank: int) -> RingPlan:
    """What RingSavePlanner.create_local_plan makes, and RingPlan sends; small replicas have fingerprints."""
    encoded, dtype_bytes = encode_properties(TensorProperties(dtype=torch.float32))
    names, codes, values, prints = [], [], [], array("I")
    rows: dict[tuple[int, Chunk], Any] = {}
    for tensor, chunk in job.chunks(rank):
        key = (id(tensor.size), chunk)
        if key not in rows:
            kind = SHARD_ROW if chunk.sharded else TENSOR_ROW
            flags = DIVISIBLE | (HASHED if _is_hashed(chunk) else 0)
            rows[key] = kind, tensor.size, chunk.offsets, chunk.lengths, encoded, dtype_bytes, ITEM_BYTES, flags
        names.append(tensor.name)
        codes.append(path_code({tensor.name: tensor.path}, tensor.name))
        values.append(rows[key])
        if _is_hashed(chunk):
            prints.append(zlib.crc32(tensor.name.encode()))
    table = _C.make_table(names, codes, values, bytes(len(names)), _no_plain_tensors)
    layout = table.encode()
    digest = hashlib.blake2b(layout, digest_size=16).hexdigest()
    host = f"node{rank // RANKS_PER_HOST:04d}/01234567-89ab-cdef-0123-456789abcdef"
    return RingPlan(Items(table), message=LocalMessage(rank, host, layout, digest, prints.tobytes(), True))  # type: ignore[arg-type]


def _is_hashed(chunk: Chunk) -> bool:
    return chunk.replicated and chunk_bytes(chunk.lengths) <= MAX_BYTES


def _no_plain_tensors(tensor: torch.Tensor) -> Any:
    raise AssertionError(f"rows were given, not {tensor}")


# ---- what the coordinator does with it ----


class Stopwatch:
    """CPU seconds by step, of a process with one thread. What is not in a step is `OTHER`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STEPS, 0.0)

    def timed(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[step] += time.process_time() - start

        return run

    def all_done(self, total: float) -> None:
        self.seconds[OTHER] = max(0.0, total - sum(self.seconds.values()))


@dataclass
class Replied:
    """What the coordinator has made. `loads` gives the bytes that each rank will write."""

    replies: list[bytes]
    metadata: Metadata
    strategy: str
    loads: Callable[[], list[int]]


def _stock_coordinator(gathered: Sequence[bytes], watch: Stopwatch) -> Replied:
    steps = {
        "dedup_save_plans": DEDUP,
        "create_default_global_save_plan": METADATA,
        "_validate_global_plan": VALIDATE,
    }
    timed = {name: watch.timed(step, getattr(default_planner, name)) for name, step in steps.items()}
    plans = watch.timed(UNPICKLE, _unpickled)(gathered)
    with patch.multiple(default_planner, **timed):
        global_plans, metadata = DefaultSavePlanner().create_global_plan(plans)
    replies = watch.timed(PICKLE, _pickled)(global_plans)
    return Replied(replies, metadata, "default", lambda: [_stock_load(plan) for plan in global_plans])


def _stock_load(plan: SavePlan) -> int:
    return sum(chunk_bytes(item.tensor_data.chunk.sizes) for item in plan.items if item.tensor_data is not None)


def _ring_coordinator(gathered: Sequence[bytes], watch: Stopwatch) -> Replied:
    plans = watch.timed(UNPICKLE, _unpickled)(gathered)
    coordinator = RingSavePlanner()
    core = SimpleNamespace(**{**vars(_C), "Merge": lambda world: _TimedMerge(world, watch)})
    with patch.object(save_planner, "_C", core):
        global_plans, metadata = coordinator.create_global_plan(plans)
    replies = watch.timed(PICKLE, _pickled)(global_plans)
    report = coordinator.report()
    return Replied(replies, metadata, report.writers, lambda: [rank.bytes for rank in report.ranks])


_STEP_OF = {
    "add": UNPICKLE,
    "assign": DEDUP,
    "sums": DEDUP,
    "reply": DEDUP,
    "items": METADATA,
    "table": METADATA,
    "check": VALIDATE,
    "differing": VALIDATE,
}
"""The steps that the calls of a _C.Merge belong to. `add` decodes a rank's plan and merges it with those before."""


class _TimedMerge:
    """A _C.Merge whose calls are timed by step."""

    def __init__(self, world: int, watch: Stopwatch) -> None:
        self._merge = _C.Merge(world)
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return self._watch.timed(_STEP_OF[name], getattr(self._merge, name))


def _unpickled(gathered: Sequence[bytes]) -> list[Any]:
    return [pickle.loads(data) for data in gathered]


def _pickled(plans: Sequence[SavePlan]) -> list[bytes]:
    return [pickle.dumps(plan) for plan in plans]


def measure(path: Path, job: Job, who: str, number: int) -> PlanSample:
    """One sample. For a process of its own: memory is counted from where it stands when the bytes are there."""
    with open(path, "rb") as file:
        gathered: list[bytes] = pickle.load(file)  # written by write_gathered just now
    release_free_memory()
    watch = Stopwatch()
    with Meter() as meter:
        replied = (_stock_coordinator if who == STOCK else _ring_coordinator)(gathered, watch)
    spent = meter.reading().whole
    watch.all_done(spent.cpu_seconds)
    loads, gathered_bytes = replied.loads(), sum(map(len, gathered))
    pickle_seconds, metadata_bytes = _pickle_metadata(replied.metadata)
    materialise_seconds = _materialise(replied.metadata) if job.items <= MOST_OBJECTS else None
    return PlanSample(
        layout=job.layout.key,
        tensors=job.tensor_count,
        ranks=job.ranks,
        who=who,
        round=number,
        strategy=replied.strategy,
        seconds=spent.end - spent.begin,
        cpu_seconds=spent.cpu_seconds,
        steps=watch.seconds,
        materialise_seconds=materialise_seconds,
        metadata_pickle_seconds=pickle_seconds,
        gathered_bytes=gathered_bytes,
        scattered_bytes=sum(map(len, replied.replies)),
        metadata_bytes=metadata_bytes,
        peak_bytes=None if spent.peak_bytes is None else spent.peak_bytes + gathered_bytes,
        balance=max(loads) * len(loads) / sum(loads),
        content=None if materialise_seconds is None else _content(replied.metadata),
    )


def _pickle_metadata(metadata: Metadata) -> tuple[float, int]:
    """CPU seconds and size of the pickle that the metadata file is made of, without the places in files."""
    start = time.process_time()
    chunks = metadata.chunks if isinstance(metadata, LazyMetadata) else None
    data = pickle.dumps(metadata) if chunks is None else chunks.pickled(None, None)
    return time.process_time() - start, len(data)


def _materialise(metadata: Metadata) -> float:
    """CPU seconds until the Metadata is Python objects; stock's is from the start."""
    start = time.process_time()
    len(metadata.state_dict_metadata)
    return time.process_time() - start


def _content(metadata: Metadata) -> str:
    """Tells checkpoints from each other by keys, sizes, dtypes, paths, and how much of each tensor there is."""
    digest = hashlib.sha256()
    for name, stored in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(stored, TensorStorageMetadata)
        volume = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        digest.update(repr((name, stored.size, stored.properties, volume, metadata.planner_data[name])).encode())
    return digest.hexdigest()
