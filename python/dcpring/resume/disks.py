"""Whether the hosts of a Checkpointer see one folder, and what is done where each host has a disk of its own.

A save to such disks leaves on each host what its own ranks have written, and the metadata on that of rank 0. It loads
nowhere, which nobody would see before a resume: so it is said after the first commit. What goes on rank 0's disk goes
on the others' as well, or these would fill.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dcpring.base.ranks import Operation
from dcpring.base.text import spans
from dcpring.resume.retention import Steps

logger = logging.getLogger("dcpring")

CURE = "bring all of its files together in one directory that all hosts see"


class Disks:
    """What the hosts have in the folder of a Checkpointer.

    Args:
        steps: as this rank sees them.
        rank: this one.
        hosts: of all ranks.
    """

    def __init__(self, steps: Steps, rank: int, hosts: Sequence[str]) -> None:
        self._steps, self._rank = steps, rank
        self._names = [host.partition("/")[0] for host in hosts]
        self._is_first_of_host = hosts.index(hosts[rank]) == rank
        self._apart: set[int] | None = None if len(set(hosts)) > 1 else set()  # ranks that do not see rank 0's disk
        self._there: list[int] = []
        self._superfluous: list[int] = []

    def after_commit(self, joint: Operation, step: int, keep_last: int | None, keep_every: int | None) -> None:
        """Looks, after the first commit, whether all hosts see it; and tells those that do not what goes."""
        if self._apart is None:
            seen = joint.gather("is it seen?", self._steps.appears(step))
            self._apart = {rank for rank, is_seen in enumerate(seen) if not is_seen}
            if self._apart and self._rank == 0:
                logger.warning("%s", self._warning(step))
        if self._apart:
            own = ([], []) if self._rank else self._steps.there_and_superfluous(step, keep_last, keep_every)
            self._there, self._superfluous = joint.gather("steps", own)[0]

    def _warning(self, step: int) -> str:
        assert self._apart is not None
        return (
            f"the hosts see different directories at {self._steps.folder}: {self._steps.metadata(step)} was written on "
            f"host {self._names[0]}, and is not there on {places(self._apart, self._names)}. What a rank saves stays "
            f"on its host, and no checkpoint can be loaded as it is: save to storage that all hosts share, or {CURE}"
        )

    def remove_old(self, sync: bool) -> None:
        """Removes from this host's own disk what rank 0 removes from its own."""
        if self._apart and self._rank in self._apart and self._is_first_of_host:
            self._steps.remove_parts(self._there, self._superfluous, sync)


def places(ranks: set[int], names: Sequence[str]) -> str:
    """Hosts, with those of some ranks that are on them."""
    found: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(names[rank], []).append(rank)
    return ", ".join(f"host {host} ({spans(own)})" for host, own in found.items())
