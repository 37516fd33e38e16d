"""Parameter groups of optimizers, as they are saved: options, and the names of the members.

Ranks need not have the same members: a stage of a pipeline has the groups of its own layers. A checkpoint has them
joined, so that it does not say how the model was cut. A load finds for each group which of the saved ones it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dcpring.base.text import some
from dcpring.names.state_dict.set_optimizers import same_value
from dcpring.torchside.optim import PARAM_NAMES, PARAMS

__all__ = ["joined", "match_groups"]

Group = Mapping[str, Any]
Names = list[str]
"""All names of a parameter; several if it is tied."""


def options_of(group: Group) -> dict[str, Any]:
    """What a group holds besides its parameters; the names that torch keeps of these are the optimizer's own."""
    return {name: value for name, value in group.items() if name not in (PARAMS, PARAM_NAMES)}


def members(groups: Sequence[Group]) -> list[list[str]]:
    return [list(group[PARAMS]) for group in groups]


def _alike(a: Group, b: Group) -> bool:
    """Whether two groups have the same options."""
    own, other = options_of(a), options_of(b)
    return own.keys() == other.keys() and all(same_value(value, other[name]) for name, value in own.items())


# ---- saving ----


def joined(by_rank: Mapping[int, Sequence[Group]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups of ranks that have different parameters, and what keeps them from being joined.

    A group is joined with the one at its place, if that has the same options; else with the first that has; else it is
    one more.

    Args:
        by_rank: the groups of some ranks, with the names of their parameters.
    """
    groups: list[dict[str, Any]] = []
    owner: dict[str, tuple[int, int]] = {}
    problems = []
    for rank, own in by_rank.items():
        taken: set[int] = set()
        for index, group in enumerate(own):
            at = _place(groups, index, group, taken)
            taken.add(at)
            if at == len(groups):
                groups.append({**group, PARAMS: [], **({PARAM_NAMES: []} if PARAM_NAMES in group else {})})
            for place, name in enumerate(group[PARAMS]):
                first, there = owner.setdefault(name, (rank, at))
                if there != at and not _alike(groups[there], group):
                    problems.append(f"{name!r} (ranks {first} and {rank})")
                if (first, there) == (rank, at):
                    groups[at][PARAMS].append(name)
                    if PARAM_NAMES in groups[at]:
                        groups[at][PARAM_NAMES].append(group.get(PARAM_NAMES, group[PARAMS])[place])
    if problems:
        problems = [f"a parameter is in groups with different options: {some(problems, 4)}"]
    return groups, problems


def _place(groups: Sequence[Group], index: int, group: Group, taken: set[int]) -> int:
    """Where a group is joined. Groups of one rank stay apart, whatever their options."""
    places = [index, *range(len(groups))] if index < len(groups) else range(len(groups))
    return next((at for at in places if at not in taken and _alike(groups[at], group)), len(groups))


# ---- loading ----


def match_groups(
    own: Sequence[Sequence[Names]],
    saved: Sequence[Sequence[str]],
    own_options: Sequence[Group] = (),
    saved_options: Sequence[Group] = (),
) -> tuple[list[int | None], list[str]]:
    """Which of the saved groups each group is, by the names of their parameters, in whatever order; and what is wrong.

    Parameters that only one side has are passed over. Groups without parameters are paired in their order. Groups may
    have been joined, or cut in parts, if the options of these were the same: nothing is lost by it.

    Args:
        own: for each group the names of each parameter.
        saved: for each group the names of its parameters.
        own_options: of each group, if groups may have been joined or cut.
        saved_options: likewise.
    """
    group_of = {name: index for index, names in enumerate(saved) for name in names}
    found = [[next((group_of[name] for name in names if name in group_of), None) for names in group] for group in own]
    # The largest common parts are groups that stayed; what is in none of them has moved.
    pairs = Counter((here, there) for here, group in enumerate(found) for there in group if there is not None)
    matched: dict[int, int] = {}
    for (here, there), _ in pairs.most_common():
        if here not in matched and there not in matched.values():
            matched[here] = there
    for (here, there), _ in pairs.most_common() if own_options else ():
        if here not in matched:
            rest = next(other for other, taken in matched.items() if taken == there)
            if _alike(own_options[here], own_options[rest]):
                matched[here] = there

    def is_moved(here: int, there: int | None) -> bool:
        if there is None or (at := matched.get(here)) == there:
            return False
        return at is None or not saved_options or not _alike(saved_options[there], saved_options[at])

    moved = [
        f"{names[0]!r} (in group {there} there, {here} here)"
        for here, group in enumerate(own)
        for names, there in zip(group, found[here], strict=True)
        if is_moved(here, there)
    ]
    problems = []
    if moved:
        sizes = "" if len(own) == len(saved) else f"{len(saved)} parameter groups in the checkpoint, {len(own)} here; "
        problems.append(f"{sizes}parameters are in other groups than they were saved in: {some(moved, 4)}")
    empty = [index for index, group in enumerate(own) if not group]
    empty_there = [index for index, names in enumerate(saved) if not names]
    if len(own) == len(saved) and len(empty) > len(empty_there) and not set(empty) & set(matched.values()):
        empty_there = empty  # here are none of the parameters that the groups at these places had there
    if empty and len(empty) != len(empty_there):
        problems.append(f"{len(empty_there)} groups without parameters in the checkpoint, {len(empty)} here")
    matched |= dict(zip(empty, empty_there, strict=False))
    return [matched.get(index) for index in range(len(own))], problems
