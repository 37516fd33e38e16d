"""The files that a load reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dcpring import _C
from dcpring.errors import CorruptCheckpointError


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
