"""Names of a state dict and a checkpoint, or of two checkpoints: what differs, and why, probably.

Only names, shapes and dtypes are looked at, which any thread may do, and nothing of torch is needed for it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcpring import _C
from dcpring.base.text import ranges, some

_SUFFIX_PARTS = 8
"""Names are compared by at most so many of their last components."""

_FUZZY_PAIRS = 10_000
"""Spelling is compared only while there are at most so many pairs of names; it takes some 20 us each."""

_SHOWN_CHARACTERS = 200
_COMPARED_CHARACTERS = 4096
"""Longer names are neither shown whole nor compared."""

_MOST_ON_A_LINE = 4
"""Names, each perhaps for many that differ in a number."""

_MOST_LISTED = 20
"""Of these, in one list of a report. Errors go to every rank, and into logs."""

_MOST_NUMBERS = 4
"""Names that differ in more numbers are not shown as one."""


class WrapperPart(NamedTuple):
    """A part of names that a wrapper puts there.

    Attributes:
        origin: who does.
        model: what such a model is called in a sentence; "" where names are not compared by it.
        certain: whether nobody else is known to.
    """

    origin: str
    model: str
    certain: bool


WRAPPER_PARTS: Mapping[str, WrapperPart] = {
    "_orig_mod": WrapperPart("torch.compile(module)", "a compiled module", True),
    "_fsdp_wrapped_module": WrapperPart(
        "FSDP1 (FullyShardedDataParallel)", "an FSDP1 module, outside of its state_dict_type", True
    ),
    "_flat_param": WrapperPart("FSDP1's flat parameter", "", True),
    "_checkpoint_wrapped_module": WrapperPart(
        "activation checkpointing or offloading", "the parameters of an activation-checkpoint wrapper", True
    ),
    "module": WrapperPart("DDP, DataParallel or AveragedModel, or the model's own", "DDP or AveragedModel", False),
    "base_layer": WrapperPart("an adapter (LoRA), or the model's own", "an adapter (LoRA)", False),
    "parametrizations": WrapperPart("torch.nn.utils.parametrize, or the model's own", "", False),
}
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original$")


class KeyDescription(NamedTuple):
    """What a key stands for.

    Attributes:
        shape: of a tensor, None for anything else.
        dtype: of a tensor, or its name; None for anything else.
    """

    shape: tuple[int, ...] | None
    dtype: Any

    def __str__(self) -> str:
        return "an object" if self.shape is None else f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Unmatched:
    """A key that only one side has.

    Attributes:
        key: as that side calls it.
        candidate: the closest of the other side's keys without a counterpart, None when nothing is close.
        cause: why the two differ, and what to do about it, as far as that can be told; else "".
    """

    key: str
    candidate: str | None = None
    cause: str = ""


@dataclass(frozen=True)
class Different:
    """A key that both sides have, with another shape or dtype."""

    key: str
    wanted: KeyDescription
    stored: KeyDescription


@dataclass
class KeyDiff:
    """How a state dict and a checkpoint differ. True when they do; ``str()`` makes a report of it.

    Attributes:
        missing: keys of the state dict that the checkpoint lacks.
        unexpected: keys of the checkpoint that the state dict lacks.
        shapes: keys with different shapes, or that are a tensor on one side only.
        dtypes: keys with different dtypes.
    """

    missing: list[Unmatched] = field(default_factory=list)
    unexpected: list[Unmatched] = field(default_factory=list)
    shapes: list[Different] = field(default_factory=list)
    dtypes: list[Different] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)

    def __str__(self) -> str:
        return "\n".join(_report(self, "checkpoint")) or "no differences"


# ---- finding ----


def check_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Raises TypeError for top-level keys that are no str, and ValueError for a dict or list that contains itself."""
    for key in state_dict:
        if not isinstance(key, str):
            raise TypeError(f"the state dict has a key of type {type(key).__name__}, {key!r:.200}; keys must be str")
    on_path: set[int] = set()
    stack: list[tuple[int, str, Iterator[Any]]] = [(id(state_dict), "", iter(state_dict.items()))]
    on_path.add(id(state_dict))
    while stack:
        owner, path, rest = stack[-1]
        step, value = next(rest, ("", stack))
        if value is stack:
            stack.pop()
            on_path.discard(owner)
            continue
        if not isinstance(value, (Mapping, list, tuple)):
            continue
        here = f"{path}.{step}" if path else str(step)
        if id(value) in on_path:
            raise ValueError(f"the state dict contains itself, at {shown(here)!r}; DCP cannot flatten it")
        on_path.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        stack.append((id(value), here, iter(items)))


