"""One rank's read_data: what each item needs, in which order it is read, and what goes where.

1. Every item is looked up, and checked against its destination, before anything is read.
2. Objects, and records that only ``torch.load`` understands, are read whole; objects are checked to be plain data.
3. Plain tensors are read in parts, straight into the planner's tensors; through a host copy where the destination is
   on another device, has another dtype, or is no plain memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.base.masks import both, mask_of
from dcpring.errors import CorruptCheckpointError
from dcpring.format.metadata import BYTES, OPAQUE, TENSOR, Placed
from dcpring.format.quantised import Quantised
from dcpring.format.safetensors import StoredPart
from dcpring.move.load.boxes import Coded, Payload, read_bytes
from dcpring.move.load.explain import Explainer
from dcpring.move.load.handon import Exchange
from dcpring.move.load.inputs import Inputs
from dcpring.move.load.matched import Matched
from dcpring.move.load.reads import Range, Reads
from dcpring.move.load.records import Records
from dcpring.move.load.targets import Targets, check_chunks
from dcpring.move.load.task import Task
from dcpring.move.load.tensors import PlainTensors
from dcpring.move.load.wanted import Wanted
from dcpring.plan.load_planner import RingLoadPlanner, makes_tensors
from dcpring.plan.pieces import Piece
from dcpring.plan.placements import is_replicated


class Loader:
    """See the module's docstring. One is made for every read_data.

    Args:
        matched: a compact plan; what of it takes another way is wanted besides.
    """

    def __init__(self, task: Task, matched: Matched | None = None) -> None:
        self._task, self._matched = task, matched
        self._planner, self._origin, self._stats = task.planner, task.origin, task.stats
        self._wanted, self._payloads = task.wanted, task.payloads
        self._shares = isinstance(task.planner, RingLoadPlanner) and task.planner.shares
        self._explain = Explainer(task, None if matched is None else matched.items)
        self._reads = Reads(task, self._explain)
        self._targets = Targets(task.rules.casts, self._explain)
        self._tensors = PlainTensors(task, self._reads, self._targets)
        self._records = Records(task, self._reads, self._targets)

    def load(self, wanted: Mapping[int, Wanted]) -> None:
        """Loads all that is wanted, once all that can be checked before has been."""
        matched = self._matched
        if matched is None and not makes_tensors(self._planner):
            check_chunks((each.item for each in wanted.values()), self._planner)
        self._wanted.update(wanted)
        files = {file for each in wanted.values() for file in self._files_of(each.place)}
        with self._opened(sorted(files) if matched is None else list(matched.storage.file_sizes())):
            objects, wholes = self._classify()
            self._records.check(wholes)
            self._tensors.check(others_first=matched is not None)
            self._task.run.meter.begin(lambda: self._wanted_bytes([*objects, *wholes]))
            hand_over = self._records.read_objects(objects)
            with self._explain.changes():
                self._records.load_tensors(wholes)
                self._load_plain()
            for each in hand_over:
                each()
        self._targets.tell()
        with_tensors = 0 if matched is None else len(matched.items.match.file_bytes(matched.storage))
        self._stats.files = max(self._stats.files, with_tensors, len(files))

    def _wanted_bytes(self, wholes: list[int]) -> int:
        rest = sum(self._wanted[position].place.length for position in wholes)
        for position, payload in self._payloads.items():
            item = self._wanted[position].item
            rest += read_bytes(payload, item.storage_offsets, item.lengths)
        return rest if self._matched is None else rest + self._matched.wanted_bytes()

    def _files_of(self, place: Placed) -> list[str]:
        made = self._quantised(place)
        return [place.file] if made is None else [place.file, *(shard.file for _, shard in made.scales)]

    def _quantised(self, place: Placed) -> Quantised | None:
        is_made = place.kind == OPAQUE  # whose bytes are not those of its elements
        return self._origin.quantised.get((place.file, place.offset, place.length)) if is_made else None

    # ---- what each item is ----

    @contextlib.contextmanager
    def _opened(self, files: list[str]) -> Iterator[None]:
        """All files that are read. Each is looked at once, when something of it is wanted, and stays open."""
        shared = self._origin.inputs
        with self._explain.core(()):
            self._reads.inputs = shared or Inputs(self._origin.path, files, self._origin.links)
        with contextlib.nullcontext() if shared else contextlib.closing(self._reads.inputs):
            yield

    def _classify(self) -> tuple[list[int], list[int]]:
        """Finds the payloads of plain tensors; gives the positions of objects, and of records that are read whole."""
        objects: list[int] = []
        wholes: list[int] = []
        unknown: list[int] = []
        numbers = self._reads.inputs.numbers
        for position, (item, place, stored) in self._wanted.items():
            if place.offset + place.length >= 1 << 63:
                raise CorruptCheckpointError(
                    f"{self._explain.name(position)} ends where no file can", self._explain.path
                )
            made = self._quantised(place)
            if item.type == LoadItemType.BYTE_IO:
                objects.append(position)
            elif made is not None:
                self._payloads[position] = self._coded(made, self._is_shared(item, made))
            elif place.descriptors or place.kind == BYTES:
                wholes.append(position)
            elif place.kind == TENSOR and stored is not None:
                where = numbers[place.file], place.payload_offset, place.payload_bytes
                self._payloads[position] = Payload(*where, place.crcs, None, *stored)
            else:
                unknown.append(position)
        return objects, wholes + self._locate(unknown)

    def _is_shared(self, item: ReadItem, made: Quantised) -> bool:
        """Whether ranks of this host may want the same of it, and are to read that once."""
        if not self._shares:
            return False
        value = self._planner.state_dict.get(item.dest_index.fqn)  # type: ignore[attr-defined]
        return item.lengths == made.whole or (isinstance(value, DTensor) and is_replicated(value))

    def _coded(self, made: Quantised, is_shared: bool) -> Coded:
        scales = tuple((box, self._payload(shard, box[1])) for box, shard in made.scales)
        return Coded(made, self._payload(made.codes, made.stored_sizes), scales, made.shape, made.dtype, is_shared)

    def _payload(self, part: StoredPart, sizes: tuple[int, ...]) -> Payload:
        where = self._reads.inputs.numbers[part.file], part.begin, part.end - part.begin
        return Payload(*where, part.crcs, None, sizes, part.dtype)

    def _locate(self, unknown: list[int]) -> list[int]:
        """Looks into records that the metadata says nothing more about, those that stock wrote; what is no tensor."""
        if not unknown:
            return []
        unknown = sorted(unknown, key=lambda position: self._range_of(position)[:2])
        with self._explain.core(unknown):
            found = _C.locate(self._reads.inputs.core, [self._range_of(position) for position in unknown])
        for position, located in zip(unknown, found, strict=True):
            if located is None:
                continue
            offset, size, crc, dtype_name, sizes = located
            file, record, _ = self._range_of(position)
            stored = self._wanted[position].stored
            if stored is not None and tuple(stored[0]) != sizes:
                shapes = f"the record has shape {list(sizes)}, the metadata says {list(stored[0])}"
                path = self._reads.inputs.names[file]
                raise CorruptCheckpointError(f"{self._explain.name(position)}: {shapes}", path, record)
            # 0: written without a CRC (checksum=False, torch.serialization.set_crc32_options(False))
            self._payloads[position] = Payload(file, offset, size, None, crc or None, sizes, getattr(torch, dtype_name))
        return [position for position, located in zip(unknown, found, strict=True) if located is None]

    def _range_of(self, position: int) -> Range:
        return self._reads.range_of(self._wanted[position].place)

    # ---- plain tensors ----

    def _load_plain(self) -> None:
        matched = self._matched
        if matched is None:
            self._tensors.load(self._payloads)
        elif matched.exchange is None:
            matched.read(self._reads, matched.mask)
            if matched.landing is not None:
                matched.read_windows(self._reads, matched.landing)
            self._tensors.load(self._payloads)
        else:
            self._load_handed_on(matched, matched.exchange)

    def _load_handed_on(self, matched: Matched, exchange: Exchange) -> None:
        def read(positions: set[int]) -> None:
            matched.read(self._reads, both(matched.mask, mask_of(len(matched.mask), positions)))
            self._tensors.load([position for position in self._payloads if position in positions])

        def begin(pieces: list[tuple[Piece, Tensor]]) -> Callable[[], None]:
            call = matched.call_for_pieces(self._reads, pieces)
            return functools.partial(self._reads.end, call, pool.submit(call.read).result)

        def take(taken: list[tuple[int, Piece, Tensor]]) -> list[int]:
            self._explain.filled.append([position for position, _, _ in taken])
            return matched.take(taken)

        everything = {position for position, good in enumerate(matched.mask) if good} | self._payloads.keys()
        with ThreadPoolExecutor(1, "dcpring-round") as pool:
            exchange.run(self._task, everything, read, begin, take)
