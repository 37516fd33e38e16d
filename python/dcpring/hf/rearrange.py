"""A model's tensors under other names and in other shapes: fused, split, stacked, transposed, without a copy.

A rule says how tensors of the model and stored ones hold the same elements. Both are cut into blocks that are boxes on
either side, but for steps in the model's: for each value of the axes that are not innermost in the stored one, one
block. A stored tensor is then made of views of the model's memory on this rank (``Composed``). DCP saves these, and
loads into them.

Terms are those of einops: an axis has a name; a dimension is one axis, or several in brackets, of which the last runs
fastest. An axis may also be in names: then each of its values has a tensor of its own.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring.base.memory import is_lazy_view
from dcpring.base.text import some_keys
from dcpring.base.windows import common_box
from dcpring.errors import CheckpointError
from dcpring.plan.placements import Part, parts_of
from dcpring.torchside.composed import Composed, HeldPart
from dcpring.torchside.tensors import is_whole, local_tensor

__all__ = ["Rearrange", "rearranged"]

logger = logging.getLogger("dcpring")

Ints = tuple[int, ...]
Axes = tuple[str, ...]
Values = dict[str, int]
"""The values of some axes; those of an axis with labels are numbered."""

_AXIS = re.compile(r"[A-Za-z_]\w*")
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rearrange:
    """How tensors of a model and stored ones hold the same elements.

    Args:
        model: the names of the model's tensors; ``{x}`` stands for some part of a name, or for the value of the axis
            x.
        stored: the names of the stored tensors, likewise.
        pattern: dimensions of both, as of ``einops.rearrange``: "e h (p i) -> i h"; the model's are on the left. An
            axis that is in the names of one side is in the dimensions of the other.
        axes: what names and shapes do not tell: the size of an axis; or the labels of one that is in names, as a
            list; or, where the axis right of it in a bracket differs between them, with the proportions of that,
            as a dict: ``{"qkv": {"q": 4, "k": 1, "v": 1}}``.

    A fused projection of which the parts are stored, with four query heads to each of keys and values::

        Rearrange("{m}.qkv_proj.weight", "{m}.{p}_proj.weight", "(p o) i -> o i", {"p": {"q": 4, "k": 1, "v": 1}})

    Experts that are stacked, transposed, with gate and up in one, and are stored one by one::

        Rearrange("{m}.experts.gate_up", "{m}.experts.{e}.{p}_proj.weight", "e h (p i) -> i h", {"p": ["gate", "up"]})

    Raises:
        ValueError: the sides do not have the same axes, or the rule cannot be read.
    """

    model: str
    stored: str
    pattern: str
    axes: Mapping[str, int | Sequence[str] | Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _CheckedRule(self)

    def inverse(self) -> Rearrange:
        """The same, with the sides exchanged."""
        left, right = self.pattern.split("->")
        return Rearrange(self.stored, self.model, f"{right.strip()} -> {left.strip()}", self.axes)


class _RuleSide:
    """One side of a rule."""

    def __init__(self, name: str, pattern: str) -> None:
        self.name = name
        self.places = _PLACE.findall(name)
        self.dims: list[Axes] = []
        for token in re.findall(r"\([^()]*\)|[^\s()]+", pattern):
            axes = tuple(token.strip("()").split())
            if not all(map(_AXIS.fullmatch, axes)):
                raise ValueError(f"{pattern!r} is no list of dimensions")
            self.dims.append(axes)
        if pattern.count("(") != pattern.count(")") or re.sub(r"\([^()]*\)|[\w\s]", "", pattern):
            raise ValueError(f"{pattern!r} is no list of dimensions")
        self.axes = [axis for dim in self.dims for axis in dim]


class _CheckedRule:
    """A rule as it is used.

    Attributes:
        model, stored: its sides.
        labels: of axes, by number.
        weights: proportions that the axis behind such a one has, by number.
        leader, leaders: for an axis whose size depends on another's value, that one; and all of these.
        sizes: of axes that were given.
        ranges: for each dimension of the stored tensors the axis of which a block has all values, or "".
        model_ranges: likewise of the model's.
        from_dims: for each dimension of the stored tensors the model's with the same range, or None.
    """

    def __init__(self, given: Rearrange) -> None:
        left, arrow, right = given.pattern.partition("->")
        if not arrow:
            raise ValueError(f"the pattern {given.pattern!r} has no ->")
        self.text = f"{given.model} -> {given.stored}"
        self.model, self.stored = _RuleSide(given.model, left), _RuleSide(given.stored, right)
        self.labels: dict[str, list[str]] = {}
        self.weights: dict[str, list[int]] = {}
        self.sizes: dict[str, int] = {}
        for axis, value in given.axes.items():
            if isinstance(value, int):
                self.sizes[axis] = value
                continue
            if isinstance(value, str):
                raise ValueError(
                    f"the axis {axis!r} of {self.text} has the labels {value!r}: they are a list, or a dict"
                )
            self.labels[axis] = list(value)
            self.sizes[axis] = len(self.labels[axis])
            if isinstance(value, Mapping):
                self.weights[axis] = list(value.values())
        self._check()
        self.leader = {
            after: before
            for side in (self.model, self.stored)
            for dim in side.dims
            for before, after in itertools.pairwise(dim)
            if before in self.labels
        }
        self.leaders = tuple(dict.fromkeys(self.leader.values()))
        lasts = [dim[-1] if dim else "" for dim in self.stored.dims]
        can_be = set(lasts) - set(self.model.places) - set(self.labels)
        self.model_ranges = [next((axis for axis in reversed(dim) if axis in can_be), "") for dim in self.model.dims]
        self.ranges = [last if last in self.model_ranges else "" for last in lasts]
        self.from_dims = [self.model_ranges.index(axis) if axis else None for axis in self.ranges]
        self.named = set(self.model.axes) | set(self.stored.axes)
        self.of_names = [axis for axis in self.model.places if axis in self.named]
        self._regex = _regex(self.model, self.named, self.labels)

    def _check(self) -> None:
        sides = []
        for side, other in ((self.model, self.stored), (self.stored, self.model)):
            named = [place for place in side.places if place in other.axes]
            sides.append(sorted([*side.axes, *named]))
            free = set(side.places) - set(named)
            if not free <= set(other.places):
                raise ValueError(f"{self.text}: {sorted(free - set(other.places))} is on one side only")
        if sides[0] != sides[1] or len(set(sides[0])) < len(sides[0]):
            raise ValueError(f"{self.text}: the axes of one side are {sides[0]}, of the other {sides[1]}")
        unknown = set(self.sizes) - set(sides[0])
        if unknown or any(size < 1 for size in self.sizes.values()):
            raise ValueError(f"{self.text}: axes= has {sorted(unknown) or self.sizes}")

    def match(self, name: str) -> tuple[tuple[str, ...], Ints] | None:
        """Which tensors are rearranged together, and which of them a name is; None: it is no such name."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        free = tuple(text for place, text in found.groupdict().items() if place not in self.named)
        return free, tuple(self._number(axis, found[axis]) for axis in self.of_names)

    def _number(self, axis: str, text: str) -> int:
        return self.labels[axis].index(text) if axis in self.labels else int(text)

    def stored_name(self, group: tuple[str, ...]) -> Callable[[Values], str]:
        """What the stored tensors of a group are called, by the values of axes."""
        places = [place for place in dict.fromkeys(self.model.places) if place not in self.named]
        free = dict(zip(places, group, strict=True))
        parts = _PLACE.split(self.stored.name)  # the places, with what is between them
        for at, part in enumerate(parts):
            is_axis = at % 2 == 1 and part in self.named
            parts[at] = "%s" if is_axis else (free[part] if at % 2 else part).replace("%", "%%")
        text = "".join(parts)
        axes = [axis for axis in self.stored.places if axis in self.named]
        labels = [self.labels.get(axis) for axis in axes]

        def name(values: Values) -> str:
            at = zip(axes, labels, strict=True)
            return text % tuple(known[values[axis]] if known else values[axis] for axis, known in at)

        return name


