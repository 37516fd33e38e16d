"""What RingSavePlanner keeps from save to save, with ``enable_plan_caching``.

Caches are of the module, found by a UUID that is pickled with the planner: DCP's background process gets a copy of the
planner for each save.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dcpring.errors import CheckpointError
from dcpring.plan.messages import LocalMessage, Outcome


@dataclass
class PlanCache:
    """What is kept between saves, for one planner: its own plan on every rank, and all plans on the coordinator."""

    digest: str = ""
    kept: bytes = b""
    layouts: list[bytes] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    skipped: bool = False

    # -- every rank --

    def may_skip(self, digest: str) -> bool:
        """Whether a layout need not be sent again. Not after a save that skipped it and did not get a reply."""
        if self.skipped:
            self.digest = ""
        self.skipped = digest == self.digest
        self.digest = digest if self.skipped else ""  # what the coordinator keeps may change: finish() says so
        return self.skipped

    def finish(self, digest: str, kept: bytes | None) -> bytes:
        self.kept = self.kept if kept is None else kept
        self.digest = digest
        self.skipped = False
        return self.kept

    # -- the coordinator --

    def restore(self, messages: list[LocalMessage]) -> list[bytes]:
        """All layouts, those that were not sent from the save before."""
        return [
            self._known_layout(place, message) if message.layout is None else message.layout
            for place, message in enumerate(messages)
        ]

    def _known_layout(self, place: int, message: LocalMessage) -> bytes:
        if place < len(self.digests) and self.digests[place] == message.digest:
            return self.layouts[place]
        self.outcome = None
        return _miss(message)

    def known_outcome(self, messages: list[LocalMessage], wish: Any) -> Outcome | None:
        same = self.outcome is not None and self.outcome.wish == wish
        return self.outcome if same and self.digests == [message.digest for message in messages] else None

    def keep(self, layouts: list[bytes], messages: list[LocalMessage], outcome: Outcome) -> list[bytes | None]:
        """Keeps what this save came to. Gives the replies, None for those that a rank has of the save before."""
        before = self.outcome
        self.layouts, self.digests, self.outcome = layouts, [message.digest for message in messages], outcome
        return [
            None if message.layout is None and before is not None and before.replies[place] == reply else reply
            for place, (message, reply) in enumerate(zip(messages, outcome.replies, strict=True))
        ]


def _miss(message: LocalMessage) -> NoReturn:
    raise CheckpointError(
        f"rank {message.rank} did not send its plan, as it has not changed, but the coordinator no longer has it "
        "(was it restarted?); save again: the next plan is sent in full"
    )


_MOST_CACHES = 8
_caches_lock = threading.Lock()
_caches: OrderedDict[str, PlanCache] = OrderedDict()
"""By planner; the oldest go. Of the module, as a planner that is pickled for every save would lose its own."""


def cache_of(key: str) -> PlanCache:
    with _caches_lock:
        cache = _caches.setdefault(key, PlanCache())
        _caches.move_to_end(key)
        while len(_caches) > _MOST_CACHES:
            _caches.popitem(last=False)
    return cache
