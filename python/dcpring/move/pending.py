"""Files of a save that are written and not yet known to be durable."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from dcpring import _C
from dcpring.watch.events import Events


class Pending:
    """What one rank has written, whose syncs are under way at the same time: each alone would cost a flush of the disk.

    Args:
        path: the directory.
        is_synced: whether anything is made durable at all.
        claim: a file that is removed, too, if anything fails; "" for none.

    Attributes:
        watch: notes the syncs.
        names: of all files, linked ones too; they are removed if anything fails.
        synced: of those whose syncs are among these, in order.
        syncs: for what is written, None without.
    """

    def __init__(self, path: str, watch: _C.Watch | None, is_synced: bool, claim: str = "") -> None:
        self.names: list[str] = []
        self.synced: list[str] = []
        self.syncs = _C.Syncs(watch) if is_synced else None
        self._path = path
        self._claim = [claim] if claim else []
        self.watch = watch

    def namer(self, name_of: Callable[[int], str]) -> Callable[[], str]:
        """Gives names to the files, one after the other: each is among these from then on."""
        numbers = itertools.count()

        def new_name() -> str:
            self.names.append(name_of(next(numbers)))
            return self.names[-1]

        return new_name

    @contextlib.contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next save removes them
                _C.remove_files(self._path, [*self.names, *self._claim])
            raise

    def write(self, name: str, data: bytes, is_there: bool = False) -> None:
        """Creates a file, or fills one that is there and empty."""
        self.names.append(name)
        _C.write_file(self._path, name, is_there, data, self.syncs)
        self.synced.append(name)

    def sync_names(self) -> None:
        """Of the files, and that of the directory itself, whoever has made it and when."""
        if self.syncs is not None:
            if self.names:
                self.syncs.directory(self._path)
            self.syncs.above(self._path)

    def wait(self, events: Events) -> None:
        """Until all is durable."""
        if self.syncs is not None:
            with self.removed_on_failure(), events.span("sync"), events.core(self.watch, "syncs", self.synced):
                self.syncs.wait()
