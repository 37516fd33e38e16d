"""The checkpoint before: which it is, what this rank has noted in it, and its files as files of the new one.

Each rank looks for itself, and decides for itself: what it does not find, or cannot link, it writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from dcpring import _C
from dcpring.base.files import read_regular
from dcpring.errors import CorruptCheckpointError
from dcpring.format.ledger import Ledger, decode_ledger
from dcpring.format.metadata import split_metadata
from dcpring.move.pending import Pending
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


def frozen_of(values: Mapping[str, Any], known: Set[str]) -> Callable[[str], bool]:
    """Says of tensors, by their names, whether they are not trained: parameters that require no gradient."""

    def stays(name: str) -> bool:
        return name in known or is_frozen(values.get(name))

    return stays


def link_files(
    keeping: Keeping, earlier: Earlier, directory: Path, pending: Pending, new_name: Callable[[], str]
) -> None:
    """Links the files that need not be written into a directory, under new names, which are among the pending ones.

    A name that could not be linked is not used again: an object storage may still be removing what was tried.
    """
    for file in keeping.linkable():
        name = new_name()
        if _link(earlier, file, directory, name, pending):
            keeping.take_over(file, name)
        else:
            pending.names.pop()


def _link(earlier: Earlier, file: Linkable, directory: Path, name: str, pending: Pending) -> bool:
    if not layout.is_data_file(file.name):
        return False
    what = f"files of unchanged tensors in {directory.absolute().parent}"
    ends = str(earlier.directory), file.name, str(directory), name
    try:
        is_clone = _C.link_file(*ends, file.size, earlier.ledger.is_durable, pending.syncs)
    except FileNotFoundError:  # somebody has removed the earlier checkpoint
        return False
    except (OSError, ValueError) as error:
        why = _reason(error)
        say_once(logging.WARNING, f"{what} can neither be linked nor cloned, and are written again: {why}")
        return False
    if is_clone or not earlier.ledger.is_durable:
        pending.synced.append(name)
    if is_clone:
        say_once(logging.INFO, f"{what} are clones (reflinks), as they cannot be linked")
    return True


def _reason(error: OSError | ValueError) -> str:
    """Why, without a path, so that it is the same for all files."""
    if isinstance(error, OSError):
        return os.strerror(error.errno or 0)
    return "they are shorter than they were"
