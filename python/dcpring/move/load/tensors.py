"""Plain tensors, read in parts: straight into the planner's tensors, or through host copies.

The latter where the destination is on another device, has another dtype, or is no plain memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base import windows
from dcpring.base.memory import NOTHING
from dcpring.errors import CorruptCheckpointError
from dcpring.move import device
from dcpring.move.crc import RunningCrcs
from dcpring.move.device import Uploader
from dcpring.move.load.boxes import (
    Box,
    Coded,
    CodedBox,
    Payload,
    coded_boxes,
    ends_of,
    host_bytes,
    parts_of,
    payload_of,
    sum_up,
)
from dcpring.move.load.reads import Call, Reads, Window
from dcpring.move.load.targets import Targets, bump_versions, is_plain_memory
from dcpring.move.load.task import Task
from dcpring.plan.load_planner import makes_tensors
from dcpring.plan.pieces import range_of_box
from dcpring.torchside.tensors import narrowed


class PlainTensors:
    """Reads plain tensors, and gives them to the planner."""

    def __init__(self, task: Task, reads: Reads, targets: Targets) -> None:
        self._planner, self._reads, self._explain = task.planner, reads, reads.explain
        self._wanted, self._payloads = task.wanted, task.payloads
        self._targets = targets
        self._resolved: dict[int, Tensor] = {}
        self._sums, self._is_checked = task.origin.sums, task.rules.options.checksum
        self._most_bytes = device.HOST_BYTES if makes_tensors(task.planner) else None

    def check(self, others_first: bool) -> None:
        """Whether all fit what they are filled into. A planner that makes tensors is asked window by window.

        Args:
            others_first: others are read before the core has seen where these end.
        """
        if self._most_bytes is None:
            self._resolved = {position: self._resolve(position) for position in self._payloads}
        if self._most_bytes is not None or others_first:
            self._check_ends(self._payloads)
            self._check_sizes()

    def _resolve(self, position: int) -> Tensor:
        target = self._planner.resolve_tensor(self._wanted[position].item).detach()
        self._targets.check(position, target, self._payloads[position].dtype)
        self._targets.check_plain(position, target)
        return target

    def _check_ends(self, positions: Iterable[int]) -> None:
        self._reads.check_ends([end for position in positions for end in ends_of(position, self._payloads[position])])

    def _check_sizes(self) -> None:
        """Whether records are as large as their tensors, which a planner may make before the core sees them."""
        for position, payload in self._payloads.items():
            for one in payload.stored:
                needed = math.prod(one.sizes) * one.dtype.itemsize
                if one.payload_bytes != needed:
                    path = f"{self._explain.path}/{self._reads.inputs.names[one.file]}"
                    what = f"the record has {one.payload_bytes} bytes, its shape and dtype need {needed}"
                    raise CorruptCheckpointError(f"{self._explain.name(position)}: {what}", path, one.payload_offset)

    def load(self, positions: Iterable[int]) -> None:
        for window in windows.windows(positions, self._target_bytes, self._most_bytes):
            self._load_window(window)

    def _target_bytes(self, position: int) -> int:
        return math.prod(self._wanted[position].item.lengths) * self._payloads[position].dtype.itemsize

    def _load_window(self, positions: list[int]) -> None:
        items = [self._wanted[position].item for position in positions]
        targets = [self._resolved.pop(at) if at in self._resolved else self._resolve(at) for at in positions]
        kinds = _C.Tensors([target if type(target) is Tensor else NOTHING for target in targets]).kinds()
        in_place: list[Box] = []
        through_host: list[Box] = []
        for position, item, target, kind in zip(positions, items, targets, kinds, strict=True):
            payload = self._payloads[position]
            plain = kind == 0 and type(target) is Tensor and is_plain_memory(target)
            if isinstance(payload, Coded):
                payload, plain = payload.made_for(target), plain and (target.size(-1) <= 1 or target.stride(-1) == 1)
            box = Box(position, payload, item.storage_offsets, item.lengths, target)
            (in_place if plain and target.dtype == payload.dtype else through_host).append(box)
        self._check_ends(box.position for box in through_host)
        self._read_boxes(in_place, self._sums, fills=True)
        bump_versions([box.memory for box in in_place])
        self._read_through_host(through_host)
        for item, target in zip(items, targets, strict=True):
            self._planner.commit_tensor(item, target)
            self._reads.stats.tensor_bytes += target.nbytes

    # ---- straight into memory ----

    def _read_boxes(self, boxes: list[Box], sums: RunningCrcs | None, fills: bool) -> None:
        """Reads into the boxes' memory; ``fills``: it is that of items."""
        self._read_plain([box for box in boxes if isinstance(box.payload, Payload)], sums, fills)
        coded = (part for box in boxes if isinstance(box.payload, Coded) for part in coded_boxes(box))
        for window in windows.windows(coded, lambda part: part.scale_bytes, device.HOST_BYTES):
            self._read_coded(window, fills)

    def _read_plain(self, boxes: list[Box], sums: RunningCrcs | None, fills: bool) -> None:
        self._reads.run(self._calls(boxes), fills)
        self._check_sums(boxes, sums)

    def _calls(self, boxes: list[Box]) -> list[Call]:
        return self._calls_for([(box, (*payload_of(box).for_core(), box.offsets, box.lengths)) for box in boxes])

    def _calls_for(self, wanted: list[tuple[Box, tuple[Any, ...]]], *values: list[Tensor]) -> list[Call]:
        """What reads boxes.

        Args:
            wanted: with what the core is told of each: four numbers of its record, its sizes, offsets and lengths.
            values: of scales, where there are some.
        """
        calls: list[Call] = []
        for gaps, options in self._reads.ways:
            chosen = [pair for pair in wanted if gaps is None or _has_others(*pair) == gaps]
            if chosen:
                boxes, told = zip(*chosen, strict=True)
                memory = [box.memory for box in boxes]
                read = functools.partial(_C.load, self._reads.inputs.core, list(told), memory, options, *values)
                calls.append(Call([box.position for box in boxes], read))
        return calls

    def _read_coded(self, parts: list[CodedBox], fills: bool) -> None:
        """Reads the scales of boxes, each once, and then their codes, of which the core makes what was wanted."""
        reads: list[tuple[Box, tuple[Any, ...]]] = []
        factors: list[Box] = []
        values: list[Tensor] = []
        numbers: dict[tuple[str, windows.Box], int] = {}
        for box, coded, codes, scales in parts:
            number = numbers.setdefault((coded.form.scale_name, scales), len(values))
            reads.append((box, (*coded.codes.for_core(), *codes, (*coded.form.how(box.offsets), number))))
            if number < len(values):
                continue
            values.append(torch.empty(scales[1], dtype=coded.scale_dtype))
            for whole, payload in coded.scales:
                common = windows.common_box(whole, scales)
                if common is not None:
                    memory = narrowed(values[-1], _less(common[0], scales[0]), common[1])
                    factors.append(Box(box.position, payload, _less(common[0], whole[0]), common[1], memory))
        self._read_plain(factors, None, fills=False)
        values = [value if value.dtype == torch.uint8 else value.to(torch.float32) for value in values]
        self._reads.run(self._calls_for(reads, values), fills)

    def _check_sums(self, boxes: list[Box], sums: RunningCrcs | None) -> None:
        """Checks what the core cannot, as it has seen only a part of a record with one CRC."""
        if sums is None or not self._is_checked:
            return
        for box in boxes:
            payload = payload_of(box)
            name = self._reads.inputs.names[payload.file]
            if not sum_up(sums, name, box):
                end = payload.payload_offset + payload.payload_bytes
                why = (
                    f"bytes {payload.payload_offset} to {end} of the file, all of this value, are damaged (CRC-32 is "
                    "not what it was when they were written); load another checkpoint"
                )
                path = f"{self._explain.path}/{name}"
                raise CorruptCheckpointError(f"{self._explain.name(box.position)}: {why}", path, payload.payload_offset)

    # ---- through the host ----

    def _read_through_host(self, boxes: list[Box]) -> None:
        """Reads windows of host copies; a large tensor comes in several boxes."""
        sums = self._sums or RunningCrcs()
        for is_coded in (False, True):
            chosen = [box for box in boxes if isinstance(box.payload, Coded) == is_coded]
            if not chosen:
                continue
            with Uploader([box.memory for box in chosen], sum(map(host_bytes, chosen))) as uploader:
                cut = uploader.window_bytes
                parts = (part for box in chosen for part in parts_of(box, cut // box.payload.dtype.itemsize))
                made = functools.partial(self._host_window, uploader, is_coded, sums)
                numbered = enumerate(windows.windows(parts, host_bytes, cut))
                self._reads.stream(uploader, itertools.starmap(made, numbered))

    def _host_window(
        self, uploader: Uploader, is_coded: bool, sums: RunningCrcs, number: int, parts: list[Box]
    ) -> Window:
        uploader.turn(number)
        hosts = uploader.take(number, ((part.lengths, part.payload.dtype) for part in parts))
        boxes = [part._replace(memory=host) for part, host in zip(parts, hosts, strict=True)]
        pairs = [(part.memory, host) for part, host in zip(parts, hosts, strict=True)]
        positions = [part.position for part in parts]
        if is_coded:  # what is made of what has been read before
            return Window(number, positions, [], pairs, functools.partial(self._read_boxes, boxes, sums, False))
        check = functools.partial(self._check_sums, boxes, sums)
        return Window(number, positions, self._calls(boxes), pairs, check)


def _has_others(box: Box, told: tuple[Any, ...]) -> bool:
    """Whether other ranks may want the same bytes, or some between them: of what is handed on they are not."""
    return (isinstance(box.payload, Coded) and box.payload.is_shared) or range_of_box(*told[5:8]) is None


def _less(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.sub, a, b))
