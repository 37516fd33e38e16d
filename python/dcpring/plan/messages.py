"""Save plans in compact form: what ranks send to the coordinator, and what it sends back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from dcpring import _C
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
class Reply:
    """What the coordinator sends back.

    Attributes:
        kept: the core's reply, None when it is that of the last save.
        choice: the strategy, and why.
        rank: the rank's part of the report.
    """

    kept: bytes | None
    choice: Choice
    rank: RankReport


@dataclass
class Outcome:
    """What comes of merging the plans of all ranks.

    Attributes:
        choice: the strategy, and why.
        table: the checkpoint's chunks.
        items: by rank, the rows of the table that it writes, in order, as uint32.
        replies: by rank, what is sent back.
        ranks: the report's part of each.
        wish: what was asked for; another wish needs another outcome.
    """

    choice: Choice
    table: _C.Table
    items: list[bytes]
    replies: list[bytes]
    ranks: list[RankReport]
    wish: Any


def fields_of(plan: Any, base: type) -> dict[str, Any]:
    """The fields of a plan that are stock's, whichever this torch has."""
    return {each.name: getattr(plan, each.name) for each in fields(base)}


def rebuilt(cls: type, values: dict[str, Any]) -> Any:
    """A plan that another process has sent."""
    return cls(**values)


@dataclass(frozen=True)
class RingPlan(SavePlan):
    """A SavePlan whose items stay in C: its message is sent instead of them.

    Attributes:
        message: None once the plan is finished.
        values: those of this rank's state dict, by key, until the plan is sent.
    """

    message: LocalMessage | Reply | None = None
    values: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        is_whole = self.message is None or self._is_changed
        items: Any = list(self.items) if is_whole else SentItems()
        return rebuilt, (RingPlan, {**fields_of(self, SavePlan), "items": items, "message": self.message})

    @property
    def _is_changed(self) -> bool:
        """Whether somebody, such as a storage writer, has put other items into a plan that goes by its message."""
        return not isinstance(self.items, Items | SentItems)

    def received(self, kind: type[Any], whose: str) -> Any:
        """The message of a plan that has come through DCP and through the storage writer.

        Args:
            kind: what the message has to be.
            whose: of whom the plan is, for errors.

        Raises:
            CheckpointError: the plan is another one.
        """
        if not isinstance(self.message, kind):
            raise CheckpointError(f"{whose}: this plan was not made by RingSavePlanner")
        if self._is_changed:
            raise CheckpointError(
                f"{whose}: the storage writer has changed the items of the plan, which RingSavePlanner does not look "
                "at. Pass planner=DefaultSavePlanner(), or change items in a subclass of RingSavePlanner that "
                "overrides create_local_plan, create_global_plan or finish_plan"
            )
        return self.message
