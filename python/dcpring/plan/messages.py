"""Save plans in compact form: what ranks send to the coordinator, and what it sends back."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from dcpring.errors import CheckpointError
from dcpring.plan.items import Items, SentItems
from dcpring.plan.strategy import Choice
from dcpring.report import RankReport


@dataclass(frozen=True)
class LocalMessage:
    """What a rank sends to the coordinator.

    Attributes:
        rank: of the default process group.
        host: the same string on all ranks of a machine.
        layout: the encoded table, None when it is that of the last save.
        digest: tells layouts, with their ties, from each other.
        fingerprints: a uint32 for each row that is hashed.
        flattened: whether the rows have paths.
        ties: pairs of rows that are the same memory, the later first.
        meshes: ranks, as above, that hashed rows are spread over with this one, where they are not all.
    """

    rank: int
    host: str
    layout: bytes | None
    digest: str
    fingerprints: bytes
    flattened: bool
    ties: tuple[tuple[int, int], ...] = ()
    meshes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Unsealed:
    """Sent in the place of a LocalMessage that could not be made.

    DCP pickles a plan outside of where it catches errors: one that is raised there leaves the other ranks waiting.
    """

    why: str


@dataclass(frozen=True)
class Reply:
    """What the coordinator sends back.

    Attributes:
        to: the rank that it is for, as in the LocalMessage.
        kept: the core's reply, None when it is that of the last save.
        choice: the strategy, and why.
        rank: the rank's part of the report.
    """

    to: int
    kept: bytes | None
    choice: Choice
    rank: RankReport


Cut = tuple[MetadataIndex, int, int]
"""The chunk that a part was cut from, the part's first row in it, and its rows."""


Cuts = Mapping[tuple[str, torch.Size | None], Cut]
"""Parts of tensors, by key and offset."""


@dataclass(frozen=True)
class ByItems:
    """What the coordinator sends back with the items themselves, where someone has changed them.

    Attributes:
        choice: why the plan goes by items.
        rank: the rank's part of the report.
        cuts: those of the items that were cut from the chunks that ranks hold.
    """

    choice: Choice
    rank: RankReport
    cuts: Cuts


Message = LocalMessage | Unsealed | Reply | ByItems


class Gathering:
    """The plans that come in at a planner that coordinates.

    Plans are unpickled by DCP, which says nothing of the planner that they are for, in the thread that has planned.

    Args:
        layout_of: gives the encoded table of a message, also of one that comes without.
    """

    def __init__(self, layout_of: Callable[[LocalMessage | Unsealed], bytes]) -> None:
        self.layout_of = layout_of
        self.messages: list[LocalMessage | Unsealed] = []
        _of_thread.gathering = weakref.ref(self)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.gathering: Callable[[], Gathering | None] = lambda: None


_of_thread = _OfThread()


def fields_of(plan: Any, base: type) -> dict[str, Any]:
    """The fields of a plan that are stock's, whichever this torch has."""
    return {each.name: getattr(plan, each.name) for each in fields(base)}


def rebuilt(cls: type, values: dict[str, Any]) -> Any:
    """A plan that another process has sent."""
    return cls(**values)


def _received(values: dict[str, Any]) -> RingPlan:
    """A save plan that another process has sent; the items of one that is to be coordinated can be looked at."""
    message, gathering = values["message"], _of_thread.gathering()
    if isinstance(message, LocalMessage | Unsealed) and gathering is not None:
        gathering.messages.append(message)
        items = Items(functools.partial(gathering.layout_of, message))
        values = {**values, "items": items, "described": items}
    return RingPlan(**values)


@dataclass(frozen=True)
class RingPlan(SavePlan):
    """A SavePlan whose items stay in C: a message is sent instead of them.

    Attributes:
        message: what was sent, or will be if nobody changes the items.
        seal: makes the message from the items as they are when they are sent; None for a plan that was.
        values: those of this rank's state dict, by key, while the plan has not been sent.
        described: the items that the message stands for.
    """

    message: Message | None = None
    seal: Callable[[RingPlan], Message] | None = field(default=None, repr=False, compare=False)
    values: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    described: Items | None = field(default=None, repr=False, compare=False)

    @property
    def is_changed(self) -> bool:
        """Whether the items are others than those that create_local_plan, or create_global_plan, has made."""
        return self.described is not None and not self.described.describe(self.items)

    def sealed(self) -> Message:
        """The message, from the items as they are now."""
        if isinstance(self.message, Unsealed):
            raise CheckpointError(self.message.why)
        if self.seal is not None:
            return self.seal(self)
        if self.message is None:
            raise CheckpointError("this plan was not made by RingSavePlanner.create_local_plan")
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        items: Any = SentItems()
        try:
            message = self._sent_back() if self.seal is None else self.sealed()
            if message is None or isinstance(message, ByItems):
                items = list(self.items)
        except Exception as error:
            message = Unsealed(f"its plan cannot be described: {type(error).__name__}: {error}")
        return _received, ({**fields_of(self, SavePlan), "items": items, "message": message},)

    def _sent_back(self) -> Message | None:
        """The message of a plan that has come from a rank already: none where a subclass has planned by itself."""
        return None if isinstance(self.message, LocalMessage) and self.described is not None else self.message
