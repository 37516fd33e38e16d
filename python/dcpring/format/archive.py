"""Archives of ``torch.save``: zip files of which nothing is compressed, and the pickle in them, found without torch."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Mapping

from dcpring import _C
from dcpring.base.text import some

_END = struct.Struct("<4sHHHHIIH")
_CENTRAL = struct.Struct("<4s6xH8xIIHHH8xI")
_LOCAL = struct.Struct("<26xHH")
_END64 = struct.Struct("<4s28xQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_LARGE = 0xFFFFFFFF
_PICKLE, DATA = "data.pkl", "data/"
_SCRIPT = "constants.pkl"
"""What tells TorchScript, which torch.load would hand to torch.jit."""

_OLD_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_HEAD_BYTES = 32
"""What comes before that number, and it."""

_HARMLESS = re.compile(
    rb"torch(._utils)? (_rebuild_tensor_v[23]|_rebuild_parameter|[A-Za-z0-9]+Storage|float\d+|bfloat16|u?int\d+|Size)"
    rb"|collections OrderedDict|__builtin__ set|torch.storage UntypedStorage|_codecs encode"
)
"""What can be read whatever its arguments are; the last stands for bytes, which are long, and is so unless somebody's
own class calls it otherwise: that the load tells."""

_MOST_NAMED = 10


def is_saved(file: io.BytesIO) -> bool:
    """Whether it begins as what torch.save makes: a zip archive or, as until torch 1.6, a pickled number."""
    head = bytes(file.getbuffer()[:_HEAD_BYTES])
    return head[:2] == b"PK" or _OLD_MAGIC in head


def entries_of(data: memoryview) -> dict[str, slice] | None:
    """Where the entries of an archive lie, by their names in it; None for what is no archive, or TorchScript.

    All of the file must be what torch finds there, too: nothing lies before the archive or behind it. And nothing is
    compressed: torch unpacks whatever it is given.

    Raises:
        ValueError: it is not as ``torch.save`` makes it.
    """
    if data[:2] != b"PK":
        return None
    try:
        listed = list(_listed(data))
    except struct.error as error:
        raise ValueError("the archive is cut off") from error
    found = dict(listed)
    if len(found) < len(listed) or _PICKLE not in found:
        raise ValueError(f"the archive has no entry {_PICKLE!r}, or has one twice")
    return None if _SCRIPT in found else found


def pickle_of(data: memoryview) -> memoryview | None:
    """The pickle, which is the first entry of an archive of ``torch.save``; None where it is not."""
    try:
        name, place = next(_listed(data))
    except (struct.error, ValueError, StopIteration):
        return None
    return data[place] if name == _PICKLE else None


def _listed(data: memoryview) -> Iterator[tuple[str, slice]]:
    count, at = _directory_of(data)
    for _ in range(count):
        magic, method, packed, plain, name_size, extra, more, header = _CENTRAL.unpack_from(data, at)
        at += _CENTRAL.size
        _, _, name = str(data[at : at + name_size], "utf-8").partition("/")
        at += name_size
        if _LARGE in (plain, packed, header):
            plain, packed, header = _large(bytes(data[at : at + extra]), plain, packed, header)
        at += extra + more
        begin = header + _LOCAL.size + sum(_LOCAL.unpack_from(data, header))
        if method:
            raise ValueError(f"its entry {name!r} is compressed: torch.jit.save does that, torch.save never")
        if magic != b"PK\1\2" or packed != plain or begin + plain > len(data):
            raise ValueError("the archive has an entry that torch.save does not make")
        yield name, slice(begin, begin + plain)


def _directory_of(data: memoryview) -> tuple[int, int]:
    """How many entries an archive has, and where they are listed: the large form of its end is what torch reads."""
    end = len(data) - _END.size
    magic, _, _, _, count, size, at, comment = _END.unpack_from(data, max(end, 0))
    if end >= _LOCATOR64.size and data[end - _LOCATOR64.size : end - _LOCATOR64.size + 4] == b"PK\6\7":
        end -= _LOCATOR64.size
        _, _, place, _ = _LOCATOR64.unpack_from(data, end)
        magic64, count, size, at = _END64.unpack_from(data, place)
        if magic64 != b"PK\6\6" or place + _END64.size != end:
            raise ValueError("the end of the archive's directory is damaged")
        end = place
    if magic != b"PK\5\6" or comment or at + size != end:
        raise ValueError("the end of the archive's directory is damaged")
    return count, at


def _large(extra: bytes, *values: int) -> list[int]:
    """Sizes and offsets, of which those of 4 GiB and more stand in an extra field."""
    missing = values.count(_LARGE)
    while missing and len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{missing}Q", extra, 4))
            return [next(numbers) if value == _LARGE else value for value in values]
        extra = extra[4 + size :]
    return list(values)


def is_plainly_data(archive: bytes) -> bool:
    """Whether an object is seen to be data without being read, as most are: they name nothing, or tensors."""
    pickled = pickle_of(memoryview(archive))
    names = None if pickled is None else _C.names_in_pickle(pickled)
    return names is not None and all(_HARMLESS.fullmatch(b" ".join(named)) for named in names)


TO_A_COMMAND = "trusted=True, or safe_globals=[{}]; a command, with --trusted"
"""What takes such objects, for ``refused_text`` where whoever reads it has only looked at a checkpoint."""


def refused_text(
    refused: Mapping[str, str],
    load: str = "RingReader(..., safe_globals=[{}]), or with trusted=True",
    save: str = "",
) -> str:
    """Keys and classes that a load refuses, and what to do about it.

    Args:
        refused: by key.
        load: what to load with; the classes go into its braces.
        save: what is saving, if they are being saved.
    """
    shown = some([f"{key!r} ({name})" for key, name in refused.items()], _MOST_NAMED)
    names = sorted(set(refused.values()))
    allowed = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    text = f"what a load refuses by default, as it is more than plain data: {shown}. Load with {load.format(allowed)}"
    if not save:
        return text
    return (
        f"{text}; or keep numbers, strings, tensors and containers of them in the state. {save} with the same "
        'safe_globals, or with objects="allow", does not ask'
    )
