"""What a load reads, and by which rules."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpring import _C
from dcpring.errors import CorruptCheckpointError
from dcpring.format.quantised import Quantised
from dcpring.format.unpickler import Trust
from dcpring.move.crc import RunningCrcs
from dcpring.names.policy import Casts
from dcpring.options import IOOptions


class Inputs:
    """The data files of a directory, as the core reads them: opened when something of them is wanted, and kept open.

    Args:
        directory: which no name leads out of.
        names: of the files.
        links: where each really lies, of files that may be anywhere, because the user has named them; else empty.

    Attributes:
        names: of the files.
        numbers: their places among the names.
        core: the files themselves.
    """

    def __init__(self, directory: str, names: Sequence[str], links: Mapping[str, str] | None = None) -> None:
        self.names = list(names)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        files = self.names
        if links and names:
            paths = [links[name] for name in names]
            directory = os.path.commonpath([os.path.dirname(path) for path in paths])
            files = [os.path.relpath(path, directory) for path in paths]
        try:
            self.core = _C.Input(directory, files)
        except ValueError as error:  # a null character, or what no file system has
            raise CorruptCheckpointError(f"the metadata names files that cannot be ({error})", directory) from error

    def close(self) -> None:
        self.core.close()


@dataclass(frozen=True)
class Origin:
    """A checkpoint's data, and what several loads of it share.

    Attributes:
        path: its directory, as errors name it too.
        links: see ``Inputs``.
        quantised: tensors that are made of others, by their place: file and offset.
        inputs: open files, which stay open after a load; None: each load opens its own, and closes them.
        sums: of records of which each load reads a part; None: each load reads whole records, or checks none.
    """

    path: str
    links: Mapping[str, str] | None = None
    quantised: Mapping[tuple[str, int], Quantised] = field(default_factory=dict)
    inputs: Inputs | None = None
    sums: RunningCrcs | None = None


@dataclass(frozen=True)
class Rules:
    """How a load reads, what it believes, and what it changes.

    Attributes:
        options: of the core.
        trusted: what is done with objects that are more than plain data.
        safe_globals: what objects may refer to besides.
        casts: which are allowed.
        transforms: DCP's, by which a record's descriptors are undone.
    """

    options: IOOptions
    trusted: Trust = False
    safe_globals: Sequence[Any] = ()
    casts: Casts = "safe"
    transforms: Any = None