def _regex(side: _RuleSide, named: set[str], labels: Mapping[str, Sequence[str]]) -> re.Pattern[str]:
    text, at, seen = "", 0, set()
    for place in _PLACE.finditer(side.name):
        text += re.escape(side.name[at : place.start()])
        axis = place[1]
        if axis in seen:
            text += f"(?P={axis})"
        elif axis in labels:
            text += f"(?P<{axis}>{'|'.join(map(re.escape, labels[axis]))})"
        else:
            text += rf"(?P<{axis}>{'0|[1-9][0-9]*' if axis in named else '.+'})"
        seen.add(axis)
        at = place.end()
    return re.compile(text + re.escape(side.name[at:]))


def rearranged(state_dict: Mapping[str, Any], rules: Sequence[Rearrange]) -> dict[str, Any]:
    """A state dict with a model's tensors as they are stored: made of views, so that loading into it loads the model.

    ``dcp.save(rearranged(state, rules), storage_writer=RingHFWriter(path), planner=RingSavePlanner())`` and
    ``dcp.load(rearranged(state, rules), storage_reader=RingHFReader(path), planner=RingLoadPlanner())`` write and read
    what the rules say, whatever the model's sharding, with any storage and planner of DCP's. Nothing is copied.

    A rule that no name is left for is logged as a warning: what it was meant for stays as it is. It is no error, as a
    state dict may be one stage of a pipeline.

    Args:
        state_dict: flat, of tensors or DTensors; what no rule matches stays as it is.
        rules: the first that matches a name counts.

    Returns:
        The new state dict. What is made of parts of others can be saved, loaded and copied, and not be calculated with.

    Raises:
        CheckpointError: shapes do not fit a rule, or a tensor is of a kind that has no views.
    """
    made, unused = rearranged_by(state_dict, rules)
    if unused:
        logger.warning("%s", unused_text(unused, state_dict))
    return made


