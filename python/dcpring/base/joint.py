"""What ranks do together, a word of each at a time, and how they fail together.

Whatever a rank does alone, between two words, is inside an operation: what it raises there is told to the others with
its next word, and raised on all. So no rank waits for one that has left.

    with joined(Joint(GroupChannel(group), "load")) as joint:
        state = collect()                               # may raise on one rank: all others learn of it ...
        notes = joint.gather("notes", note_of(state))   # ... here
"""

from __future__ import annotations

import contextlib
import errno
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from dcpring.base import groups
from dcpring.base.text import spans
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError

T = TypeVar("T")

_KINDS = (CorruptCheckpointError, UntrustedCheckpointError)
_OF_DAMAGE = (errno.ENOENT, errno.EIO, errno.ESTALE, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA)


# ---- failures ----


class Failure(NamedTuple):
    """What a rank tells the others of an exception.

    Attributes:
        kind: of the error that all raise.
        text: of the exception.
        what: could not be done because of it; "" where the text says it all.
        is_damage: it may be of one checkpoint alone: what was saved is damaged, or cannot be read.
    """

    kind: type[CheckpointError]
    text: str
    what: str = ""
    is_damage: bool = False


def failure_of(error: BaseException, what: str = "") -> Failure:
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), CheckpointError)
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return Failure(kind, text, what, is_damage(error))


def is_damage(error: BaseException) -> bool:
    """Whether another checkpoint may load where this error has come from one."""
    return getattr(error, "_is_damage", isinstance(error, OSError) and error.errno in _OF_DAMAGE)


def described(failures: dict[int, Failure]) -> str:
    """Who failed, and how. Ranks that failed alike are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure.text, []).append(rank)
    return "; ".join(f"{spans(failed)}: {text}" for text, failed in by_text.items())


def together(failures: dict[int, Failure]) -> CheckpointError:
    """One error for all ranks."""
    kinds = {failure.kind for failure in failures.values()}
    parts = []
    for what in dict.fromkeys(failure.what for failure in failures.values()):
        who = described({rank: failure for rank, failure in failures.items() if failure.what == what})
        parts.append(f"{what}: {who}" if what else who)
    error = (kinds.pop() if len(kinds) == 1 else CheckpointError)("; ".join(parts))
    error._is_damage = any(failure.is_damage for failure in failures.values())
    return error


# ---- words ----


class Word(NamedTuple):
    """What a rank says when it is its turn, as all do.

    Attributes:
        call: the operation.
        label: the place in it.
        failure: what this rank has raised since its last word.
        value: what the others are to know.
    """

    call: str
    label: str
    failure: Failure | None = None
    value: Any = None


class Channel(Protocol):
    """How words travel.

    Attributes:
        group: by which; None where this process is alone.
    """

    group: dist.ProcessGroup | None

    def gather(self, data: bytes, is_first: bool, held: groups.HeldInterrupt) -> list[bytes]:
        """The bytes of all ranks. Raises Lost where the others cannot be reached, and Interrupted as a gather does."""
        ...


class Lost(CheckpointError):
    """The other ranks cannot be reached."""


class GroupChannel:
    """Words through a process group that is not Ranks' own: it is neither given up nor made anew."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group

    def gather(self, data: bytes, is_first: bool, held: groups.HeldInterrupt) -> list[bytes]:
        assert self.group is not None
        try:
            return groups.gather(self.group, data, held)
        except RuntimeError as error:
            raise Lost(f"the other ranks cannot be reached any more: {error}") from error


class Joint:
    """One operation of some ranks: a word of each at a time.

    Args:
        channel: to the others.
        call: what all of them have called.

    Attributes:
        is_over: all have told each other that they are through: what is raised from then on is this rank's alone.
    """

    def __init__(self, channel: Channel, call: str) -> None:
        self.is_over = False
        self._channel = channel
        self._call = call
        self._is_first = True
        self._is_told = False
        self._failed: tuple[BaseException, str] | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """By which its words travel."""
        return self._channel.group

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """The error of all ranks says that ``what`` has failed, where this has."""
        try:
            yield
        except BaseException as error:
            if self._failed is None or self._failed[0] is not error:
                self._failed = error, what
            raise

    def gather(self, label: str, value: T, is_last: bool = False) -> list[T]:
        """The values of all ranks. Where one has raised before, all raise here; where one is elsewhere, too.

        Args:
            is_last: the operation is over then; what is raised later is not told, as nobody listens.
        """
        with groups.HeldInterrupt() as held:
            return self._gather(held, label, value, is_last)

    def _gather(self, held: groups.HeldInterrupt, label: str, value: T, is_last: bool = False) -> list[T]:
        words = self._exchange(Word(self._call, label, None, value), held)
        self._is_told = True
        if any(word.failure for word in words):
            raise together(_failures(words))
        if len({(word.call, word.label) for word in words}) > 1:
            raise CheckpointError(_diverged(words))
        self._is_told = self.is_over = is_last
        return [word.value for word in words]

    def settle(self, label: str, is_last: bool = False) -> None:
        """Ends a step: all ranks go on, or all raise what was raised on some."""
        self.gather(label, None, is_last)

    def tell(self, error: BaseException) -> BaseException:
        """Tells the others what this rank has raised, unless they know, and gives what it is to raise now."""
        if self._is_told:
            return error
        what = self._failed[1] if self._failed is not None and self._failed[0] is error else ""
        own = failure_of(error, what)
        try:
            with groups.HeldInterrupt() as held:
                words = self._exchange(Word(self._call, "", own), held)
                self._is_told = True
        except Lost:
            return error
        if not isinstance(error, Exception):
            return error
        is_mistake = isinstance(error, CheckpointError | ValueError | TypeError) and not what
        if is_mistake and all(word.failure == own for word in words):
            return error  # of the caller, on all ranks alike
        return together(_failures(words))

    def _exchange(self, word: Word, held: groups.HeldInterrupt) -> list[Word]:
        data = pickle.dumps(word)
        is_first, self._is_first = self._is_first, False
        self._is_told = False
        try:
            gathered = self._channel.gather(data, is_first, held)
        except Lost:
            self._is_told = True  # as far as can be
            raise
        except groups.Interrupted as interrupted:
            self._is_told = True
            raise interrupted.error from None
        return [pickle.loads(each) for each in gathered]


def _failures(words: Sequence[Word]) -> dict[int, Failure]:
    return {rank: word.failure for rank, word in enumerate(words) if word.failure is not None}


J = TypeVar("J", bound=Joint)


def _diverged(words: Sequence[Word]) -> str:
    by_place: dict[str, list[int]] = {}
    is_in_one = len({word.call for word in words}) == 1
    for rank, word in enumerate(words):
        by_place.setdefault(f"in {word.call}(), {word.label}" if is_in_one else f"in {word.call}()", []).append(rank)
    found = "; ".join(f"{spans(ranks)} {place}" for place, ranks in by_place.items())
    return f"all ranks must make the same calls in the same order, and have not: {found}"


@contextlib.contextmanager
def joined(joint: J) -> Iterator[J]:
    """An operation: what is raised in it on one rank is raised on all."""
    try:
        yield joint
        joint.settle("end", is_last=True)
    except BaseException as error:
        final = joint.tell(error)
        if final is error:
            raise
        raise final from error
