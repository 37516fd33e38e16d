"""What all components of a training state share. ``sharded`` and ``whole`` are the kinds.

A component belongs to a Checkpointer, which runs it in steps that all ranks take together:

save:  ``state`` (this rank's), ``note`` (what all ranks see of it), ``detail``, ``disagreements``, ``to_save``
load:  ``plan`` (what is needed against what is there), a read of ``Plan.target``, ``prepare`` (checks what was read),
       a read of ``Plan.in_place``, ``apply``, ``remarks`` (what did not come out as it was saved)

A save changes nothing. A load changes nothing before its second read, which is of tensors into tensors that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring.base.text import some_keys
from dcpring.resume import trees
from dcpring.resume.manifest import Stored
from dcpring.torchside.tensors import ShardedTensor, local_tensor

AS_SAVED, HANDED_OVER = "as saved", "handed over as saved"
"""How a component comes back on the same ranks: taken over, or nobody knows what the object has made of it."""


@dataclass(frozen=True)
class Member:
    """A rank among those that save or load."""

    rank: int
    world_size: int


@dataclass
class ComponentPlan:
    """What one rank wants of a component, and whether it is there.

    Attributes:
        target: by key, tensors to fill that are nobody's yet, and None for objects.
        in_place: by key, the object's own tensors, which are filled when all else has been found to be good.
        problems: why it cannot be loaded; empty if it can.
        change: "as saved", or how it reshards.
        resharded: whether it comes back on other ranks or another mesh than it was saved on.
        notes: what will not be as it was saved.
        unexpected: keys of the checkpoint that this rank has no place for.
    """

    target: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    change: str = AS_SAVED
    resharded: bool = False
    unexpected: set[str] = field(default_factory=set)
    in_place: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """How it comes back, in words."""
        return f"{self.change}, but {'; '.join(self.notes)}" if self.notes else self.change

    def without_keys(self) -> ComponentPlan:
        """What other ranks are told."""
        return replace(self, target={}, in_place={}, unexpected=set())


class Component:
    """What all kinds share. Use ``Sharded``, ``Replicated``, ``PerRank``, ``Elastic`` or what is built on them.

    Attributes:
        kind: as the manifest names it.
        is_whole: whether a rank's state is no part of anything, but plain data that has to come back exactly.
        goes_last: taken over after all others, as they might change it.
        stateful: what is saved and loaded: it has ``state_dict()`` and ``load_state_dict()``.
        _given: what a load has given it, to be looked for in its ``state_dict()`` afterwards; None: nothing is.
    """

    kind: ClassVar[str]
    is_whole: ClassVar[bool] = True
    goes_last: ClassVar[bool] = False

    def __init__(self, stateful: Any) -> None:
        self.stateful = stateful
        self._given: Any = None

    @property
    def type_name(self) -> str:
        return type(self.stateful).__name__

    # ---- save ----

    def state(self) -> Any:
        return self.stateful.state_dict()

    def note(self, state: Any, member: Member) -> Any:
        raise NotImplementedError

    def detail(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any] | None:
        """What this rank adds to its note, a dict, now that it knows all notes; None, on all ranks, for nothing."""
        return None

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        """Why what the ranks have cannot be one checkpoint."""
        return []

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        """What this rank hands to DCP below the component's name; below "" for all of it; empty if nothing."""
        raise NotImplementedError

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        """What the manifest says besides kind and type."""
        return {}

    def frozen(self, state: Any) -> set[str]:
        """Keys of tensors of a state that are expected to stay as they are."""
        return set()

    # ---- load ----

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        raise NotImplementedError

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        """What ``apply`` takes, out of what was read. Changes nothing; raises CheckpointError if it does not fit."""
        raise NotImplementedError

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        """Takes the state over.

        Args:
            state: what ``prepare`` gave.
            before: the components that this load has applied already.
        """
        self.stateful.load_state_dict(state)

    def remarks(self) -> list[str]:
        """What is known not to be as it was saved, once the state has been taken over; for the report."""
        return [] if self._given is None else self._differences(self._given)

    def forget(self) -> None:
        """After a load, however it went: what was set up for it is not needed any more."""
        self._given = None

    def _differences(self, given: Any) -> list[str]:
        """A remark if the object's ``state_dict()`` does not have what it was given; more it may have."""
        names = _differing(given, self.state())
        return [f"its state_dict() has something else in {some_keys(names)} afterwards"] if names else []

    def _kind_problems(self, name: str, stored: Stored, accepted: Iterable[str] = ()) -> list[str]:
        saved = stored.entry(name).get("kind", self.kind)
        if saved in (self.kind, *accepted):
            return []
        return [f"saved as {saved}, here it is {self.kind}; wrap it as it was saved, or leave it out"]


class Several(Component):
    """Several of one kind that are one component.

    Attributes:
        each: at least one.
    """

    each: Sequence[Component]

    @property
    def type_name(self) -> str:
        return self.each[0].type_name

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        return [one.prepare(name, stored, target, member) for one in self.each]

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        for one, own in zip(self.each, state, strict=True):
            one.apply(own, before)

    def remarks(self) -> list[str]:
        return each_once(one.remarks() for one in self.each)

    def forget(self) -> None:
        for one in self.each:
            one.forget()


def each_once(texts: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(text for some in texts for text in some))


def some_are(keys: Iterable[str]) -> str:
    names = set(keys)
    return f"{some_keys(names)} {'is' if len(names) == 1 else 'are'}"


def _differing(given: Any, taken: Any) -> list[str]:
    """What of a state is not in another one, in words."""
    if not isinstance(given, Mapping | list | tuple):
        return [] if _same(given, taken) else ["it"]
    found = dict(trees.leaves(taken))
    differing = [at for at, value in trees.leaves(given) if at not in found or not _same(value, found[at])]
    return list(map(trees.text_of, differing))


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, or nobody can tell; of what is spread over ranks, this rank's part."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        a, b = local_tensor(a), local_tensor(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # Mostly it is the same memory, or at least there is no NaN.
        return a.data_ptr() == b.data_ptr() or torch.equal(a, b) or trees.digest(a) == trees.digest(b)
    return isinstance(a, ShardedTensor) or trees.digest(a) == trees.digest(b)
