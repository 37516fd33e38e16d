"""Objects, and records that only ``torch.load`` understands: read whole; objects are checked to be plain data."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType

from dcpring.base.windows import windows
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from dcpring.format.unpickler import RefusedError, Safe, warn_of
from dcpring.format.zip import wrong_archive
from dcpring.move import device
from dcpring.move.load.reads import Reads
from dcpring.move.load.targets import Targets
from dcpring.move.load.task import Task
from dcpring.move.objects import NOT_SAVED, Loaded, is_saved
from dcpring.move.objects import load as load_object
from dcpring.options import overrides
from dcpring.plan.load_planner import RingLoadPlanner, makes_tensors
from dcpring.torchside.tensors import narrowed


class Records:
    """Reads records, and gives the planner what they hold."""

    def __init__(self, task: Task, reads: Reads, targets: Targets) -> None:
        self._planner, self._reads, self._explain, self._wanted = task.planner, reads, reads.explain, task.wanted
        self._rules, self._safe = task.rules, Safe(task.rules.safe_globals)
        self._targets = targets

    # ---- objects ----

    def read_objects(self, positions: list[int]) -> list[Callable[[], None]]:
        """Reads and checks objects; what is given hands them to the planner, once all of them have been checked."""
        return [
            self._handing_over(position, stream)
            for batch in self._batches(positions)
            for position, stream in zip(batch, self._read(batch), strict=True)
        ]

    def _handing_over(self, position: int, stream: io.BytesIO) -> Callable[[], None]:
        planner, item = self._planner, self._wanted[position].item
        value = stream if self._rules.trusted is True else self._unpickle(position, stream)
        if isinstance(value, io.BytesIO):
            return functools.partial(planner.load_bytes, item, value)
        if value.has_tensors or not isinstance(planner, RingLoadPlanner) or not planner.takes_objects:
            return lambda: planner.load_bytes(item, value.stream())
        return functools.partial(planner.load_object, item, value.value)

    def _unpickle(self, position: int, stream: io.BytesIO) -> Loaded | io.BytesIO:
        """Loads without running code; the stream itself where it is to be loaded whatever it holds."""
        try:
            if not is_saved(stream) and self._may_be_any(position):
                raise RefusedError(f"{NOT_SAVED} (damaged, or for a planner that reads it in its own way)", "")
            return load_object(stream, self._safe)
        except RefusedError as error:
            if self._rules.trusted == "warn":
                warn_of(error)
                stream.seek(0)
                return stream
            cure = f"the class in safe_globals=[{error.name}]" if error.name else "the class in safe_globals=[...]"
            raise UntrustedCheckpointError(
                f"{self._explain.name(position)} holds more than plain data and tensors, and loading it could run "
                f"code: {error}",
                f"pass RingReader(..., trusted=True), or {cure}",
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # damaged bytes end in errors of any kind
            raise CorruptCheckpointError(
                f"{self._explain.name(position)} cannot be read: {_first_line(error)}", self._explain.path
            ) from error

    # ---- tensors ----

    def check(self, positions: list[int]) -> None:
        """Whether they fit what they are filled into, before anything is read; a planner may make that only then."""
        self._check_ends(positions)
        for position in () if makes_tensors(self._planner) else positions:
            item, _, stored = self._wanted[position]
            if stored is not None:
                self._targets.check(position, self._planner.resolve_tensor(item), stored[1])

    def load_tensors(self, positions: Iterable[int]) -> None:
        for batch in self._batches(positions):
            values = [self._tensor_of(at, data) for at, data in zip(batch, self._read(batch), strict=True)]
            for position, value in zip(batch, values, strict=True):  # only now: none of them runs code
                self._load_tensor(position, value)

    def _load_tensor(self, position: int, tensor: Any) -> None:
        item, _, stored = self._wanted[position]
        name, path = self._explain.name, self._explain.path
        if not isinstance(tensor, Tensor):
            raise CorruptCheckpointError(f"{name(position)} is stored as {type(tensor).__name__}", path)
        if stored is not None and tensor.size() != stored[0]:
            shapes = f"the record's shape is {list(tensor.size())}, the metadata says {list(stored[0])}"
            raise CorruptCheckpointError(f"{name(position)}: {shapes}", path)
        part = narrowed(tensor, item.storage_offsets, item.lengths)
        target = self._planner.resolve_tensor(item)
        if target.layout == torch.strided:  # copy_ into a detached sparse tensor does not reach the original
            target = target.detach()
        self._targets.check(position, target, tensor.dtype)
        try:
            target.copy_(part)
        except RuntimeError as error:
            layouts = f"the checkpoint has {part.layout}, the state dict {target.layout}"
            raise CheckpointError(f"{name(position)} cannot be copied ({layouts}): {_first_line(error)}") from error
        self._explain.filled.append([position])
        self._planner.commit_tensor(item, target)
        self._reads.stats.tensor_bytes += part.numel() * part.dtype.itemsize

    def _tensor_of(self, position: int, stream: io.BytesIO) -> Any:
        loaded = stream if self._rules.trusted is True else self._unpickle(position, stream)
        if isinstance(loaded, io.BytesIO):
            return torch.load(loaded, map_location="cpu", weights_only=False)
        return loaded.value

    # ---- reading ----

    def _batches(self, positions: Iterable[int]) -> Iterator[list[int]]:
        return windows(positions, lambda at: self._wanted[at].place.length, device.HOST_BYTES)

    def _check_ends(self, positions: Iterable[int]) -> None:
        places = ((position, self._wanted[position].place) for position in positions)
        numbers = self._reads.inputs.numbers
        self._reads.check_ends([(at, numbers[place.file], place.offset + place.length) for at, place in places])

    def _read(self, positions: list[int]) -> list[io.BytesIO]:
        self._check_ends(positions)
        places = [self._wanted[position].place for position in positions]
        data = self._reads.records(positions, [(*self._reads.range_of(place), place.crcs) for place in places])
        values = [self._untransformed(at, raw) for at, raw in zip(positions, data, strict=True)]
        for position, place, value in zip(positions, places, values, strict=True):
            if self._rules.options.checksum and not place.crcs:
                self._check_archive(position, value)
        return values

    def _untransformed(self, position: int, data: bytes) -> io.BytesIO:
        item, place, _ = self._wanted[position]
        if not place.descriptors:
            return io.BytesIO(data)
        stream = self._rules.transforms.transform_load_stream(item, place.descriptors, io.BytesIO(data))
        return io.BytesIO(stream.read(-1))

    def _check_archive(self, position: int, data: io.BytesIO) -> None:
        """Checks the CRCs that torch.save has put into its archive, and torch.load does not look at."""
        if data.getbuffer()[:2] == b"PK":
            wrong = wrong_archive(data)
        else:
            wrong = "" if is_saved(data) or self._may_be_any(position) else NOT_SAVED
        if wrong:
            place = self._wanted[position].place
            path = f"{self._explain.path}/{place.file}"
            raise CorruptCheckpointError(f"{self._explain.name(position)} is damaged: {wrong}", path, place.offset)
        data.seek(0)

    def _may_be_any(self, position: int) -> bool:
        """Whether it is an object for a planner that has its own way to make and to read them."""
        is_object = self._wanted[position].item.type == LoadItemType.BYTE_IO
        return is_object and overrides(self._planner, (DefaultLoadPlanner, RingLoadPlanner), ("load_bytes",))


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