def diff_described(
    wanted: Mapping[str, KeyDescription],
    stored: Mapping[str, KeyDescription],
    cause: Callable[[str, str], str] | None = None,
) -> KeyDiff:
    """Compares by name; what has no counterpart gets the closest name of the other side that has none either.

    Args:
        wanted, stored: what the keys stand for.
        cause: says why a wanted and a stored name differ; None: as for a state dict and a checkpoint.
    """
    missing = [key for key in wanted if key not in stored]
    unexpected = [key for key in stored if key not in wanted]
    pairs = _closest(missing, unexpected)
    why = {key: (cause or _cause_of_load)(key, other) for key, other in pairs.items()}
    back = {other: key for key, other in pairs.items()}
    diff = KeyDiff(
        [Unmatched(key, pairs.get(key), why.get(key, "")) for key in missing],
        [Unmatched(key, back.get(key), why.get(back.get(key, ""), "")) for key in unexpected],
    )
    for key, want in wanted.items():
        there = stored.get(key)
        if there is not None and want.shape != there.shape:
            diff.shapes.append(Different(key, want, there))
        elif there is not None and want.dtype != there.dtype:
            diff.dtypes.append(Different(key, want, there))
    return diff


def _guess(names: list[str]) -> list[str]:
    """As key_map="normalize" would have them; the names themselves when two would become one."""
    try:
        return _C.guess_keys(names)[0]
    except ValueError:
        return names


def _bare_all(names: list[str]) -> list[str]:
    return [_bare(name) for name in _guess(names)]


def bare_forms() -> tuple[Callable[[list[str]], list[str]], ...]:
    """Ways to compare names without what wrappers put into them, the surest first."""
    return _guess, _bare_all


def paired(
    forms: Callable[[list[str]], list[str]], wanted: Iterable[str], others: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Names that are the same in some form of theirs as one other, and that is the only one; each other once."""
    wanted, others = list(wanted), list(others)
    owners: dict[str, list[str]] = defaultdict(list)
    for form, name in zip(forms(others), others, strict=True):
        owners[form].append(name)
    for form, name in zip(forms(wanted), wanted, strict=True):
        if len(owners.get(form, ())) == 1:
            yield name, owners.pop(form)[0]


def _closest(missing: Iterable[str], unexpected: Iterable[str]) -> dict[str, str]:
    """For missing names the unexpected one that is meant, the surest reasons first. Each name is used once."""
    left = dict.fromkeys(name for name in missing if len(name) <= _COMPARED_CHARACTERS)
    right = dict.fromkeys(name for name in unexpected if len(name) <= _COMPARED_CHARACTERS)
    pairs: dict[str, str] = {}

    def take(name: str, other: str) -> None:
        del left[name], right[other]
        pairs[name] = other

    for forms in bare_forms():
        for name, other in paired(forms, left, right):
            take(name, other)
    owners: dict[str, str | None] = {}
    for name in right:
        for suffix in _suffixes(name):
            owners[suffix] = None if suffix in owners else name
    for name in list(left):
        owner = next((owners[suffix] for suffix in _suffixes(name) if owners.get(suffix) in right), None)
        if owner is not None:
            take(name, owner)
    for name in list(left):
        if len(left) * len(right) > _FUZZY_PAIRS:
            break
        if close := difflib.get_close_matches(name, list(right), n=1, cutoff=0.75):
            take(name, close[0])
    return pairs


def _bare(name: str) -> str:
    """Without anything that might be a wrapper's."""
    name = _PARAMETRIZED.sub(r"\1\2", name)
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in ("module", "base_layer")), last])


def _suffixes(name: str) -> Iterator[str]:
    """The name, then what is left without its first components; not the last component alone, which says little."""
    parts = name.split(".")
    yield name
    for count in range(min(len(parts) - 1, _SUFFIX_PARTS), 1, -1):
        yield ".".join(parts[-count:])


