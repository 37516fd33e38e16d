"""The files that a load reads. Commands open them too, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dcpring import _C
from dcpring.errors import CorruptCheckpointError


class Inputs:
    """The data files of a directory. The core opens each when something of it is read first, and keeps it open.

    Args:
        directory: no name leads out of it.
        names: of the files.
        links: where each file really lies, if the user has named files that may be anywhere; else empty.

    Attributes:
        names: of the files.
        numbers: the place of each name among the names, by which the core knows the file.
        core: the files, as the core has them.
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
        except ValueError as error:  # a null character, or a name that no file system has
            raise CorruptCheckpointError(f"the metadata names files that cannot be ({error})", directory) from error

    def close(self) -> None:
        self.core.close()
