"""What all components of a training state share. ``sharded`` and ``whole`` have the kinds.

A component belongs to a Checkpointer, which calls its four methods on all ranks together:

save:  ``collect`` (this rank's state, and a note of it for all ranks), ``check`` (with the notes of all ranks)
load:  ``plan`` (compares what is needed with what is there), a read of ``ComponentPlan.target``,
       ``ComponentPlan.prepare`` (checks what was read), a read of ``ComponentPlan.in_place``, ``take``

A save changes nothing. A load changes nothing before its second read, which fills tensors that the component has.
What belongs to one load is kept in its plan, and nothing of it in the component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring.base.text import some_keys
from dcpring.resume import trees
from dcpring.resume.manifest import Stored
from dcpring.torchside.tensors import ShardedTensor, local_tensor

AS_SAVED, HANDED_OVER = "as saved", "handed over as saved"
"""How a component comes back on the same ranks: it was taken over, or nobody knows what the object has made of it."""


@dataclass(frozen=True)
class Member:
    """A rank among those that save or load."""

    rank: int
    world_size: int


@dataclass
class SaveCheck:
    """What a component finds in the notes of all ranks.

    Attributes:
        to_save: what this rank hands to DCP under the component's name; None for nothing.
        entry: what the manifest says of the component besides its kind and type.
        problems: why the states of the ranks cannot be one checkpoint; empty if they can.
        detail: what this rank adds to its note, which is a dict, because the notes of the ranks differ. All ranks add
            something, perhaps an empty dict, or none does (None). ``check`` is then called again, with the new notes.
    """

    to_save: Any = None
    entry: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    detail: dict[str, Any] | None = None


class Outlook(NamedTuple):
    """What a rank tells the others of its plan to load a component. The fields are those of ``ComponentPlan``."""

    problems: list[str]
    change: str
    resharded: bool
    notes: list[str]


@dataclass
class ComponentPlan:
    """What one rank wants to load of a component, and whether that is possible.

    Attributes:
        target: by key, new tensors to read into, and None for objects.
        problems: why the component cannot be loaded; empty if it can.
        change: "as saved", or how the state is resharded.
        resharded: whether it comes back on other ranks or another mesh than those that saved it.
        unexpected: keys of the checkpoint that this rank has no place for.
        in_place: by key, the object's own tensors, which are read into once everything else has been checked.
        notes: what will differ from what was saved.
        rebuild: makes what ``take`` takes out of the objects and tensors that were read.
    """

    target: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    change: str = AS_SAVED
    resharded: bool = False
    unexpected: set[str] = field(default_factory=set)
    in_place: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rebuild: Callable[[dict[str, Any]], Any] | None = None

    @property
    def outcome(self) -> str:
        """How the component comes back, in words."""
        return f"{self.change}, but {'; '.join(self.notes)}" if self.notes else self.change

    @property
    def outlook(self) -> Outlook:
        return Outlook(self.problems, self.change, self.resharded, self.notes)

    def prepare(self, read: dict[str, Any]) -> Any:
        """What ``take`` takes, made of what was read. Changes nothing; raises CheckpointError if it does not fit."""
        assert self.rebuild is not None
        return self.rebuild(read)


Remarks = Callable[[], list[str]]
"""Says what of a state did not come back as it was saved. It is called once all components have taken theirs."""


class Component:
    """What all kinds share. Use ``Sharded``, ``Replicated``, ``PerRank``, ``Elastic`` or what is built on them.

    Attributes:
        kind: its name in the manifest.
        is_whole: whether a rank's state is plain data that has to come back exactly, and not a part of tensors.
        goes_last: whether it takes its state after all others, because they might change it.
        stateful: the object that is saved and loaded: it has ``state_dict()`` and ``load_state_dict()``, or is a dict.
    """

    kind: ClassVar[str]
    is_whole: ClassVar[bool] = True
    goes_last: ClassVar[bool] = False

    def __init__(self, stateful: Any) -> None:
        self.stateful = stateful

    @property
    def type_name(self) -> str:
        return type(self.stateful).__name__

    def collect(self, member: Member) -> tuple[Any, Any]:
        """This rank's state, and a note of it that all ranks get."""
        raise NotImplementedError

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        """Compares the notes of all ranks, and says what this rank saves."""
        raise NotImplementedError

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        """Compares what this rank needs with what the checkpoint has."""
        raise NotImplementedError

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        """Takes over the state that a load has prepared.

        Args:
            ready: what ``ComponentPlan.prepare`` has given.
            before: the components that have taken theirs in this load.
        """
        give_state(self.stateful, ready)
        return lambda: differences(state_of(self.stateful), ready)


def no_remarks() -> list[str]:
    """The remarks of an object that cannot be asked, or that raises an error itself where it does not take a state."""
    return []


def state_of(stateful: Any) -> Any:
    return dict(stateful) if isinstance(stateful, MutableMapping) else stateful.state_dict()


def give_state(stateful: Any, state: Any) -> None:
    if isinstance(stateful, MutableMapping):
        stateful.clear()
        stateful.update(state)
    else:
        stateful.load_state_dict(state)


def kind_problems(component: Component, name: str, stored: Stored, accepted: Iterable[str] = ()) -> list[str]:
    """Why a component of this kind cannot load what was saved as another kind."""
    saved = stored.entry(name).get("kind", component.kind)
    if saved in (component.kind, *accepted):
        return []
    return [f"saved as {saved}, here it is {component.kind}; wrap it as it was saved, or leave it out"]


def each_once(texts: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(text for some in texts for text in some))


def some_are(keys: Iterable[str]) -> str:
    names = set(keys)
    return f"{some_keys(names)} {'is' if len(names) == 1 else 'are'}"


def differences(taken: Any, given: Any) -> list[str]:
    """A remark if an object's state lacks something of what the object was given; it may have more."""
    names = _differing(given, taken)
    return [f"its state_dict() has something else in {some_keys(names)} afterwards"] if names else []


def _differing(given: Any, taken: Any) -> list[str]:
    """The places, in words, at which a state has another value than the one that was given."""
    if not isinstance(given, Mapping | list | tuple):
        return [] if _same(given, taken) else ["it"]
    found = dict(trees.leaves(taken))
    differing = [at for at, value in trees.leaves(given) if at not in found or not _same(value, found[at])]
    return list(map(trees.text_of, differing))


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, or nobody can tell; of DTensors, the part of this rank is compared."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        a, b = local_tensor(a), local_tensor(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # Mostly it is the same memory, or at least there is no NaN.
        return a.data_ptr() == b.data_ptr() or torch.equal(a, b) or trees.digest(a) == trees.digest(b)
    return isinstance(a, ShardedTensor) or trees.digest(a) == trees.digest(b)