# ---- why ----


def _why(a: str, b: str) -> tuple[str, str, bool]:
    """Why two names differ: "wrapper", "perhaps", "parametrized", "beginning" or "spelling".

    Returns:
        This, the model of the wrapper whose part one of the names has ("" for other reasons), and whether it is b.
    """
    for kind, certain in (("wrapper", True), ("perhaps", False)):
        for name, other, is_b in ((b, a, True), (a, b, False)):
            for part, wrapper in WRAPPER_PARTS.items():
                in_name, in_other = (text.split(".").count(part) for text in (name, other))
                if wrapper.model and wrapper.certain is certain and in_name > in_other:
                    return kind, wrapper.model, is_b
        if certain and (_PARAMETRIZED.search(a) or _PARAMETRIZED.search(b)):
            return "parametrized", "", False
    common = _common_suffix(a, b)
    return ("beginning" if "." in common or common in (a, b) else "spelling"), "", False


def _cause_of_load(missing: str, candidate: str) -> str:
    """Why a checkpoint has another name than the state dict, and the cure."""
    kind, model, is_stored = _why(missing, candidate)
    if model and not is_stored:
        perhaps = ", perhaps" if kind == "perhaps" else ""
        return f"the state dict is that of {model}{perhaps}; make it with dcpring.get_model_state_dict(model)"
    common = _common_suffix(missing, candidate)
    old, new = candidate.removesuffix(common), missing.removesuffix(common)
    cure = f"pass key_map={{'prefixes': {{{shown(old)!r}: {shown(new)!r}}}}}"
    if not old:
        cure = f"pass key_map=lambda name: {new!r} + name"
    return {
        "wrapper": f'saved from {model}; pass key_map="normalize"',
        "perhaps": f"saved from {model}, perhaps; {cure}",
        "parametrized": "parametrized on one side only; pass key_map= with both names",
        "beginning": f"only the beginning differs; {cure}",
        "spelling": "spelt differently",
    }[kind]


def cause_between_checkpoints(a: str, b: str) -> str:
    """Why two checkpoints have other names for one thing, probably, and the key map with which they have not."""
    kind, model, is_second = _why(a, b)
    common = _common_suffix(a, b)
    old, new = shown(a.removesuffix(common)), shown(b.removesuffix(common))
    cure = f'compare with the key map {{"prefixes": {{"{old}": "{new}"}}}}'
    saved = f"the {'second' if is_second else 'first'} was saved from {model}"
    return {
        "wrapper": f"{saved}; compare with the key map normalize",
        "perhaps": f"{saved}, perhaps; {cure}",
        "parametrized": "parametrized in one only; compare with a key map of both names",
        "beginning": f"only the beginning differs; {cure}",
        "spelling": "spelt differently",
    }[kind]


def _common_suffix(a: str, b: str) -> str:
    parts = []
    for mine, theirs in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if mine != theirs:
            break
        parts.append(mine)
    return ".".join(reversed(parts))


# ---- reporting ----


def shown(name: str) -> str:
    if len(name) <= _SHOWN_CHARACTERS:
        return name
    half = _SHOWN_CHARACTERS // 2
    return f"{name[:half]}...{name[-half:]} ({len(name)} characters)"


_NUMBER = re.compile(r"(?<![^.])(\d{1,18})(?![^.])")
"""A part of a name that is a number."""


def folded(rows: Iterable[tuple[str, ...]], names: int) -> Iterator[tuple[str, ...]]:
    """Rows whose names differ in numbers alone as one row, as "layers.0-31.weight" says that all of these are there.

    Args:
        rows: of cells, all of them texts.
        names: how many of the first cells are names; rows become one where all else is the same.

    Yields:
        Rows with one cell more: how many rows each stands for.
    """
    groups: dict[Any, list[tuple[int, ...]]] = {}
    for row in rows:
        split = [_NUMBER.split(cell) if len(cell) <= _COMPARED_CHARACTERS else [cell] for cell in row[:names]]
        texts = tuple(tuple(parts[::2]) for parts in split)
        numbers = tuple(int(number) for parts in split for number in parts[1::2])
        groups.setdefault((texts, row[names:]), []).append(numbers)
    for (texts, others), members in groups.items():
        for spans, count in _grids(members):
            rest = iter(spans)
            shown = [first + "".join(f"{next(rest)}{text}" for text in more) for first, *more in texts]
            yield (*shown, *others, f"{count:,}")


