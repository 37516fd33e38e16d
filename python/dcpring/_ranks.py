"""The ranks of a job: how they exchange small things, and fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcpring._stored import spans
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError

T = TypeVar("T")


class Failure(NamedTuple):
    """What a rank tells the others of an exception."""

    kind: type[CheckpointError]
    text: str


def failure_of(error: BaseException) -> Failure:
    known = next((k for k in (CorruptCheckpointError, UntrustedCheckpointError) if isinstance(error, k)), None)
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return Failure(known or CheckpointError, text)


def described(failures: dict[int, Failure]) -> str:
    """Who failed, and how. Ranks that failed alike are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure.text, []).append(rank)
    return "; ".join(f"{spans(failed)}: {text}" for text, failed in by_text.items())


def together(what: str, failures: dict[int, Failure]) -> CheckpointError:
    """One error for all ranks."""
    kinds = {failure.kind for failure in failures.values()}
    return (kinds.pop() if len(kinds) == 1 else CheckpointError)(f"{what}: {described(failures)}")


class Ranks:
    """The members of a gloo group of its own, or this process alone.

    Args:
        parent: the process group whose members these are; None: all, or this process where there is no group.
    """

    def __init__(self, parent: dist.ProcessGroup | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        self._is_part = parent is not None
        if dist.is_available() and dist.is_initialized():
            members = dist.get_process_group_ranks(parent or dist.group.WORLD)
            if dist.get_rank() not in members:
                raise ValueError(f"rank {dist.get_rank()} is no member of the process group given, {spans(members)}")
            self.group = dist.new_group(members, backend="gloo", use_local_synchronization=self._is_part)
            self.rank, self.world_size = dist.get_rank(self.group), len(members)

    def close(self) -> None:
        # A group that only its members made is named after them; another of that name would meet what it left behind.
        if self.group is not None and dist.is_initialized() and not self._is_part:
            dist.destroy_process_group(self.group)
        self.group = None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def attempt(self, what: str, work: Callable[[], T]) -> T:
        """Runs ``work``; where it raises on some ranks, all raise an error that says ``what`` and names them."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        outcomes = self.gather(failure_of(error) if error is not None else None)
        failures = {rank: failure for rank, failure in enumerate(outcomes) if failure is not None}
        if failures:
            raise together(what, failures) from error
        return result  # type: ignore[return-value]

    def with_dcp(self, what: str, work: Callable[[], T]) -> T:
        """Runs one of DCP's collectives, whose own exception already tells of all ranks."""
        try:
            return work()
        except CheckpointException as error:
            own = error.failures.get(self.rank)
            if own is not None and isinstance(own[0], KeyboardInterrupt):
                raise own[0] from None
            failures = {rank: failure_of(cause) for rank, (cause, _) in error.failures.items()}
            raise together(what, failures) from error