def unused_text(unused: Sequence[str], names: Iterable[str]) -> str:
    """What is said of rules that have matched nothing."""
    return (
        f"nothing is rearranged by {some_keys(unused)}: of the names of the tensors, {some_keys(names)}, none matches "
        "the first part, or an earlier rule takes those that do; correct the rule or leave it out"
    )


def rearranged_by(state_dict: Mapping[str, Any], rules: Sequence[Rearrange]) -> tuple[dict[str, Any], list[str]]:
    """What ``rearranged`` gives, and the rules that have matched nothing."""
    ready = [_CheckedRule(rule) for rule in rules]
    groups: dict[tuple[int, tuple[str, ...]], dict[Ints, tuple[str, Tensor]]] = {}
    group_of: dict[str, tuple[int, tuple[str, ...]]] = {}
    for name, value in state_dict.items():
        for number, rule in enumerate(ready):
            if found := rule.match(name):
                group_of[name] = number, found[0]
                groups.setdefault(group_of[name], {})[found[1]] = name, value
                break
    used = {number for number, _ in groups}
    made: dict[str, Any] = {}
    for name, value in state_dict.items():
        group = group_of.get(name)
        if group is None:
            _add(made, name, value)
        elif group in groups:  # at the first of its tensors
            for stored, composed in _RearrangedGroup(ready[group[0]], group[1], groups.pop(group)).composed():
                _add(made, stored, composed)
    return made, [rule.text for number, rule in enumerate(ready) if number not in used]


def _add(made: dict[str, Any], name: str, value: Any) -> None:
    """Adds a tensor. Several rules may each make a part of one."""
    known = made.get(name)
    if name in made:
        if not isinstance(value, Composed) or not isinstance(known, Composed) or not _are_parts_of_one(known, value):
            raise CheckpointError(f"two tensors of the state dict would be stored as {name!r}")
        value = known.joined(value)
    made[name] = value


def _are_parts_of_one(a: Composed, b: Composed) -> bool:
    """Whether both are of the same tensor, and of different parts of it."""
    boxes = [[(part.offsets, tuple(part.tensor.shape)) for part in each.held] for each in (a, b)]
    are_alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return are_alike and not any(itertools.starmap(common_box, itertools.product(*boxes)))


class _SteppedRun(NamedTuple):
    """Some elements of a dimension: so many from an offset on, each so far from the one before."""

    offset: int
    length: int
    step: int


class _StoredBox(NamedTuple):
    """Elements of one tensor of the model that are a box of a stored one.

    Attributes:
        stored: its name.
        offsets: of the box in it.
        runs: of the elements, by the dimensions of the model's tensor.
    """

    stored: str
    offsets: Ints
    runs: list[_SteppedRun]


