"""What an error of a load says: the key, the rank, and which tensors have been overwritten already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch.distributed.checkpoint.planner import ReadItem

from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError, CorruptCheckpointError

_CORE_ERRORS = (OSError, ValueError, TypeError, OverflowError, MemoryError, CorruptCheckpointError)


class Explainer:
    """Finds the words for what goes wrong with items, which go by their positions.

    Args:
        rank: of this process; None where no state dict is loaded, and so none is changed.

    Attributes:
        path: of the checkpoint.
        item: DCP's, by its position.
    """

    def __init__(self, path: str, rank: int | None, item: Callable[[int], ReadItem]) -> None:
        self.path, self.item = path, item
        self._rank = rank

    def name(self, position: int) -> str:
        return repr(self.item(position).storage_index.fqn) + ("" if self._rank is None else f" (rank {self._rank})")

    @contextlib.contextmanager
    def core(
        self, positions: Iterable[int], changed: Iterable[int] | None = None, before: Iterable[int] = ()
    ) -> Iterator[None]:
        """Around a call of the core.

        Args:
            positions: of what it is given, by whose order it says what has failed.
            changed: what has been overwritten; None: the core says it of this call.
            before: in that case, what had been overwritten before.
        """
        try:
            yield
        except _CORE_ERRORS as error:
            given = list(positions)
            index = getattr(error, "item", None)
            failed = given[index] if index is not None and index < len(given) else None
            own = [given[index] for index in getattr(error, "changed", [])]
            known = [*before, *own] if changed is None else changed
            raise self.error(error, failed, known) from error

    def error(self, error: Exception, failed: int | None, changed: Iterable[int]) -> Exception:
        """The same error, with the key, the rank, and which tensors had changed already."""
        whose = self.path if self._rank is None else f"rank {self._rank}"
        where = whose if failed is None else self.name(failed)
        keys = [] if self._rank is None else [self.item(position).dest_index.fqn for position in changed]
        note = f"; already overwritten in the state dict: {some_keys(keys, 5)}" if keys else ""
        if isinstance(error, CorruptCheckpointError):
            return CorruptCheckpointError(f"{where}: {error.args[0]}{note}", error.path, error.offset)
        if isinstance(error, OSError):
            return OSError(error.errno, f"{where}: {error.strerror}{note}", error.filename)
        if isinstance(error, MemoryError):
            return CheckpointError(f"{where}: there is not enough memory for it{note}")
        return CorruptCheckpointError(f"{where}: {error}{note}", self.path)
