"""Whose ranks a text names, and on which hosts they are, where there are several.

Each process tells the store once where it is. Who has something to say about ranks looks there, which costs nothing as
long as nothing has failed.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from dcpring.base import groups
from dcpring.base.text import ranges, some, spans
from dcpring.errors import CheckpointError
from dcpring.torchside.groups import members_of_caller

_KEY = "dcpring/host"
_SEVERAL = f"{_KEY}/several"

_NAMED = re.compile(r"(?<!global )\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)( on host)?")
_MOST_LOOKED_UP, _MOST_HOSTS = 64, 4

_told: weakref.ref[Any] | None = None
"""The process group to whose store this process has told its host, as long as that is there."""


def tell_host() -> None:
    """Tells all ranks on which host this one is, once for each default process group."""
    global _told
    if groups.world_size() == 1 or (_told is not None and _told() is dist.group.WORLD):
        return
    own = groups.host_id()
    groups.leave_note(f"{_KEY}/{dist.get_rank()}", own)
    if groups.leave_note(f"{_KEY}/first", own) != own:
        groups.leave_note(_SEVERAL, "yes")
    _told = weakref.ref(dist.group.WORLD)


def are_on_several_hosts() -> bool:
    """Whether ranks have told of several hosts."""
    return groups.find_note(_SEVERAL) != ""


def host_names(members: Sequence[int]) -> dict[int, str]:
    """The hosts of some global ranks, as far as they have told; none where all are on one."""
    if not are_on_several_hosts():
        return {}
    found = {rank: groups.find_note(f"{_KEY}/{rank}") for rank in members[:_MOST_LOOKED_UP]}
    return {rank: host.partition("/")[0] for rank, host in found.items() if host}


def about_ranks(text: str, members: Sequence[int]) -> str:
    """What a text that names ranks of a group ends with: their hosts, and whether they are other ranks of the job's."""
    named: dict[bool, set[int]] = {True: set(), False: set()}
    for found, has_host in _NAMED.findall(text):
        named[bool(has_host)].update(rank for rank in _numbers(found) if rank < len(members))
    unplaced = sorted(named[False] - named[True])
    if not unplaced:
        return ""
    of_host: dict[str, list[int]] = {}
    for member, host in host_names([members[rank] for rank in unplaced]).items():
        of_host.setdefault(host, []).append(members.index(member))
    where = [f"{spans(ranks)} on host {host}" for host, ranks in of_host.items()]
    about = f" ({some(where, _MOST_HOSTS)})" if where else ""
    if list(members) != list(range(len(members))):
        order = f"ranks are those of the process group, which has the global ranks {ranges(members)} in this order"
        about += f" ({order})" if order not in text else ""
    return about


def _numbers(text: str) -> Iterator[int]:
    """Of "0-3, 7" each."""
    for run in text.split(", "):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


@contextlib.contextmanager
def saying_whose(members: Callable[[], Sequence[int]] = members_of_caller) -> Iterator[None]:
    """Errors that name ranks of a group, by default that of the ``dcp.save`` or ``dcp.load`` that calls, say whose.

    All else that is raised notes on which host it was.
    """
    try:
        yield
    except CheckpointError as error:
        text, *others = error.args or ("",)
        about = about_ranks(str(text), members())
        if about:
            error.args = (f"{text}{about}", *others)
        else:
            _note_host(error)
        raise
    except Exception as error:
        _note_host(error)
        raise


def here() -> str:
    """ "on host node1", of this rank; "" where there are no others."""
    return "".join(f"on host {host}" for host in host_names([groups.rank_in()]).values())


def _note_host(error: Exception) -> None:
    where = here() if groups.world_size() > 1 else ""
    if where and where not in getattr(error, "__notes__", ()):
        error.add_note(where)
