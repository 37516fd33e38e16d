"""safetensors files as target: one, or several with an index, as model hubs lay them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

import torch

from dcpring import _C
from dcpring.base.windows import windows
from dcpring.format import safetensors
from dcpring.format.model_files import ModelFileNames
from dcpring.hf.commit import Unfinished, commit_model, discard, remove_unfinished
from dcpring.move.pending import Pending
from dcpring.sources.beside import directory_beside, file_beside, joins, writing
from dcpring.sources.stream import Source, SourceItem, TargetPart, first_names, stream
from dcpring.store.one_saver import OneSaver
from dcpring.watch.events import Events


class SafetensorsTarget:
    """One file, or a directory of shards with an index. Of a tensor with several names the first is written.

    The others are in the notes of its file, as safetensors' ``save_model`` has them.
    """

    format = "safetensors"

    def __init__(
        self, path: FilePath, items: Sequence[SourceItem], notes: Mapping[str, str], shard_bytes: int | None
    ) -> None:
        safetensors.check_entries({item.name: item.dtype for item in items})
        self._path = path
        self._notes = {"format": "pt", **notes}
        self._first = first_names(items)
        self._first.update((name, name) for name in safetensors.NOT_TIED if name in self._first)
        owners = [item for item in items if self._first[item.name] == item.name]
        self.is_directory = shard_bytes is not None
        self._groups = list(windows(owners, lambda item: item.nbytes, shard_bytes)) or [[]]
        self.files = [path.name]
        if self.is_directory:
            names = ModelFileNames()
            self.files = [names.of_several(number, len(self._groups)) for number in range(len(self._groups))]
        self.nbytes = sum(item.nbytes for item in owners)
        self.tied = len(items) - len(owners)

    def write(self, source: Source, overwrite: bool, watch: _C.Watch | None) -> None:
        if not self.is_directory:
            with file_beside(self._path, overwrite, self.nbytes, watch) as out:
                self._fill(out, self._groups[0], source)
        elif joins(self._path):
            self._write_into(self._path, source, watch)
        else:
            with directory_beside(self._path, overwrite) as directory:
                self._write_into(FilePath(directory), source, watch)

    def _write_into(self, directory: FilePath, source: Source, watch: _C.Watch | None) -> None:
        """Writes files, and commits them, in a directory that may hold others."""
        names = ModelFileNames()
        with OneSaver(directory):
            remove_unfinished(directory, names)
            unfinished = Unfinished.of(names, len(self._groups))
            unfinished.make_folder(directory)
            indices = self._write_files(directory, unfinished, source, watch)
            commit_model(directory, unfinished, indices, True)

    def _write_files(
        self, directory: FilePath, unfinished: Unfinished, source: Source, watch: _C.Watch | None
    ) -> list[str]:
        """Writes files, and their indices, whose names are returned; all is durable then."""
        pending = Pending(str(directory), None, is_synced=True)
        try:
            for name, group in zip(unfinished.files, self._groups, strict=True):
                with writing(str(directory), name, sum(item.nbytes for item in group), watch, pending.syncs) as out:
                    self._fill(out, group, source)
            pairs = zip(self.files, self._groups, strict=True)
            weights = {item.name: file for file, group in pairs for item in group}
            for index in unfinished.indices(weights, self.nbytes):
                pending.write(*index)
            pending.wait(Events())
        except BaseException:
            discard(directory, [*unfinished.files, *pending.names])
            raise
        return pending.names

    def _fill(self, out: _C.FileWriter, items: Sequence[SourceItem], source: Source) -> None:
        # Larger elements first: every tensor is then aligned to its own.
        items = sorted(items, key=lambda item: -(item.dtype or torch.uint8).itemsize)
        entries = [(item.name, item.dtype, item.shape) for item in items if item.dtype and item.shape is not None]
        here = {item.name for item in items}
        tied = {name: first for name, first in self._first.items() if name != first and first in here}
        out.write_bytes([safetensors.make_header(entries, self._notes, tied)])
        for runs in stream(source, map(TargetPart.all_of, items)):
            out.write_bytes([run.part.memory for run in runs])
