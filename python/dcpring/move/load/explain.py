"""The errors of a load: each names the key, the rank, and the tensors that have been overwritten already."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.move.load.task import Task

_CORE_ERRORS = (OSError, ValueError, TypeError, OverflowError, MemoryError, CorruptCheckpointError)


class Explainer:
    """Explains what fails, by positions in the plan.

    Attributes:
        path: of the checkpoint.
        filled: the positions that have been overwritten, in order.
    """

    def __init__(self, task: Task) -> None:
        self.path, self.item = task.origin.path, task.item
        self.filled: list[Iterable[int]] = []
        self._rank = task.rank

    def name(self, position: int) -> str:
        return repr(self.item(position).storage_index.fqn) + ("" if self._rank is None else f" (rank {self._rank})")

    @contextlib.contextmanager
    def core(self, positions: Iterable[int], fills: bool = False) -> Iterator[None]:
        """Adds the key and the rank to what a call of the core raises.

        Args:
            positions: what the call is about, in the order in which the core has it.
            fills: whether the call overwrites tensors; it has overwritten all of them when it succeeds.
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
        """Encloses all that overwrites tensors: its errors say which ones had been overwritten by then."""
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
