"""One rank's ``read_data``, from what the plan wants to what the tensors hold.

1. Everything is looked up, and checked against the tensor that it fills, before anything is read.
2. Objects are read whole and unpickled; so are tensors that only ``torch.load`` understands (``records``).
3. Plain tensors are read in parts (``executor``): those of a compact plan without an object of Python for each, or
   with peer sharing (``peers``).
4. Objects go to the planner last, once nothing can fail any more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Set

import torch
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.base.masks import both, mask_of, zeros
from dcpring.base.windows import windows
from dcpring.errors import CorruptCheckpointError
from dcpring.format.metadata import BYTES, OPAQUE, TENSOR, Placed
from dcpring.format.quantised import Quantised
from dcpring.format.safetensors import StoredPart
from dcpring.move import device
from dcpring.move.load.executor import Executor
from dcpring.move.load.explain import Explainer
from dcpring.move.load.inputs import Inputs
from dcpring.move.load.peers import PeerSharing
from dcpring.move.load.records import Records
from dcpring.move.load.targets import Targets, check_chunks
from dcpring.move.load.task import Task
from dcpring.move.load.wanted import BoxRead, CompactPlan, Payload, QuantisedPayload, Wanted, read_bytes
from dcpring.plan.load_planner import RingLoadPlanner, makes_tensors
from dcpring.plan.placements import is_replicated


def load(
    task: Task, wanted: Mapping[int, Wanted], compact: CompactPlan | None = None, sharing: PeerSharing | None = None
) -> None:
    """Loads all that is wanted, once everything that can be checked before has been.

    Args:
        wanted: by position; of a compact plan, what the core cannot read straight into tensors.
        sharing: reads what several ranks need once; None: this rank reads all for itself.
    """
    if compact is None and not makes_tensors(task.planner):
        check_chunks(map(task.item, wanted), task.planner)
    origin, explain = task.origin, Explainer(task)
    used = {file for each in wanted.values() for file in _files_of(task, each.place)}
    files = sorted(used) if compact is None else list(compact.storage.file_sizes())
    with contextlib.ExitStack() as stack:
        if origin.inputs is None:
            with explain.core(()):
                inputs = stack.enter_context(contextlib.closing(Inputs(origin.path, files, origin.links)))
        else:
            inputs = origin.inputs
        _Loader(task, wanted, compact, Executor(task, inputs, explain)).load(sharing)
    with_tensors = 0 if compact is None else len(compact.match.file_bytes(compact.storage))
    task.stats.files = max(task.stats.files, with_tensors, len(used))


def _files_of(task: Task, place: Placed) -> list[str]:
    made = _quantised(task, place)
    return [place.file] if made is None else [place.file, *(shard.file for _, shard in made.scales)]


def _quantised(task: Task, place: Placed) -> Quantised | None:
    if place.kind != OPAQUE:  # the bytes are those of the elements
        return None
    return task.origin.quantised.get((place.file, place.offset, place.length))


class _Loader:
    """What ``load`` knows while files are open."""

    def __init__(
        self, task: Task, wanted: Mapping[int, Wanted], compact: CompactPlan | None, executor: Executor
    ) -> None:
        self._task, self._wanted, self._compact, self._executor = task, wanted, compact, executor
        self._explain, self._inputs = executor.explain, executor.inputs
        self._targets = Targets(task.rules.casts, self._explain)
        self._records = Records(task, wanted, executor, self._targets)
        self._makes_tensors = makes_tensors(task.planner)
        self._sources: dict[int, Payload | QuantisedPayload] = {}
        self._boxes: dict[int, BoxRead] = {}

    def load(self, sharing: PeerSharing | None) -> None:
        objects, wholes = self._classify()
        self._check_ends([*objects, *wholes])
        self._records.check(wholes)
        if not self._makes_tensors:  # else its tensors are made for some at a time
            self._boxes = {position: self._box(position) for position in self._sources}
        self._task.load.meter.begin(lambda: self._wanted_bytes([*objects, *wholes], sharing))
        give = self._records.read_objects(objects)
        with self._explain.changes():
            self._records.load_tensors(wholes)
            done = set[int]()
            if sharing is not None and self._compact is not None:
                done = sharing.run(self._task, self._compact, self._executor)
            self._read(done)
        for each in give:
            each()
        self._targets.log_casts()

    def _wanted_bytes(self, wholes: list[int], sharing: PeerSharing | None) -> int:
        """What this rank reads, some of it for others alone."""
        total = sum(self._wanted[position].place.length for position in wholes)
        for position, source in self._sources.items():
            total += read_bytes(source, *self._wanted[position][3:])
        if self._compact is not None:
            total += self._compact.size_bytes(self._compact.mask)
            total += 0 if sharing is None else sharing.surplus_bytes(self._compact)
        return total

    # ---- what each position is ----

    def _classify(self) -> tuple[list[int], list[int]]:
        """Finds the payloads of plain tensors. Returns the positions of objects, and of tensors that are unpickled."""
        objects: list[int] = []
        wholes: list[int] = []
        unknown: list[int] = []
        numbers = self._inputs.numbers
        for position, (place, stored, is_object, _, lengths) in self._wanted.items():
            if place.offset + place.length >= 1 << 63:
                raise CorruptCheckpointError(
                    f"{self._explain.name(position)} ends where no file can", self._explain.path
                )
            made = _quantised(self._task, place)
            if is_object:
                objects.append(position)
            elif made is not None:
                self._sources[position] = self._quantised_payload(made, self._is_shared(position, made, lengths))
            elif place.descriptors or place.kind == BYTES:
                wholes.append(position)
            elif place.kind == TENSOR and stored is not None:
                where = numbers[place.file], place.payload_offset, place.payload_bytes
                self._sources[position] = Payload(*where, place.crcs, None, *stored)
            else:
                unknown.append(position)
        return objects, wholes + self._locate(unknown)

    def _is_shared(self, position: int, made: Quantised, lengths: tuple[int, ...]) -> bool:
        """Whether ranks of this host may want the same of a quantised tensor, and are to read that once."""
        planner = self._task.planner
        if not isinstance(planner, RingLoadPlanner) or not planner.shares:
            return False
        value = planner.state_dict.get(self._task.item(position).dest_index.fqn)
        return lengths == made.whole or (isinstance(value, DTensor) and is_replicated(value))

    def _quantised_payload(self, made: Quantised, is_shared: bool) -> QuantisedPayload:
        codes = self._payload(made.codes, made.stored_sizes, is_shared)
        scales = tuple((box, self._payload(shard, box[1])) for box, shard in made.scales)
        return QuantisedPayload(made, codes, scales, made.shape, made.dtype)

    def _payload(self, part: StoredPart, sizes: tuple[int, ...], is_shared: bool = False) -> Payload:
        where = self._inputs.numbers[part.file], part.begin, part.end - part.begin
        return Payload(*where, part.crcs, None, sizes, part.dtype, is_shared)

    def _locate(self, unknown: list[int]) -> list[int]:
        """Looks into records that stock wrote, of which the metadata says no more. Returns those of no plain tensor."""
        if not unknown:
            return []
        places = [self._wanted[position].place for position in unknown]
        ranges = [(self._inputs.numbers[place.file], place.offset, place.length) for place in places]
        found = sorted(zip(ranges, unknown, strict=True))
        with self._explain.core(position for _, position in found):
            located = _C.locate(self._inputs.core, [where for where, _ in found])
        left: list[int] = []
        for ((file, record, _), position), about in zip(found, located, strict=True):
            if about is None:
                left.append(position)
                continue
            offset, size, crc, dtype_name, sizes = about
            stored = self._wanted[position].stored
            if stored is not None and tuple(stored[0]) != sizes:
                shapes = f"the record has shape {list(sizes)}, the metadata says {list(stored[0])}"
                path = self._inputs.names[file]
                raise CorruptCheckpointError(f"{self._explain.name(position)}: {shapes}", path, record)
            # 0: written without a CRC (checksum=False, torch.serialization.set_crc32_options(False))
            self._sources[position] = Payload(file, offset, size, None, crc or None, sizes, getattr(torch, dtype_name))
        return left

    # ---- whether it fits ----

    def _check_ends(self, records: list[int]) -> None:
        """Whether files have what is wanted of them, and tensors the sizes that the metadata says."""
        ends: list[tuple[int, int, int]] = []
        for position in records:
            place = self._wanted[position].place
            ends.append((position, self._inputs.numbers[place.file], place.offset + place.length))
        for position, source in self._sources.items():
            for one in source.stored:
                ends.append((position, one.file, one.payload_offset + one.payload_bytes))
                needed = math.prod(one.sizes) * one.dtype.itemsize
                if one.payload_bytes != needed:
                    path = f"{self._explain.path}/{self._inputs.names[one.file]}"
                    what = f"the record has {one.payload_bytes} bytes, its shape and dtype need {needed}"
                    raise CorruptCheckpointError(f"{self._explain.name(position)}: {what}", path, one.payload_offset)
        self._executor.check_ends(ends)

    def _box(self, position: int) -> BoxRead:
        """What is read for a position, and the tensor that it fills; asks the planner for that."""
        source, (*_, offsets, lengths) = self._sources[position], self._wanted[position]
        target = None if self._compact is None else self._compact.target(position)
        if target is None:
            target = self._task.planner.resolve_tensor(self._task.item(position)).detach()
        self._targets.check(position, target, source.dtype, lengths)
        self._targets.check_plain(position, target)
        return BoxRead(
            position,
            source if isinstance(source, Payload) else source.made_for(target),
            offsets,
            lengths,
            target,
        )

    # ---- plain tensors ----

    def _read(self, done: Set[int]) -> None:
        """Fills the plain tensors, but for these positions; those that a planner makes, 32 MiB at a time."""
        if self._compact is not None:
            mask = self._compact.mask
            self._executor.fill_all(self._compact, both(mask, zeros(mask_of(len(mask), done))) if done else mask)
        positions = [position for position in self._sources if position not in done]
        for window in windows(positions, self._target_bytes, device.HOST_BYTES if self._makes_tensors else None):
            boxes = [self._boxes.pop(at) if at in self._boxes else self._box(at) for at in window]
            self._executor.fill(boxes)
            if self._compact is None:
                for box in boxes:
                    self._task.planner.commit_tensor(self._task.item(box.position), box.memory)

    def _target_bytes(self, position: int) -> int:
        return math.prod(self._wanted[position].lengths) * self._sources[position].dtype.itemsize
