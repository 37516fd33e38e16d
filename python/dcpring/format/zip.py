"""A zip file of stored entries, of which only the payloads' sizes are known before they are written.

As docs/format.md describes a record, with any number of payloads: their CRC-32s follow them in data descriptors.
"""

from __future__ import annotations

import os
import struct
import zipfile
from dataclasses import dataclass
from typing import IO

from dcpring import _C

_LIMIT = 0xFFFFFFFF
_MOST_ENTRIES = 0xFFFF
_VERSION_PLAIN, _VERSION_ZIP64 = 20, 45
_CRC_FOLLOWS = 8
_ZIP64_ID, _PADDING_ID = 1, 0x4246
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_SMALL_ALIGNMENT = 64
_ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError)


@dataclass
class _ZipEntry:
    name: bytes
    size: int
    header: int
    flags: int
    crc: int = 0

    @property
    def is_large(self) -> bool:
        return self.size >= _LIMIT


class ZipStream:
    """What has to be written around the entries' data; ``position`` is how much there is by then."""

    def __init__(self) -> None:
        self.position = 0
        self._entries: list[_ZipEntry] = []

    def small(self, name: str, data: bytes) -> bytes:
        """A complete entry."""
        entry = _ZipEntry(name.encode(), len(data), self.position, 0, _C.crc32(data))
        return self._count(self._opened(entry, b"") + data)

    def begin(self, name: str, size: int) -> bytes:
        """What comes before a payload, which is then aligned in the file: large ones to whole pages."""
        entry = _ZipEntry(name.encode(), size, self.position, _CRC_FOLLOWS)
        extra = struct.pack("<HHQQ", _ZIP64_ID, 16, 0, 0) if entry.is_large else b""
        alignment = _C.ALIGNMENT_BYTES if size >= _C.LARGE_PAYLOAD_BYTES else _SMALL_ALIGNMENT
        padding = -(self.position + _LOCAL.size + len(entry.name) + len(extra)) % alignment
        if 0 < padding < 4:
            padding += alignment
        if padding:
            extra += struct.pack("<HH", _PADDING_ID, padding - 4) + bytes(padding - 4)
        return self._count(self._opened(entry, extra))

    def end(self, crc: int) -> bytes:
        """What comes behind the payload of the entry that was begun last."""
        entry = self._entries[-1]
        entry.crc = crc
        self.position += entry.size
        return self._count(struct.pack("<IIQQ" if entry.is_large else "<IIII", 0x08074B50, crc, entry.size, entry.size))

    def directory(self) -> bytes:
        """What comes last."""
        begin, entries = self.position, len(self._entries)
        central = b"".join(map(_central, self._entries))
        end = b""
        if begin + len(central) >= _LIMIT or entries >= _MOST_ENTRIES:
            versions = (_VERSION_ZIP64, _VERSION_ZIP64)
            end = _END64.pack(0x06064B50, 44, *versions, 0, 0, entries, entries, len(central), begin)
            end += _LOCATOR64.pack(0x07064B50, 0, begin + len(central), 1)
        count = min(entries, _MOST_ENTRIES)
        sizes = (min(len(central), _LIMIT), min(begin, _LIMIT))
        return self._count(central + end + _END.pack(0x06054B50, 0, 0, count, count, *sizes, 0))

    def _opened(self, entry: _ZipEntry, extra: bytes) -> bytes:
        self._entries.append(entry)
        version = _VERSION_ZIP64 if entry.is_large else _VERSION_PLAIN
        size = _LIMIT if entry.is_large else 0 if entry.flags else entry.size
        lengths = (size, size, len(entry.name), len(extra))
        return _LOCAL.pack(0x04034B50, version, entry.flags, 0, 0, 0, entry.crc, *lengths) + entry.name + extra

    def _count(self, data: bytes) -> bytes:
        self.position += len(data)
        return data


def _central(entry: _ZipEntry) -> bytes:
    numbers = [value for value in (entry.size, entry.size, entry.header) if value >= _LIMIT]
    extra = struct.pack(f"<HH{len(numbers)}Q", _ZIP64_ID, 8 * len(numbers), *numbers) if numbers else b""
    version = _VERSION_ZIP64 if numbers else _VERSION_PLAIN
    size = min(entry.size, _LIMIT)
    lengths = (size, size, len(entry.name), len(extra), 0, 0, 0, 0, min(entry.header, _LIMIT))
    head = _CENTRAL.pack(0x02014B50, version, version, entry.flags, 0, 0, 0, entry.crc, *lengths)
    return head + entry.name + extra


def compressed_entry(archive: zipfile.ZipFile) -> str:
    """That an entry is compressed, and which; "" where none is. A few bytes could be a lot of work, and memory."""
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            return f"its entry {entry.filename!r} is compressed: torch.jit.save does that, torch.save never"
    return ""


def wrong_archive(file: IO[bytes]) -> str:
    """What is wrong with an archive, "" for nothing."""
    try:
        with zipfile.ZipFile(file) as archive:
            if compressed := compressed_entry(archive):
                return compressed
            packed = sum(entry.compress_size for entry in archive.infolist())
            if packed > file.seek(0, os.SEEK_END):  # or a small file could be a lot of work
                return "its zip archive cannot be unpacked: its entries overlap"
            damaged = archive.testzip()
    except _ZIP_ERRORS as error:
        return f"its zip archive cannot be unpacked: {error}"
    return f"its checksum does not match ({damaged})" if damaged is not None else ""
