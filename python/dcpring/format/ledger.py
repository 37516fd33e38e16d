"""What one rank notes of its tensors in a checkpoint's metadata, for a later save that does not write them again.

docs/format.md has the bytes. A ledger has a row for each item that the rank has written, in the order of its plan.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcpring import _C
from dcpring.format.metadata import block_count

UNKNOWN, SAMPLED, KEPT = 0, 1, 2
"""What is known of an item: nothing, its sample, or its digests too: it is in a file of tensors that are all kept."""

_HEAD = struct.Struct("<4sIIB16s16s")
_MAGIC = b"DRL\x01"
_SEED_BYTES = _ID_BYTES = 16
SAMPLE_BYTES = 8
MOST_MISSES = 6

Place = tuple[str, int, int, int, int, int, bytes | None]
"""As the core gives it: file, kind, offset, length, payload_offset, payload_size, crcs."""


@dataclass
class Ledger:
    """Attributes:
    seed: of the key of samples and digests.
    plan: what tells the rank's plan from others; "" bytes where it was not compact.
    is_durable: whether the files were synced.
    identities: 16 bytes for each item: of its name, its place in the tensor, and its dtype.
    samples: 64 bits for each, of some of its elements.
    states: a byte for each, of those above.
    misses: for each, how often it has changed although it was expected to stay.
    waits: for each, in how many saves more it will not be expected to.
    storage: where each is.
    digests: of those that are kept, by row, as ``_C.FileWriter.write_digested`` gives them.
    """

    seed: bytes
    plan: bytes
    is_durable: bool
    identities: bytes
    samples: array[int]
    states: bytearray
    misses: bytearray
    waits: bytearray
    storage: _C.StorageIndex
    digests: Mapping[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.states)

    def identity(self, row: int) -> bytes:
        return self.identities[_ID_BYTES * row : _ID_BYTES * (row + 1)]

    def place(self, row: int) -> Place:
        place = self.storage.get(row)
        assert place is not None
        return place

    def encode(self) -> bytes:
        packed, count = self.storage.encode(), len(self)
        head = _HEAD.pack(_MAGIC, count, len(packed), self.is_durable, self.seed, self.plan)
        kept = [self.digests[row] for row in range(count) if self.states[row] == KEPT]
        rows = (self.identities, self.samples.tobytes(), bytes(self.states), bytes(self.misses), bytes(self.waits))
        return b"".join((head, *rows, packed, *kept))


def decode_ledger(data: bytes | memoryview) -> Ledger:
    """Raises ValueError if it is none."""
    data = bytes(data)
    try:
        magic, count, packed_bytes, is_durable, seed, plan = _HEAD.unpack_from(data)
    except struct.error as error:
        raise ValueError(str(error)) from error
    parts, at = list[bytes](), _HEAD.size
    for size in (_ID_BYTES * count, SAMPLE_BYTES * count, count, count, count, packed_bytes):
        parts.append(data[at : at + size])
        at += size
    if magic != _MAGIC or at > len(data):
        raise ValueError("no ledger, or one of another version")
    identities, samples, states, misses, waits, packed = parts
    storage = _C.decode_storage_index(packed)
    if len(storage) != count or max(states, default=0) > KEPT or max(misses, default=0) > MOST_MISSES:
        raise ValueError("a ledger that contradicts itself")
    digests: dict[int, bytes] = {}
    for row in (row for row, state in enumerate(states) if state == KEPT):
        place = storage.get(row)
        size = 0 if place is None else _C.DIGEST_BYTES * block_count(place[4], place[5])
        digests[row] = data[at : at + size]
        at += size
        if place is None or at > len(data):
            raise ValueError("a ledger that is cut off")
    return Ledger(
        seed,
        plan,
        bool(is_durable),
        identities,
        array("Q", samples),
        bytearray(states),
        bytearray(misses),
        bytearray(waits),
        storage,
        digests,
    )


def new_seed() -> bytes:
    return os.urandom(_SEED_BYTES)


def key_of(seed: bytes) -> bytes:
    """The key that the core makes samples and digests with."""
    return hashlib.shake_128(seed).digest(_C.DIGEST_KEY_BYTES)


def identity_of(name: str, offsets: Sequence[int], lengths: Sequence[int], dtype: str) -> bytes:
    """What an item is called in a ledger: the same only for the same part of a tensor of that name, of that dtype."""
    text = repr((name, tuple(offsets), tuple(lengths), dtype))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()


def plan_of(*parts: bytes) -> bytes:
    """What tells a compact plan from others."""
    joined = hashlib.blake2b(digest_size=_ID_BYTES)
    for part in parts:
        joined.update(len(part).to_bytes(8, "little"))
        joined.update(part)
    return joined.digest()


NO_PLAN = bytes(_ID_BYTES)
NO_IDENTITY = bytes(_ID_BYTES)
