"""The ``step-N`` folders of a Checkpointer: which count, which belong to a branch that was left, and which go.

A step counts once its ``.metadata`` is there. When training goes back to an older step and saves, the later ones are
left: they stay, but are not what a resume goes on with. That is noted in ``.dcpring-left.json``, by rank 0 alone, in
two parts. Before a save it gets what is left already, and beside it what will be, once that save is committed: the
step's metadata is then another than it was. After the save the second part takes the first one's place. So a crash at
any time leaves a note that is true: the commit of the step is the commit of what it leaves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dcpring import _C
from dcpring.base import strict_json
from dcpring.base.files import names_in, read_regular, unfinished_name
from dcpring.errors import CorruptCheckpointError
from dcpring.format.metadata import METADATA_NAME, metadata_id
from dcpring.store import layout

logger = logging.getLogger("dcpring")

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_DOOMED = re.compile(r"\.step-\d+\.removed")

_MOMENT_SECONDS = 3.0

LEFT_NAME = ".dcpring-left.json"
_UNFINISHED = re.compile(rf"{re.escape(LEFT_NAME)}\.[0-9a-f]{{16}}\.tmp")
_VERSION = 1


class Fork(NamedTuple):
    """Where a branch began that was left.

    Attributes:
        step: the last that it has in common with what training went on with.
        branch: its number. Steps of one number were left together.
    """

    step: int
    branch: int


Left = dict[int, Fork]
"""Steps that were left."""


def leave(left: Mapping[int, Fork], steps: Iterable[int], base: int | None, step: int) -> Left:
    """What is left once a step is saved.

    Args:
        left: what is left until then.
        steps: that are there.
        base: the step that training has come from, by a load and saves since; None where that is not known.
        step: that is saved. One of that number that is there is replaced.
    """
    there = set(steps)
    others = {other: _without(step, at, left, there) for other, at in left.items() if other != step}
    if base is None:
        return others
    # Who goes on from a step that was left takes up its branch, and those that this began in; what is later in them
    # begins there from now on.
    resumed: set[int] = set()
    fork = base
    while fork in left:
        at = left[fork]
        together = {other for other in others if left[other].branch == at.branch}
        resumed |= {other for other in together if other <= fork}
        others |= {other: at._replace(step=fork) for other in together if other > fork}
        fork = at.step
    fork = min(fork, step)
    branch = max((at.branch for at in left.values()), default=0) + 1
    later = {other: Fork(fork, branch) for other in there - left.keys() if other > fork and other != step}
    return {other: at for other, at in others.items() if other not in resumed or other > step} | later


def _without(step: int, at: Fork, left: Mapping[int, Fork], there: set[int]) -> Fork:
    """A fork that is a step which goes is at the one before it."""
    if at.step != step:
        return at
    own = left.get(step)
    branch = own.branch if own else None
    before = [other for other in there if other < step and (left[other].branch if other in left else None) == branch]
    return at._replace(step=max(before, default=own.step if own else -1))


def superfluous(
    steps: Iterable[int], left: Iterable[int], saved: int, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """The steps that are not to be kept, after one of them was saved. Later ones, and those that were left, stay."""
    if keep_last is None:
        return []
    older = [step for step in sorted(set(steps) - set(left)) if step <= saved]
    return [step for step in older[:-keep_last] if not keep_every or step % keep_every]


@dataclass
class _Note:
    """What the file says.

    Attributes:
        left: steps that were left.
        step, was: a save that is under way, and the id of the metadata that the step had before.
        then: steps that are left once it is committed.
    """

    left: Left = field(default_factory=dict)
    step: int | None = None
    was: str = ""
    then: Left = field(default_factory=dict)

    def dump(self) -> bytes:
        pending = None if self.step is None else {"step": self.step, "was": self.was, "left": self.then}
        return json.dumps({"version": _VERSION, "left": self.left, "pending": pending}, sort_keys=True).encode()

    @staticmethod
    def parse(data: bytes) -> _Note:
        """Raises ValueError, TypeError, KeyError or AttributeError if it is none."""
        note = strict_json.loads(data)
        if note["version"] != _VERSION:
            raise ValueError(f"it has version {note['version']!r}, this dcpring knows {_VERSION}")
        pending = note["pending"] or {"step": None, "was": "", "left": {}}
        return _Note(_left(note["left"]), pending["step"], pending["was"], _left(pending["left"]))


def _left(entries: Mapping[str, Any]) -> Left:
    left = {int(step): Fork(*map(int, at)) for step, at in entries.items()}
    if any(at.step >= step for step, at in left.items()):
        raise ValueError("a branch begins after a step of it")
    return left


def unusable(folder: str | os.PathLike[str]) -> str:
    """Why no checkpoints can be in a folder, which need not exist; "" if they can. Nothing is made."""
    remote = layout.not_remote(folder)
    if remote:
        return remote
    path = Path(folder)
    above = path
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        return f"{path} cannot be a folder, as {above} is none"
    if above != path and not os.access(above, os.W_OK | os.X_OK):
        return f"{path} does not exist, and cannot be made: nothing can be written into {above}"
    return ""


def is_read_only(folder: Path) -> bool:
    """Whether a folder is there, and what is in it can be loaded, but nothing saved."""
    return folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK)


class Steps:
    """The steps in a folder, as this process sees them.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._crashed: set[int] = set()  # steps that were there before the save, and no checkpoints

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def metadata(self, step: int) -> Path:
        return self.path(step) / METADATA_NAME

    def committed(self) -> list[int]:
        """Ascending."""
        return [step for step in self._folders() if self.metadata(step).is_file()]

    def appears(self, step: int) -> bool:
        """Whether a step that was just committed is seen here, where a file system may take a moment to show it."""
        deadline = time.monotonic() + _MOMENT_SECONDS
        while not os.path.isfile(self.metadata(step)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _folders(self) -> list[int]:
        """The steps that have a folder, committed or not."""
        try:
            names = [name for name in names_in(self.folder) if (self.folder / name).is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)

    def left(self) -> Left:
        """Those of the committed steps that were left."""
        return self._left_of(self.committed())

    def _left_of(self, there: Sequence[int]) -> Left:
        return {step: fork for step, fork in self._current(self._read()).items() if step in there}

    def latest(self) -> int | None:
        """The last that was not left."""
        return max(set(self.committed()) - self._current(self._read()).keys(), default=None)

    # ---- the note ----

    def _read(self) -> _Note:
        path = self.folder / LEFT_NAME
        try:
            data = read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            return _Note()
        try:
            return _Note.parse(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{path}, which says what steps were left, is damaged ({type(error).__name__}: {error}); to take all "
                "steps for one training's, remove it",
                str(self.folder),
            ) from error

    def _current(self, note: _Note) -> Left:
        if note.step is None or metadata_id(self.metadata(note.step)) == note.was:
            return note.left
        return note.then

    def _write(self, note: _Note, sync: bool) -> None:
        _C.commit(str(self.folder), unfinished_name(LEFT_NAME), LEFT_NAME, note.dump(), sync)

    # ---- a save, on rank 0 ----

    def before(self, step: int, base: int | None, sync: bool = True) -> None:
        """Notes what a save will leave once it is committed, and what crashed saves have left by now.

        Args:
            step: that is about to be saved.
            base: see ``leave``.
            sync: the note is to be durable.
        """
        folders = self._folders()  # before those that are committed: nothing that is committed meanwhile is taken
        note, there = self._read(), self.committed()
        self._crashed = set(folders) - set(there)
        left = {other: fork for other, fork in self._current(note).items() if other in there}
        then = leave(left, there, base, step)
        if then == left == note.left and note.step is None:
            return
        self._write(_Note(left, step, metadata_id(self.metadata(step)), then), sync)
        new = sorted(then.keys() - left.keys())
        if new:
            logger.warning(
                "training went back to step %d: steps %s in %s were left; latest() does not give them once step %d is "
                "saved, and they stay until you remove them",
                then[new[0]].step,
                ", ".join(map(str, new)),
                self.folder,
                step,
            )

    def after(self, sync: bool = True) -> None:
        """Makes the note plain, once a save is committed."""
        note = self._read()
        if note.step is None:
            return
        left = self._current(note)
        if left:
            self._write(_Note(left), sync)
        else:
            (self.folder / LEFT_NAME).unlink()

    # ---- retention, on rank 0 ----

    def remove_superfluous(self, saved: int, keep_last: int | None, keep_every: int | None, sync: bool = True) -> None:
        """Removes what a step that was just committed makes superfluous, and what crashed saves had left before it.

        A folder that has come since is whoever's made it: other ranks may have gone on from the save by now.
        """
        there = self.committed()
        left = self._left_of(there)
        later = [step for step in there if step > saved and step not in left]
        if later:
            logger.warning(
                "%s is older than step %d, which latest() still gives; it stays", self.path(saved), later[-1]
            )
        self._remove_doomed(sync)
        for step in superfluous(there, left, saved, keep_last, keep_every):
            self.path(step).rename(self.folder / f".step-{step}.removed")
        self._remove_doomed(sync)
        for name in filter(_UNFINISHED.fullmatch, names_in(self.folder)):
            (self.folder / name).unlink()
        for step in self._crashed & set(self._folders()) - set(self.committed()):
            layout.remove_leftovers(self.path(step))
            with contextlib.suppress(OSError):  # holds files that no save made
                self.path(step).rmdir()

    def there_and_superfluous(
        self, saved: int, keep_last: int | None, keep_every: int | None
    ) -> tuple[list[int], list[int]]:
        """What is committed, and what of it ``remove_superfluous`` removes; none where that cannot be told."""
        try:
            there = self.committed()
            return there, superfluous(there, self._left_of(there), saved, keep_last, keep_every)
        except (OSError, CorruptCheckpointError):  # which is none of the save
            return [], []

    def remove_parts(self, there: Sequence[int], going: Sequence[int], sync: bool = True) -> None:
        """Removes parts of steps, on a disk that another process's metadata is not on.

        Args:
            there: the steps that are committed; of others, unless they are checkpoints here, goes what a save has left.
            going: those of them that are not to be kept.
        """
        parts = [step for step in self._folders() if there and not self.metadata(step).is_file()]
        for step in parts:
            if step in going:
                self.path(step).rename(self.folder / f".step-{step}.removed")
            elif step not in there:
                layout.remove_leftovers(self.path(step))
                with contextlib.suppress(OSError):  # holds files that no save made
                    self.path(step).rmdir()
        self._remove_doomed(sync)

    def _remove_doomed(self, sync: bool) -> None:
        """Removes folders that are no steps any more, once it is durable that they are none.

        Else a crash could bring a step back whose files are gone.
        """
        doomed = [self.folder / name for name in names_in(self.folder) if _DOOMED.fullmatch(name)]
        if doomed and sync:
            _C.sync_directory(str(self.folder))
        for path in doomed:
            if path.is_symlink():  # what it leads to is whoever's made it
                path.unlink()
            else:
                shutil.rmtree(path)
