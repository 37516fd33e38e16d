"""The ``writers`` argument: what it may be, and what "auto" makes of the storage."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcpring import _C

Writers = Literal["auto", "balanced", "split", "first_replica", "per_node"] | int

BALANCED, SPLIT, FIRST_REPLICA, LIMITED, PER_NODE = range(5)
"""As the core numbers them."""

_NAMES = {"balanced": BALANCED, "split": SPLIT, "first_replica": FIRST_REPLICA, "per_node": PER_NODE}

_SHARED_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "Ceph",
    0x01021997: "9P",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0xAAD7AAEA: "PanFS",
    0x6E736673: "NFS server",
    0x786F4256: "a shared folder of a virtual machine",
}
"""Magic numbers (statfs) of file systems on which many small writers are worse than a few."""

_EVEN = 1.05
"""With a largest file above this, over what is ideal, cutting tensors is worth the additional chunks."""


def check_writers(writers: Writers) -> None:
    if isinstance(writers, bool) or not (
        writers in ("auto", *_NAMES) or (isinstance(writers, int) and not isinstance(writers, bool) and writers >= 1)
    ):
        raise ValueError(
            f'writers={writers!r}: must be "auto", "balanced", "split", "first_replica", "per_node", or an int from 1'
        )


@dataclass(frozen=True)
class Choice:
    """A strategy, and why it was chosen; "items" where none could be."""

    writers: Writers | Literal["items"]
    reason: str


def choose(writers: Writers, checkpoint: object) -> Choice:
    """Resolves "auto" by the storage; what is left to the plan's balance comes back as "auto"."""
    if writers != "auto":
        return Choice(writers, "")
    if checkpoint is None:
        return Choice("auto", "the storage does not say where it lies")
    try:
        remote = remote_storage(checkpoint)
    except (OSError, ValueError) as error:
        return Choice("auto", f"its file system cannot be told: {error}")
    return Choice("first_replica", remote) if remote else Choice("auto", f"{checkpoint} is on a local disk")


def remote_storage(checkpoint: object) -> str:
    """Why a checkpoint's storage is behind a network, "" where it is a local disk. OSError where it cannot be told."""
    text = str(checkpoint)
    if "://" in text:
        return f"{text.split('://', 1)[0]} is remote storage"
    kind = _SHARED_FILE_SYSTEMS.get(_C.file_system(str(Path(text))))
    return f"{text} is on {kind}" if kind else ""


_UNEVEN = ", and whole tensors cannot be shared out evenly"


def as_before(before: Choice, choice: Choice) -> Choice:
    """What ``assign`` has made of the same choice for the same plans, with the reason that there is now."""
    return Choice(before.writers, f"{choice.reason}{_UNEVEN if before.reason.endswith(_UNEVEN) else ''}")


def assign(merge: _C.Merge, choice: Choice, hosts: Sequence[str], split_bytes: int) -> Choice:
    """Gives every item its writer; says which strategy it was."""
    number_of = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    numbers = array.array("I", [number_of[host] for host in hosts]).tobytes()
    if choice.writers == "auto":
        merge.assign(BALANCED, 0, numbers, split_bytes)
        sums = merge.sums()
        loads = [load for _, load, _, _ in sums]
        shared_bytes = sum(removed_bytes for _, _, _, removed_bytes in sums)
        if max(loads) <= _EVEN * sum(loads) / len(loads) or not shared_bytes:
            return Choice("balanced", choice.reason)
        merge.assign(SPLIT, 0, numbers, split_bytes)
        cut = [load for _, load, _, _ in merge.sums()]
        if max(cut) < max(loads):
            return Choice("split", f"{choice.reason}{_UNEVEN}")
        merge.assign(BALANCED, 0, numbers, split_bytes)
        return Choice("balanced", choice.reason)
    if isinstance(choice.writers, int):
        merge.assign(LIMITED, choice.writers, numbers, split_bytes)
    else:
        merge.assign(_NAMES[choice.writers], 0, numbers, split_bytes)
    return choice
