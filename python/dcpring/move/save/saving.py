"""One rank's write_data: in which order items are written, by which way each, and where it ended up.

Tensors that lie plainly in CPU memory go to the core as they are, those of an accelerator through pinned copies, and
what only ``torch.save`` understands as the bytes it makes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner

from dcpring import _C
from dcpring.base.memory import DEVICE, FREED, LAZY, OTHER, PLAIN, handles_and_kinds, is_freed, same_memory
from dcpring.base.windows import windows
from dcpring.errors import CheckpointError, PlanError, naming
from dcpring.format.ledger import Place
from dcpring.format.metadata import place_at
from dcpring.move.device import Downloader, HostCopies
from dcpring.move.objects import PICKLE_CURE, Judge, archive_of
from dcpring.move.save.items import TableItems, items_of
from dcpring.move.save.results import Results, results_of
from dcpring.options import IOStats
from dcpring.plan.save_planner import makes_tensors

WINDOW_BYTES = 32 << 20
"""How much a planner that makes new tensors in ``resolve_data`` is asked for at a time."""

_RECORD_BYTES = 1024
"""A record's head and tail, roughly; for the size hint."""


class Looked(NamedTuple):
    """Tensors that are to be written.

    Attributes:
        positions: of their items.
        tensors: as they were planned.
        handles, kinds: as of ``handles_and_kinds``.
    """

    positions: list[int]
    tensors: list[Tensor]
    handles: _C.Tensors
    kinds: bytes


