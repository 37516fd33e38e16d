"""Private names of process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import constants

from dcpring.torchside.frames import callers, local
from dcpring.torchside.versions import function, optional

_C10D = "torch.distributed.distributed_c10d"

default_store: Callable[[], dist.Store] = function(_C10D, "_get_default_store")
"""The key-value store of the default process group."""

_new_process_group: Callable[..., Any] = function(_C10D, "_new_process_group_helper")
_world: Any = optional(_C10D, "_world")
set_timeout: Callable[[timedelta, dist.ProcessGroup], None]
set_timeout = getattr(dist, "set_timeout", function(_C10D, "_set_pg_timeout"))
"""torch 2.15 has made it public, and warns of the private name."""

_CONNECT_TIME = timedelta(seconds=300)
"""How long the members of a new group look for each other, once all of them have begun to."""


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must lie for a group, None for all ranks, to send them.

    That is the CPU where it can, else the device that the group is bound to, else the current one of its kind.
    """
    group = group or dist.group.WORLD
    kinds = [device.type for device in group._device_types]  # type: ignore[union-attr]
    if "cpu" in kinds:
        return torch.device("cpu")
    bound: torch.device | None = group.bound_device_id  # type: ignore[union-attr]
    return bound if bound is not None and bound.type in kinds else torch.device(kinds[0])


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """How long the ranks of a group, None for all, wait for each other, as the job has set it.

    It is gloo's default where that is not known, and where NCCL has its own, which is short: nobody writes files then.
    """
    group = group or dist.group.WORLD
    timeout = None
    with contextlib.suppress(AttributeError, RuntimeError):  # a backend without options
        backend = group._get_backend(device_of(group))  # type: ignore[union-attr]
        timeout = getattr(backend, "wrapped_pg", backend).options._timeout
    return dist.default_pg_timeout if timeout in (None, constants.default_pg_nccl_timeout) else timeout


def new_group(members: Sequence[int], name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of these ranks, in this order. All members call this, and nobody else.

    ``dist.new_group`` names a group by how many there are in this process: ranks that are members of different numbers
    of groups wait for each other by different names, for ever.

    Args:
        members: global ranks.
        name: the same on all, and of no other group.
        timeout: how long they wait for each other.
    """
    group: dist.ProcessGroup
    group, _ = _new_process_group(
        *(len(members), list(members).index(dist.get_rank()), list(members), "gloo", default_store(), name),
        timeout=min(_CONNECT_TIME, timeout),
        group_desc="dcpring",
    )
    _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    set_timeout(timeout, group)
    return group


def destroy_group(group: dist.ProcessGroup) -> None:
    """Gives back a group that ``new_group`` made, unless all groups have been destroyed since."""
    with contextlib.suppress(ValueError, RuntimeError):
        dist.destroy_process_group(group)


def address_key(name: str, place: int) -> str:
    """Where gloo leaves the address of a member in the store, by the name of the group and its rank there."""
    return f"{name}//cpu//0/{place}"


def group_of_caller() -> dist.ProcessGroup | None:
    """The group of the ``dcp.save`` or ``dcp.load`` that is calling; all ranks, if none is; None of one that is alone.

    DCP does not tell its storage which group it was given. Its wrapper of that group is a local variable of the
    function that calls the storage.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    wrapper = _wrapper_of_caller()
    return dist.group.WORLD if wrapper is None else _group_of(wrapper)


def group_inside_dcp() -> dist.ProcessGroup | None:
    """The same; None if none is calling."""
    wrapper = _wrapper_of_caller() if dist.is_available() and dist.is_initialized() else None
    return None if wrapper is None else _group_of(wrapper)


def _group_of(wrapper: Any) -> dist.ProcessGroup | None:
    return (getattr(wrapper, "group", None) or dist.group.WORLD) if wrapper.use_dist else None


def _wrapper_of_caller() -> Any:
    for module, _, frame in callers():
        if module.startswith("torch.distributed.checkpoint."):
            wrapper = local(frame, "distW")
            if wrapper is not None:
                return wrapper
    return None


def members_of_caller() -> list[int]:
    """The global ranks of ``group_of_caller``."""
    group = group_of_caller()
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
