"""What dcpring raises besides OSError (errno, path) and ValueError (arguments)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CheckpointError", "CorruptCheckpointError", "KeyMismatchError", "PlanError", "UntrustedCheckpointError"]


class CheckpointError(Exception):
    """A checkpoint cannot be saved or loaded as asked; the message says which key, file and rank, and the cure."""

    _is_damage = False  # see base.joint


class CorruptCheckpointError(CheckpointError, RuntimeError):
    """The bytes on disk are not those that were written, or contradict themselves.

    A ``RuntimeError`` too, as that is what torch raises for archives that are damaged.

    Attributes:
        path: the file concerned, "" where there is none.
        offset: bytes from the start of that file, -1 where that means nothing.
    """

    _is_damage = True

    def __init__(self, message: str, path: str = "", offset: int = -1) -> None:
        super().__init__(message, path, offset)
        self.path = path
        self.offset = offset

    def __str__(self) -> str:
        message: str = self.args[0]
        return f"{self.path}: {message}" if self.path else message


class UntrustedCheckpointError(CheckpointError):
    """The checkpoint's pickles ask for more than plain data; the message says what, and which argument allows it.

    Attributes:
        what: of the message, without the cure.
    """

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what, cure)
        self.what = what

    def __str__(self) -> str:
        _, cure = self.args
        return f"{self.what}. If you trust it, {cure}" if cure else self.what


class KeyMismatchError(CheckpointError, RuntimeError, ValueError):
    """Names, shapes or dtypes of a state dict and of what is to be loaded do not match; the message lists all of them.

    A ``RuntimeError`` and a ``ValueError`` too, as that is what stock raises for missing keys and for other shapes.
    """


class PlanError(CheckpointError, ValueError, AssertionError):
    """The plans of ranks do not fit together, or a planner hands out what does not fit its plan.

    A ``ValueError`` and an ``AssertionError`` too, as stock raises these.
    """


@dataclass(slots=True)
class naming:
    """What torch, or a class of the user's, raises about one value becomes an error that says about which.

    Args:
        what: gives the begin of the message: "cannot save 'model.weight'".
        cure: ends it.
        kind: of the error.
    """

    what: Callable[[], str]
    cure: str = ""
    kind: type[CheckpointError] = CheckpointError

    def __enter__(self) -> None: ...

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, (CheckpointError, OSError, MemoryError)):
            message = f"{self.what()}: {type(error).__name__}: {error}"
            raise self.kind(f"{message}; {self.cure}" if self.cure else message) from error
