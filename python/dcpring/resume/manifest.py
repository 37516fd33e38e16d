"""What a checkpoint holds, by component: the manifest that a Checkpointer leaves in it, or what the keys say.

The manifest is JSON under the key ``dcpring``, an ordinary string to DCP. Checkpoints without one were written by other
programs; their components are the first parts of the names, and models may lie flat, as torchtitan leaves them.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from dcpring.base.text import ranks
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from dcpring.format.manifest import MANIFEST_KEY, Manifest
from dcpring.format.metadata import TENSOR, Placed, placed_of
from dcpring.format.unpickler import RefusedError, Safe, unpickle
from dcpring.resume import trees
from dcpring.store import layout
from dcpring.store.once_reader import OnceReader
from dcpring.store.reader import RingReader
from dcpring.torchside.dcp import load, own_errors, set_element

PER_RANK = "per_rank"

Path = tuple[str | int, ...]

_MOST_PACKED = 64
"""Bytes of a tensor for each that is stored of it, where that is not plain: quantised, or of another class."""

_RANK = re.compile(r"(?:dp_)?rank_(\d+)")


def rank_key(rank: int) -> str:
    """Where the state of a rank lies below its component."""
    return f"rank_{rank}"


class Stored:
    """A checkpoint's metadata and manifest. Nothing of its data but the manifest has been read."""

    def __init__(self, reader: OnceReader) -> None:
        self.reader = reader
        self.path = str(reader.path)
        self.metadata = reader.read_metadata()
        self.flat: set[str] = set()
        self._file_bytes: dict[str, int] = {}

    @functools.cached_property
    def _entries(self) -> Mapping[str, Any]:
        return self.metadata.state_dict_metadata

    @functools.cached_property
    def manifest(self) -> Manifest | None:
        """What a Checkpointer has noted; None where others saved, who may call an entry of their own so."""
        entry = self._entries.get(MANIFEST_KEY)
        text = self.read_object(MANIFEST_KEY) if isinstance(entry, BytesStorageMetadata) else None
        return Manifest.parse(text, self.path) if isinstance(text, str) else None

    def read_object(self, key: str) -> Any:
        """An object, in a load of its own."""
        state: dict[str, Any] = {key: None}
        progress, self.reader.progress = self.reader.progress, False
        try:
            with own_errors():
                load(state, self.reader, DefaultLoadPlanner(), None)
        finally:
            self.reader.progress = progress
        return state[key]

    @functools.cached_property
    def paths(self) -> dict[str, Path]:
        """Where each key lies in the state dict that was saved."""
        known = self.metadata.planner_data if isinstance(self.metadata.planner_data, dict) else {}
        return {key: tuple(known.get(key) or key.split(".")) for key in self.metadata.state_dict_metadata}

    @functools.cached_property
    def keys(self) -> dict[str, list[str]]:
        """The keys of each component."""
        found: dict[str, list[str]] = {name: [] for name in (self.manifest.components if self.manifest else ())}
        for key, path in self.paths.items():
            if key != MANIFEST_KEY or self.manifest is None:
                found.setdefault(str(path[0]), []).append(key)
        return found

    def adopt_flat(self, name: str, names: set[str], others: Iterable[str]) -> None:
        """Takes the tensors at the top for a model's, if it is not there by its name but some of its tensors are.

        Args:
            name: the component.
            names: of the model's tensors.
            others: components, whose keys are their own.
        """
        if self.manifest is None and name not in self.keys and names & self.keys.keys():
            own = [
                key for key, path in self.paths.items() if len(path) == 1 and self.is_tensor(key) and key not in others
            ]
            for key in own:
                del self.keys[key]
            self.keys[name] = own
            self.flat.add(name)

    @property
    def world_size(self) -> int | None:
        """The ranks that saved; None where the checkpoint does not say."""
        return self.manifest.world_size if self.manifest else None

    @property
    def origin(self) -> str:
        if self.manifest:
            return f"saved by {ranks(self.manifest.world_size)}"
        files = (str(info.relative_path) for info in (self.metadata.storage_data or {}).values())
        writers = {rank for rank in map(layout.rank_of_file, files) if rank is not None}
        least = f"by at least {ranks(max(writers) + 1)}, " if writers else ""
        return f"saved {least}without a manifest"

    def entry(self, name: str) -> dict[str, Any]:
        """What the manifest says of a component."""
        return self.manifest.components.get(name, {}) if self.manifest else {}

    def is_tensor(self, key: str) -> bool:
        return isinstance(self._entries.get(key), TensorStorageMetadata)

    def tensor(self, key: str) -> tuple[torch.dtype, torch.Size]:
        """The dtype and the shape of a tensor."""
        entry = self._entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype, entry.size

    def rank_keys(self, name: str) -> dict[int, list[str]]:
        """The keys of a component that belong to ranks ("rank_3", or "dp_rank_3"), by rank."""
        found: dict[int, list[str]] = {}
        if self.entry(name).get("kind", PER_RANK) != PER_RANK:
            return found
        for key in self.keys.get(name, ()):
            match = _RANK.fullmatch(str(self.paths[key][1])) if len(self.paths[key]) > 1 else None
            if match:
                found.setdefault(int(match[1]), []).append(key)
        return found

    def blank(self, keys: Iterable[str], device: str | torch.device = "cpu") -> dict[str, Any]:
        """What a load of these keys fills: tensors of the shapes that were saved, and None for objects.

        Raises:
            CorruptCheckpointError: a tensor is larger than what is stored of it; nothing has been allocated.
            CheckpointError: there is not so much memory.
        """
        tensors = [key for key in keys if self.is_tensor(key)]
        for key in tensors:
            self._check_size(key)
        made = {key: self._blank(key, device) for key in tensors}
        return {key: made.get(key) for key in keys}

    def same_data(self) -> dict[str, str]:
        """Tensors that have the very records of another one, and of which."""
        first: dict[tuple[str, int], str] = {}
        same: dict[str, str] = {}
        for key, places in self._places.items():
            other = first.setdefault((places[0].file, places[0].offset), key)
            is_again = other != key and self.is_tensor(key) and self.is_tensor(other)
            if is_again and (self.tensor(key), places) == (self.tensor(other), self._places[other]):
                same[key] = other
        return same

    @functools.cached_property
    def _places(self) -> dict[str, list[Placed]]:
        """Where the data of each key are."""
        found: dict[str, list[Placed]] = {}
        for index, info in (self.metadata.storage_data or {}).items():
            found.setdefault(index.fqn, []).append(placed_of(info, index.fqn, self.path))
        return found

    def _size_of(self, file: str) -> int:
        """The size of a data file; -1 if there is none, which the load will say."""
        if file not in self._file_bytes:
            path = os.path.join(self.path, file)
            self._file_bytes[file] = os.stat(path).st_size if os.path.isfile(path) else -1
        return self._file_bytes[file]

    def _check_size(self, key: str) -> None:
        """Whether a tensor is no larger than what is stored of it: shapes in metadata may be any."""
        dtype, size = self.tensor(key)
        needed, room = math.prod(size) * dtype.itemsize, 0
        places = [] if self.reader.has_headers else self._places.get(key, [])  # headers have been checked
        for place in places:
            file_bytes = self._size_of(place.file)
            if file_bytes < 0 or place.descriptors:  # what is compressed may become any size
                return
            if place.offset + place.length > file_bytes:
                why = f"the record ends at byte {place.offset + place.length}, the file at {file_bytes}"
                raise CorruptCheckpointError(f"{key!r}: {why}", os.path.join(self.path, place.file), place.offset)
            room += place.payload_bytes if place.kind == TENSOR else place.length * _MOST_PACKED
        if places and needed > room:
            what = f"{len(places)} records have {sum(place.length for place in places)} bytes"
            why = f"the shape {list(size)} and {dtype} need {needed} bytes, and {what}"
            raise CorruptCheckpointError(f"{key!r}: {why}", os.path.join(self.path, place.file), place.offset)

    def _blank(self, key: str, device: str | torch.device) -> Tensor:
        dtype, size = self.tensor(key)
        try:
            return torch.empty(size, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:
            needed = math.prod(size) * dtype.itemsize
            what = f"{key!r}: no tensor of {list(size)} {dtype} can be made on {device}, which takes {needed} bytes"
            raise CheckpointError(what) from error

    def rebuilt(self, loaded: dict[str, Any], depth: int) -> Any:
        """The state whose leaves these are, as it was saved.

        Args:
            loaded: values by key; all paths begin with the same ``depth`` parts.
            depth: 1 for a component, 2 for a rank's state.
        """
        root: dict[str, Any] = {}
        for key, value in loaded.items():
            set_element(root, ("state", *self.paths[key][depth:]), value)
        return trees.decode(root.get("state"))


def unpickled(value: bytes, reader: RingReader) -> Any:
    """What torchtitan pickled before it gave it to DCP; data only, unless the checkpoint is trusted.

    Bytes that are no pickle are left as they are.
    """
    if not value.startswith(pickle.PROTO):
        return value
    if reader.trusted:
        return pickle.loads(value)
    try:
        return unpickle(value, Safe(reader.safe_globals))
    except RefusedError as error:
        raise UntrustedCheckpointError(
            f"a pickle inside of the checkpoint holds more than plain data, and loading it could run code: {error}",
            f"pass reader_options={{'trusted': True}}, or {{'safe_globals': [{error.name}]}}",
        ) from None