def _grids(members: Sequence[tuple[int, ...]]) -> Iterator[tuple[list[str], int]]:
    """Rows of numbers as spans of each column, of which all combinations are there, and how many rows these are."""
    columns = list(zip(*members, strict=True))
    varying = list(dict.fromkeys(column for column in columns if len(set(column)) > 1))  # equal ones count once
    if len(varying) > _MOST_NUMBERS:
        yield from (([*map(str, member)], 1) for member in members)
    elif math.prod(len(set(column)) for column in varying) == len(set(members)):
        yield [_spans(sorted(set(column))) for column in columns], len(members)
    else:
        groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for number, member in zip(varying[0], members, strict=True):
            groups[number].append(member)
        for group in groups.values():
            yield from _grids(group)


def _spans(numbers: Sequence[int]) -> str:
    runs = ranges(numbers, ",").split(",")
    return ",".join(runs if len(runs) <= _MOST_LISTED else [*runs[:_MOST_LISTED], "...", runs[-1]])


def compressed(keys: Sequence[str]) -> str:
    """The keys on one line, those that differ in one number as "layers.0-31.weight"; of many the first."""
    return some(_patterns(keys), _MOST_LISTED)


def _listed(lines: Sequence[str]) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - _MOST_LISTED
    return [*lines[:_MOST_LISTED], f"and {more} more"] if more > 0 else list(lines)


def _patterns(keys: Iterable[str]) -> list[str]:
    return [repr(shown(name)) for name, _ in folded(((key,) for key in keys), 1)]


def _unmatched_lines(items: list[Unmatched], other: str) -> Iterator[str]:
    """All keys of a cause together; causes name the two beginnings, so that such keys belong together."""
    groups: dict[tuple[str, bool], list[Unmatched]] = defaultdict(list)
    for item in items:
        groups[item.cause, item.candidate is not None].append(item)
    for (cause, _), members in groups.items():
        keys = _patterns([item.key for item in members])
        candidates = _patterns([item.candidate for item in members if item.candidate is not None])
        if len(keys) <= _MOST_ON_A_LINE:
            line = f"  {', '.join(keys)}" + (f"; {other} has {', '.join(candidates)}" if candidates else "")
            yield f"{line}: {cause}" if cause else line
            continue
        yield f"  {cause or 'for no known reason'} ({len(members)}):"
        yield from (f"    {name}" for name in _listed(keys))
        if candidates:
            yield f"  {other} has:"
            yield from (f"    {name}" for name in _listed(candidates))


def _report(diff: KeyDiff, store: str) -> Iterator[str]:
    if diff.missing:
        yield f"missing from the {store} ({len(diff.missing)}):"
        yield from _unmatched_lines(diff.missing, f"the {store}")
    left = [item for item in diff.unexpected if item.candidate is None]
    paired = len(diff.unexpected) - len(left)
    if diff.unexpected:
        note = f", {paired} of them candidates above" if paired and diff.missing else ""
        yield f"unexpected in the {store} ({len(diff.unexpected)}{note}):"
        names = _patterns([item.key for item in diff.unexpected])
        if len(names) > _MOST_ON_A_LINE and diff.missing:
            names = _patterns([item.key for item in left])
        if len(names) <= _MOST_ON_A_LINE:
            names = [", ".join(names)] if names else []
        yield from (f"  {name}" for name in _listed(names))
    for title, items in (("shapes", diff.shapes), ("dtypes", diff.dtypes)):
        if items:
            yield f"different {title} ({len(items)}):"
            lines = [
                f"{shown(item.key)!r}: the state dict has {item.wanted}, the {store} {item.stored}" for item in items
            ]
            yield from (f"  {line}" for line in _listed(lines))


def describe_names(missing: Sequence[str], unexpected: Sequence[str], store: str = "state dict") -> str:
    """A report where only names are known: ``missing`` from the store, and ``unexpected`` in it."""
    nothing = KeyDescription(None, None)
    diff = diff_described(dict.fromkeys(missing, nothing), dict.fromkeys(unexpected, nothing))
    return "\n".join(_report(diff, store))