class Saving:
    """One rank's items being written, to one file or more: in each tensors first, then what has to be pickled.

    Attributes:
        items: of the plan.
        storage: where they are, by position.
        digests: of tensors that are expected to stay as they are, by position.
    """

    def __init__(
        self,
        items: Any,
        planner: SavePlanner,
        *,
        path: str,
        options: Any,
        transforms: Any,
        piece_bytes: int,
        stats: IOStats,
        judge: Judge | None,
    ) -> None:
        self.items = items_of(items, planner)
        self.storage = _C.StorageIndex(len(items))
        self._given = items
        self._path = path
        self._options = options
        self._transforms = transforms
        self._piece_bytes = piece_bytes
        self._window_bytes = WINDOW_BYTES if makes_tensors(planner) else None
        self._stats = stats
        self._judge = judge
        self._descriptors: dict[int, list[str]] = {}
        self.digests: dict[int, bytes] = {}
        self._digest_key: bytes | None = None
        self._looked: Looked | None = None
        self._written: list[int] = []

    def planned_bytes(self) -> int:
        return sum(self.items.sizes)

    @property
    def knows_tensors(self) -> bool:
        """Whether tensors are in memory before they are written, and are stored as they are."""
        return not self._transforms.extensions and self._window_bytes is None

    def take_over(self, name: str, places: Mapping[int, Place], digests: Mapping[int, bytes]) -> None:
        """Notes a file that an earlier save has written, with what is in it."""
        self.storage.put([(name, *place[1:]) for place in places.values()], list(places))
        self.digests.update(digests)
        linked = sum(place[5] for place in places.values())
        self._stats.tensor_bytes += linked
        self._stats.linked_bytes += linked
        self._stats.linked_files += 1

    def write(
        self,
        name: str,
        tensors: list[int],
        objects: list[int],
        digest_key: bytes | None = None,
        syncs: _C.Syncs | None = None,
    ) -> None:
        """Writes a file with what is at these positions. It is durable once these syncs were waited for. With a key
        digests are made of its tensors: plain ones.
        """
        self._digest_key = digest_key
        file = _C.FileWriter(self._path, name, self._size_hint(tensors), self._options)
        try:
            if self._judge is not None and self._judge.objects == "error":  # before anything large is written
                self._write_pickled(file, objects, self.items.archive)
                objects = []
            for window in windows(tensors, self.items.sizes.__getitem__, self._window_bytes):
                self._write_tensors(file, window)
            self._write_pickled(file, objects, self.items.archive)
            file.finish(syncs)
            self._note_stats(file)
        except (OSError, ValueError) as error:
            key = self._key_of(error)
            if key is None:
                raise
            raise CheckpointError(f"cannot save {key!r}: {error}") from error
        finally:
            file.close()

    def results(self, ledger: bytes) -> Any:
        """DCP's WriteResults; of a compact plan, in compact form."""
        if isinstance(self.items, TableItems) and not self._transforms.extensions:
            return Results(self.storage.encode(), self._given, self._stats, ledger)
        made = list(results_of(self._given, self.storage, self._descriptors))
        return Results(None, made, self._stats, ledger)

    def _size_hint(self, tensors: list[int]) -> int:
        """Bytes that the file will need, rounded up; the file is cut to its real length in the end."""
        sizes = [self.items.sizes[position] for position in tensors]
        padding = _C.ALIGNMENT_BYTES * sum(size >= _C.LARGE_PAYLOAD_BYTES for size in sizes)
        return sum(sizes) + padding + _RECORD_BYTES * len(sizes)

    def _note_stats(self, file: _C.FileWriter) -> None:
        written, engine, direct = file.stats()
        self._stats.bytes += written
        self._stats.engine = engine or self._stats.engine
        self._stats.direct |= direct

    def _key_of(self, error: OSError | ValueError) -> str | None:
        """The key that the core's item index stands for."""
        item = getattr(error, "item", None)
        return self.items.names[self._written[item]] if item is not None and item < len(self._written) else None

    # ---- tensors ----

    def _write_tensors(self, file: _C.FileWriter, positions: list[int]) -> None:
        if self._transforms.extensions:
            self._write_pickled_tensors(file, positions)
            return
        looked = self.look(positions)
        self._looked = None
        in_memory = {index: looked.tensors[index] for index, kind in enumerate(looked.kinds) if kind != OTHER}
        if same := same_memory(in_memory):
            self._write_once(file, positions, looked.tensors, same)
        else:
            self._write_distinct(file, positions, looked.tensors, looked.handles, looked.kinds)

    def look(self, positions: list[int]) -> Looked:
        """The tensors at these positions, which are kept in case that they are written next."""
        if self._looked is None or self._looked.positions != positions:
            self._looked = None
            tensors = self._checked(positions, self.items.resolve(positions))
            self._looked = Looked(positions, tensors, *handles_and_kinds(tensors))
        return self._looked

    def _write_once(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], same: dict[int, int]
    ) -> None:
        """Writes tied tensors once, for all their names."""
        kept = [index for index in range(len(tensors)) if index not in same]
        distinct = [tensors[index] for index in kept]
        self._write_distinct(file, [positions[index] for index in kept], distinct, *handles_and_kinds(distinct))
        for index, first_index in same.items():
            if positions[first_index] in self.digests:
                self.digests[positions[index]] = self.digests[positions[first_index]]
        first = [place_at(self.storage, positions[index]) for index in same.values()]
        self.storage.put(first, [positions[index] for index in same])
        self._stats.tensor_bytes += sum(place[5] for place in first)

    def _write_distinct(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], handles: _C.Tensors, kinds: Any
    ) -> None:
        if not any(kinds):
            self._write_plain(file, positions, tensors, handles)
            return
        in_memory = [index for index, kind in enumerate(kinds) if kind in (PLAIN, LAZY)]
        for window in windows(in_memory, lambda i: tensors[i].nbytes if kinds[i] == LAZY else 0, WINDOW_BYTES):
            made = [tensors[i].resolve_conj().resolve_neg() for i in window]
            self._write_plain(file, [positions[i] for i in window], made)
            made.clear()  # before the next are made
        on_device = [index for index, kind in enumerate(kinds) if kind == DEVICE]
        for device in dict.fromkeys(tensors[i].device for i in on_device):
            chosen = [i for i in on_device if tensors[i].device == device]
            self._write_from_device(file, [positions[i] for i in chosen], [tensors[i].detach() for i in chosen])
        other = [positions[index] for index, kind in enumerate(kinds) if kind == OTHER]
        self._write_pickled_tensors(file, other)

    def _checked(self, positions: Sequence[int], tensors: list[Any]) -> list[Tensor]:
        for position, tensor in zip(positions, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise PlanError(
                    f"cannot save {self.items.names[position]!r}: Data must be torch.Tensor for non-BYTE_IO write "
                    f"items, and it is a {type(tensor)}"
                )
            if tensor.is_meta:
                raise CheckpointError(
                    f"cannot save {self.items.names[position]!r}: it is on the meta device and has no data"
                )
        return tensors

    def _write_plain(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], handles: _C.Tensors | None = None
    ) -> None:
        self._written = positions
        handles = _C.Tensors(tensors) if handles is None else handles
        kinds, key = self.items.kinds_of(positions, tensors), self._digest_key
        made = file.write_tensors(handles, self.storage, positions, kinds, key)
        if key is not None:
            self.digests.update(zip(positions, made, strict=True))
        self._stats.tensor_bytes += made if key is None else sum(tensor.nbytes for tensor in tensors)

    def _write_from_device(self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor]) -> None:
        file.overlap()
        with contextlib.closing(Downloader(self._piece_bytes).pieces(tensors)) as pieces:
            for piece in pieces:
                self._write_piece(file, piece, [positions[index] for index in piece.indices], tensors)

    def _write_piece(self, file: _C.FileWriter, piece: HostCopies, positions: list[int], tensors: list[Tensor]) -> None:
        if piece.whole:
            self._write_plain(file, positions, piece.tensors)
            return
        tensor = tensors[piece.indices[0]]
        self._written = positions
        kinds = self.items.kinds_of(positions, [tensor])
        shape, begin = tuple(tensor.shape), piece.part_offset
        self._stats.tensor_bytes += file.write_part(piece.tensors, shape, begin, self.storage, positions, kinds)

    # ---- what is pickled ----

    def _tensor_bytes(self, position: int) -> bytes:
        tensor = self._checked([position], self.items.resolve([position]))[0].detach().cpu()
        if is_freed(tensor):
            raise CheckpointError(f"cannot save {self.items.names[position]!r}: {FREED}")
        if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
            tensor = tensor.clone()
        return archive_of(tensor)

    def _write_pickled_tensors(self, file: _C.FileWriter, positions: list[int]) -> None:
        self._stats.tensor_bytes += self._write_pickled(file, positions, self._tensor_bytes)

    def _write_pickled(self, file: _C.FileWriter, positions: Iterable[int], pickled: Callable[[int], bytes]) -> int:
        """Writes items as whole byte strings, a bounded number of bytes at a time; how many they are."""
        written = 0
        made = ((position, self._pickled(position, pickled)) for position in positions)
        for window in windows(made, lambda pair: len(pair[1]), WINDOW_BYTES):
            self._written = [position for position, _ in window]
            written += file.write_bytes([data for _, data in window], self.storage, self._written)
            window.clear()  # before the next is made
        return written

    def _pickled(self, position: int, pickled: Callable[[int], bytes]) -> bytes:
        """What is written: looked at, and transformed."""
        name = self.items.names[position]
        with naming(lambda: f"cannot save {name!r}", PICKLE_CURE):
            data = pickled(position)
        if self._judge is not None:
            self._judge.look(name, data)
        if not self._transforms.extensions:
            return data
        out = io.BytesIO()
        stream, descriptors = self._transforms.transform_save_stream(self.items.item(position), out)
        stream.write(data)
        stream.close()
        self._descriptors[position] = descriptors
        return out.getvalue()