class _RearrangedGroup:
    """Tensors of a model that are rearranged together.

    Args:
        rule: by which.
        group: what the places in names stand for that are no axes.
        members: the tensors and their names, by the values of the axes that are in their names.
    """

    def __init__(self, rule: _CheckedRule, group: tuple[str, ...], members: Mapping[Ints, tuple[str, Tensor]]) -> None:
        self._rule, self._name = rule, rule.stored_name(group)
        self._offsets: dict[Any, int] = {}
        self._members = [(dict(zip(rule.of_names, index, strict=True)), *one) for index, one in members.items()]
        self._sizes: dict[tuple[str, int], int] = {(axis, -1): size for axis, size in rule.sizes.items()}
        for values, name, value in self._members:
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{name!r} is no tensor, and cannot be rearranged ({rule.text})")
            self._learn(values, name, value)
        for axis in rule.of_names:
            found = {values[axis] for values, _, _ in self._members}
            count = self._sizes.setdefault((axis, -1), max(found) + 1)
            if axis not in rule.sizes and found != set(range(count)):
                raise CheckpointError(
                    f"{rule.text}: of the axis {axis!r} there are {len(found)} values up to {max(found)} in the state "
                    f"dict's names; give its size, axes={{{axis!r}: ...}}"
                )

    # ---- sizes ----

    def _learn(self, values: Values, name: str, tensor: Tensor) -> None:
        """Takes the sizes of axes from a tensor's shape."""
        dims = self._rule.model.dims
        if len(dims) != tensor.dim():
            raise CheckpointError(f"{name!r} has {tensor.dim()} dimensions, {len(dims)} in the rule {self._rule.text}")
        for dim, size in zip(dims, tensor.shape, strict=True):
            unknown = [axis for axis in dim if self._known(axis, values) is None]
            if len(unknown) > 1:
                raise CheckpointError(
                    f"{self._rule.text}: the sizes of {unknown} cannot be told from {list(tensor.shape)} of {name!r}; "
                    "give them as axes="
                )
            if unknown:
                self._solve(unknown[0], dim, size, values)
            if self._extent(dim, values) != size:
                raise CheckpointError(
                    f"{name!r} has the shape {list(tensor.shape)}, which does not fit the rule {self._rule.text}: "
                    f"{' x '.join(dim)} cannot be {size}"
                )

    def _solve(self, axis: str, dim: Axes, size: int, values: Values) -> None:
        rule = self._rule
        leader = rule.leader.get(axis)
        if leader is None or leader not in dim:
            others = self._extent(tuple(other for other in dim if other != axis), values)
            self._sizes[axis, -1 if leader is None else values[leader]] = size // max(others, 1)
            return
        weights = rule.weights.get(leader) or [1] * rule.sizes[leader]
        others = self._extent(tuple(other for other in dim if other not in (axis, leader)), values)
        unit = size // max(others * sum(weights), 1)
        for number, weight in enumerate(weights):
            self._sizes[axis, number] = unit * weight

    def _known(self, axis: str, values: Values) -> int | None:
        """The size of an axis; of one that depends on another's value, whichever that has if it has none."""
        leader = self._rule.leader.get(axis)
        if (axis, -1) in self._sizes:
            return self._sizes[axis, -1]
        return None if leader is None else self._sizes.get((axis, values.get(leader, 0)))

    def _size(self, axis: str, values: Values) -> int:
        size = self._known(axis, values)
        if size is None:
            raise CheckpointError(f"{self._rule.text}: the size of {axis!r} is not known; give it as axes=")
        return size

    def _extent(self, axes: Axes, values: Values) -> int:
        """How many elements some axes of a dimension have."""
        if not axes:
            return 1
        first, rest = axes[0], axes[1:]
        if first in self._rule.leaders:
            return sum(self._extent(rest, {**values, first: at}) for at in range(self._size(first, values)))
        return self._size(first, values) * self._extent(rest, values)

    def _offset(self, dim: Axes, values: Values) -> int:
        """Where the elements begin for which the axes have these values; those without one begin at 0."""
        key = dim, *map(values.get, (*dim, *self._rule.leaders))
        offset = self._offsets.get(key)
        if offset is None:
            offset = self._offsets[key] = self._begin(dim, values)
        return offset

    def _begin(self, axes: Axes, values: Values) -> int:
        if not axes:
            return 0
        first, rest = axes[0], axes[1:]
        at = values.get(first, 0)
        if first in self._rule.leaders:
            before = sum(self._extent(rest, {**values, first: each}) for each in range(at))
        else:
            before = at * self._extent(rest, values)
        return before + self._begin(rest, {**values, first: at} if first in values else values)

    # ---- blocks ----

    def composed(self) -> Iterator[tuple[str, Composed]]:
        """The stored tensors."""
        rule = self._rule
        named = [axis for axis in dict.fromkeys(rule.stored.places) if axis in rule.named]
        shapes = {
            self._name(values): tuple(self._extent(dim, values) for dim in rule.stored.dims)
            for values in self._assignments(named, {})
        }
        held: dict[str, list[HeldPart]] = {name: [] for name in shapes}
        _, first_name, first = self._members[0]
        for values, name, tensor in self._members:
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                raise CheckpointError(
                    f"{name!r} is {tensor.dtype} on {tensor.device}, {first_name!r} {first.dtype} on {first.device}: "
                    f"they cannot be parts of one tensor ({rule.text})"
                )
            local, parts = _local_parts(name, tensor)
            for block, part in itertools.product(self._blocks(values), parts):
                if (one := self._held(block, part, local)) is not None:
                    held[block.stored].append(one)
        made_of = [name for _, name, _ in self._members]
        for name, shape in shapes.items():
            yield name, Composed(shape, held[name], first.dtype, first.device, made_of)

    def _assignments(self, axes: Sequence[str], values: Values) -> Iterator[Values]:
        """All values of these axes, besides those given."""
        if not axes:
            yield values
            return
        for at in range(self._size(axes[0], values)):
            yield from self._assignments(axes[1:], {**values, axes[0]: at})

    def _blocks(self, member: Values) -> Iterator[_StoredBox]:
        rule = self._rule
        loops = [axis for axis in [*rule.stored.places, *rule.model.axes] if axis in rule.named]
        loops = [axis for axis in dict.fromkeys(loops) if axis not in rule.ranges and axis not in member]
        loops.sort(key=lambda axis: rule.leader.get(axis) in loops)  # whatever a size depends on comes first
        dims = [
            (dim, axis, dim[dim.index(axis) + 1 :] if axis else ())
            for dim, axis in zip(rule.model.dims, rule.model_ranges, strict=True)
        ]
        for values in self._assignments(loops, member):
            runs = [
                _SteppedRun(self._offset(dim, values), self._size(axis, values), self._extent(behind, values))
                if axis
                else _SteppedRun(self._offset(dim, values), 1, 1)
                for dim, axis, behind in dims
            ]
            offsets = tuple(self._offset(dim, values) for dim in rule.stored.dims)
            yield _StoredBox(self._name(values), offsets, runs)

    def _held(self, block: _StoredBox, part: Part, local: Tensor) -> HeldPart | None:
        """What this rank holds of a block in one of its parts."""
        start, firsts, counts = local.storage_offset(), [], []
        for run, offset, length, at, stride in zip(block.runs, *part, local.stride(), strict=True):
            first = max(0, -((run.offset - offset) // run.step))
            end = min(run.length, -((run.offset - offset - length) // run.step))
            if first >= end:
                return None
            start += (at + run.offset - offset + first * run.step) * stride
            firsts.append(first)
            counts.append(end - first)
        offsets, sizes, strides = list(block.offsets), [], []
        for number, dim in enumerate(self._rule.from_dims):
            sizes.append(1 if dim is None else counts[dim])
            strides.append(1 if dim is None else local.stride(dim) * block.runs[dim].step)
            offsets[number] += 0 if dim is None else firsts[dim]
        return HeldPart(tuple(offsets), local.as_strided(sizes, strides, start))


def _local_parts(name: str, tensor: Tensor) -> tuple[Tensor, Sequence[Part]]:
    """What this rank holds of a tensor, and where."""
    if type(tensor) is DTensor:
        local = local_tensor(tensor)
        parts = parts_of(name, tensor)
    else:
        local, zeros = tensor, (0,) * tensor.dim()
        parts = (Part(zeros, tuple(tensor.shape), zeros),)
    if not is_whole(local) or local.layout != torch.strided or is_lazy_view(local):
        raise CheckpointError(f"{name!r} is a {type(local).__name__} ({local.layout}), of which there are no views")
    return local.detach(), [part for part in parts if math.prod(part.lengths)]
