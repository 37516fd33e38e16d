"""The checkpoint before: which it is, what this rank has noted in it, and its files as files of the new one.

Each rank looks for itself, and decides for itself: what it does not find, or cannot link, it writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.planner import SavePlanner

from dcpring import _C
from dcpring.base.files import read_regular
from dcpring.errors import CorruptCheckpointError
from dcpring.format.ledger import Ledger, decode_ledger
from dcpring.format.metadata import split_metadata
from dcpring.move.pending import Pending
from dcpring.move.save.saving import Saving
from dcpring.move.unchanged import Keeping, Linkable
from dcpring.store import layout
from dcpring.torchside.tensors import is_frozen
from dcpring.torchside.versions import say_once

logger = logging.getLogger("dcpring")


class Earlier(NamedTuple):
    """A checkpoint that is committed.

    Attributes:
        directory: of it.
        ledger: of this rank.
    """

    directory: Path
    ledger: Ledger


def find_earlier(directory: Path, given: Path | None, metadata_name: str, number: int) -> Earlier | None:
    """The checkpoint whose files may be linked.

    Args:
        directory: of the new checkpoint.
        given: the earlier one; None: the newest in ``directory`` and beside it.
        metadata_name: of the file in it.
        number: of this rank's ledger there.
    """
    found = layout.newest_beside(directory, metadata_name) if given is None else given
    if found is None:
        return None
    try:
        parts = split_metadata(read_regular(found / metadata_name), found / metadata_name)
        if number >= len(parts.ledgers) or not parts.ledgers[number]:
            return None
        return Earlier(found, decode_ledger(parts.ledgers[number]))
    except FileNotFoundError:
        return None
    except (OSError, CorruptCheckpointError, ValueError) as error:
        logger.warning("all tensors are written, as %s cannot be compared with: %s", found, error)
        return None


def frozen_of(planner: SavePlanner, known: Set[str]) -> Callable[[str], bool]:
    """Says of tensors, by their names, whether they are not trained: parameters that require no gradient."""
    values = getattr(planner, "state_dict", None) or {}

    def stays(name: str) -> bool:
        return name in known or is_frozen(values.get(name))

    return stays


class Keeper:
    """Deals, for one rank's save, with tensors that have not changed: links their files, and tells the save after it.

    Args:
        saving: the save.
        earlier: the checkpoint before.
        directory: of the new one.
        is_frozen: see ``frozen_of``.
        trusts: what is frozen need not be compared as a whole.
        workers: threads that compare.
        sync: what is linked is to be durable.

    Attributes:
        key: for digests of what is written and expected to stay.
    """

    def __init__(
        self,
        saving: Saving,
        earlier: Earlier | None,
        directory: Path,
        *,
        is_frozen: Callable[[str], bool],
        trusts: bool,
        workers: int,
        sync: bool,
    ) -> None:
        self._saving = saving
        self._earlier = earlier
        self._directory = directory
        self._sync = sync
        ledger = None if earlier is None else earlier.ledger
        self._keeping = Keeping(saving, ledger, is_frozen, trusts, workers)
        self._linked: set[int] = set()
        self._keeping.compare()
        self.key = self._keeping.key

    def link_files(self, pending: Pending, next_name: Callable[[], str]) -> None:
        """Links the files that need not be written. Their names are added as they come to be.

        A name that could not be linked is not used again: an object storage may still be removing what was tried.
        """
        for file in self._keeping.linkable():
            pending.names.append(name := next_name())
            if self._link(file, name, pending):
                self._saving.take_over(name, self._keeping.places(file), self._keeping.digests(file))
                self._linked |= file.rows.keys()
            else:
                pending.names.pop()

    def _link(self, file: Linkable, name: str, pending: Pending) -> bool:
        earlier = self._earlier
        if earlier is None or not layout.is_data_file(file.name):
            return False
        ends = str(earlier.directory), file.name, str(self._directory), name
        try:
            is_clone = _C.link_file(*ends, file.size, earlier.ledger.is_durable, pending.syncs)
        except FileNotFoundError:  # somebody has removed the earlier checkpoint
            return False
        except (OSError, ValueError) as error:
            self._say(logging.WARNING, f"can neither be linked nor cloned, and are written again: {_reason(error)}")
            return False
        if is_clone or not earlier.ledger.is_durable:
            pending.synced.append(name)
        if is_clone:
            self._say(logging.INFO, "are clones (reflinks), as they cannot be linked")
        return True

    def _say(self, level: int, what: str) -> None:
        say_once(level, f"files of unchanged tensors in {self._directory.absolute().parent} {what}")

    def to_write(self, least_bytes: int) -> tuple[list[int], list[int]]:
        """The tensors that may change, and those that are expected to stay, if they have so many bytes."""
        left = [position for position in self._saving.items.tensors if position not in self._linked]
        return self._keeping.split(left, least_bytes)

    def ledger(self) -> bytes:
        """For the save after this one, once everything is written."""
        return self._keeping.ledger(self._sync)


def _reason(error: OSError | ValueError) -> str:
    """Why, without a path, so that it is the same for all files."""
    if isinstance(error, OSError):
        return os.strerror(error.errno or 0)
    return "they are shorter than they were"
