"""Objects, and tensors that only ``torch.load`` understands: their records are read whole and unpickled.

Objects are checked to be plain data before the planner gets any of them.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcpring.base.windows import windows
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from dcpring.format.unpickler import RefusedError, Safe, warn_of
from dcpring.format.zip import wrong_archive
from dcpring.move import device
from dcpring.move.load.executor import Executor
from dcpring.move.load.targets import Targets
from dcpring.move.load.task import Task
from dcpring.move.load.wanted import Wanted
from dcpring.move.objects import NOT_SAVED, Loaded, is_saved
from dcpring.move.objects import load as load_object
from dcpring.options import overrides
from dcpring.plan.load_planner import RingLoadPlanner, makes_tensors
from dcpring.torchside.tensors import narrowed


class Records:
    """Reads records, and gives the planner what they hold."""

    def __init__(self, task: Task, wanted: Mapping[int, Wanted], executor: Executor, targets: Targets) -> None:
        self._planner, self._item, self._rules = task.planner, task.item, task.rules
        self._wanted, self._executor, self._explain, self._targets = wanted, executor, executor.explain, targets
        self._safe = Safe(task.rules.safe_globals)

    # ---- objects ----

    def read_objects(self, positions: list[int]) -> list[Callable[[], None]]:
        """Reads and checks objects. Returns calls that give them to the planner, once all have been checked."""
        return [
            self._giving(position, stream)
            for batch in self._batches(positions)
            for position, stream in zip(batch, self._read(batch), strict=True)
        ]

    def _giving(self, position: int, stream: io.BytesIO) -> Callable[[], None]:
        planner, item = self._planner, self._item(position)
        value = stream if self._rules.trusted is True else self._unpickle(position, stream)
        if isinstance(value, io.BytesIO):
            return functools.partial(planner.load_bytes, item, value)
        if value.has_tensors or not isinstance(planner, RingLoadPlanner) or not planner.takes_objects:
            return lambda: planner.load_bytes(item, value.stream())
        return functools.partial(planner.load_object, item, value.value)

    def _unpickle(self, position: int, stream: io.BytesIO) -> Loaded | io.BytesIO:
        """Unpickles without running code. Returns the stream itself if whatever it holds is to be unpickled."""
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

    def check(self, positions: Iterable[int]) -> None:
        """Whether tensors fit what they are filled into. A planner that makes tensors is asked later."""
        for position in () if makes_tensors(self._planner) else positions:
            wanted = self._wanted[position]
            if wanted.stored is not None:
                target = self._planner.resolve_tensor(self._item(position))
                self._targets.check(position, target, wanted.stored[1], wanted.lengths)

    def load_tensors(self, positions: Iterable[int]) -> None:
        for batch in self._batches(positions):
            values = [self._tensor_of(at, data) for at, data in zip(batch, self._read(batch), strict=True)]
            for position, value in zip(batch, values, strict=True):  # only now: none of them runs code
                self._load_tensor(position, value)

    def _load_tensor(self, position: int, tensor: Any) -> None:
        _, stored, _, offsets, lengths = self._wanted[position]
        item, name, path = self._item(position), self._explain.name, self._explain.path
        if not isinstance(tensor, Tensor):
            raise CorruptCheckpointError(f"{name(position)} is stored as {type(tensor).__name__}", path)
        if stored is not None and tensor.size() != stored[0]:
            shapes = f"the record's shape is {list(tensor.size())}, the metadata says {list(stored[0])}"
            raise CorruptCheckpointError(f"{name(position)}: {shapes}", path)
        part = narrowed(tensor, offsets, lengths)
        target = self._planner.resolve_tensor(item)
        if target.layout == torch.strided:  # copy_ into a detached sparse tensor does not reach the original
            target = target.detach()
        self._targets.check(position, target, tensor.dtype, lengths)
        try:
            target.copy_(part)
        except RuntimeError as error:
            layouts = f"the checkpoint has {part.layout}, the state dict {target.layout}"
            raise CheckpointError(f"{name(position)} cannot be copied ({layouts}): {_first_line(error)}") from error
        self._explain.filled.append([position])
        self._planner.commit_tensor(item, target)
        self._executor.stats.tensor_bytes += part.numel() * part.dtype.itemsize

    def _tensor_of(self, position: int, stream: io.BytesIO) -> Any:
        loaded = stream if self._rules.trusted is True else self._unpickle(position, stream)
        if isinstance(loaded, io.BytesIO):
            return torch.load(loaded, map_location="cpu", weights_only=False)
        return loaded.value

    # ---- reading ----

    def _batches(self, positions: Iterable[int]) -> Iterator[list[int]]:
        return windows(positions, lambda at: self._wanted[at].place.length, device.HOST_BYTES)

    def _read(self, positions: list[int]) -> list[io.BytesIO]:
        places = [self._wanted[position].place for position in positions]
        numbers = self._executor.inputs.numbers
        ranges = [(numbers[place.file], place.offset, place.length, place.crcs) for place in places]
        data = self._executor.records(positions, ranges)
        values = [self._untransformed(at, raw) for at, raw in zip(positions, data, strict=True)]
        for position, place, value in zip(positions, places, values, strict=True):
            if self._rules.options.checksum and not place.crcs:
                self._check_archive(position, value)
        return values

    def _untransformed(self, position: int, data: bytes) -> io.BytesIO:
        descriptors = self._wanted[position].place.descriptors
        if not descriptors:
            return io.BytesIO(data)
        stream = self._rules.transforms.transform_load_stream(self._item(position), descriptors, io.BytesIO(data))
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
        is_object = self._wanted[position].is_object
        return is_object and overrides(self._planner, (DefaultLoadPlanner, RingLoadPlanner), ("load_bytes",))


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
