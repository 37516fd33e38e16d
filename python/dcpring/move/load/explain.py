"""What an error of a load says: the key, the rank, and which tensors have been overwritten already."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from torch.distributed.checkpoint.planner import ReadItem

from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.move.load.task import Task
from dcpring.plan.items import ReadItems

_CORE_ERRORS = (OSError, ValueError, TypeError, OverflowError, MemoryError, CorruptCheckpointError)


class Explainer:
    """Finds the words for what goes wrong with items, which go by their positions.

    Args:
        matched: the items of a compact plan, but for those that are wanted one by one; None without one.

    Attributes:
        path: of the checkpoint.
        filled: what has been overwritten, in order.
    """

    def __init__(self, task: Task, matched: ReadItems | None) -> None:
        self.path = task.origin.path
        self.filled: list[Iterable[int]] = []
        self._wanted, self._rank, self._matched = task.wanted, task.rank, matched

    def item(self, position: int) -> ReadItem:
        if position in self._wanted or self._matched is None:
            return self._wanted[position].item
        return self._matched.make(position)

    def name(self, position: int) -> str:
        return repr(self.item(position).storage_index.fqn) + ("" if self._rank is None else f" (rank {self._rank})")

    @contextlib.contextmanager
    def core(self, positions: Iterable[int], fills: bool = False) -> Iterator[None]:
        """Around a call of the core: its errors get the key and the rank.

        Args:
            positions: of what it is given, by whose order it says what has failed.
            fills: the call overwrites the items, and has done so when it succeeds.
        """
        try:
            yield
        except _CORE_ERRORS as error:
            given = list(positions)
            index = getattr(error, "item", None)
            if fills:
                self.filled.append([given[index] for index in getattr(error, "changed", [])])
            failed = given[index] if index is not None and index < len(given) else None
            raise self._explained(error, failed) from error
        if fills:
            self.filled.append(positions)

    def _explained(self, error: Exception, failed: int | None) -> Exception:
        whose = self.path if self._rank is None else f"rank {self._rank}"
        where = whose if failed is None else self.name(failed)
        if isinstance(error, CorruptCheckpointError):
            return CorruptCheckpointError(f"{where}: {error.args[0]}", error.path, error.offset)
        if isinstance(error, OSError):
            return OSError(error.errno, f"{where}: {error.strerror}", error.filename)
        if isinstance(error, MemoryError):
            return CheckpointError(f"{where}: there is not enough memory for it")
        return CorruptCheckpointError(f"{where}: {error}", self.path)

    @contextlib.contextmanager
    def changes(self) -> Iterator[None]:
        """Around all that overwrites items: its errors say which had been by then."""
        try:
            yield
        except Exception as error:
            if keys := self._filled_keys():
                note = f"; already overwritten in the state dict: {some_keys(keys, 5)}"
                if isinstance(error, OSError) and error.strerror is not None:
                    error.strerror += note
                else:
                    error.args = (f"{error.args[0] if error.args else type(error).__name__}{note}", *error.args[1:])
            raise

    def _filled_keys(self) -> list[str]:
        if self._rank is None:
            return []
        return list(dict.fromkeys(self.item(at).dest_index.fqn for at in itertools.chain.from_iterable(self.filled)))
