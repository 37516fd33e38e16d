"""What differs between the names that are wanted and those that are there, and why, probably."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcpring import _C
from dcpring.base.text import ranges, some
from dcpring.torchside.dcp import flatten_state_dict
from dcpring.torchside.tensors import global_size

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

WRAPPER_PARTS = {
    "_orig_mod": "a compiled module",
    "_fsdp_wrapped_module": "an FSDP1 module, outside of its state_dict_type",
    "_checkpoint_wrapped_module": "the parameters of an activation-checkpoint wrapper",
}
PERHAPS_PARTS = {"module": "DDP or AveragedModel", "base_layer": "an adapter (LoRA)"}
PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original$")


class KeyDescription(NamedTuple):
    """What a key stands for.

    Attributes:
        shape: of a tensor, None for anything else.
        dtype: of a tensor, None for anything else.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None

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


def describe_state_dict(state_dict: Mapping[str, Any]) -> dict[str, KeyDescription]:
    """The keys of a state dict as DCP flattens it.

    Raises:
        TypeError: a key is not a str.
        ValueError: the state dict contains itself.
    """
    check_state_dict(state_dict)
    flat, _ = flatten_state_dict(dict(state_dict))
    return {key: describe_value(value) for key, value in flat.items()}


def describe_metadata(metadata: Metadata) -> dict[str, KeyDescription]:
    """The keys of a checkpoint."""
    return {key: _describe_metadata(entry) for key, entry in metadata.state_dict_metadata.items()}


def describe_value(value: Any) -> KeyDescription:
    """Of anything with a shape and a dtype; DTensor and ShardedTensor count as a whole."""
    if hasattr(value, "size") and callable(value.size) and isinstance(getattr(value, "dtype", None), torch.dtype):
        return KeyDescription(tuple(global_size(value)), value.dtype)
    return KeyDescription(None, None)


def _describe_metadata(entry: Any) -> KeyDescription:
    if isinstance(entry, TensorStorageMetadata):
        return KeyDescription(tuple(entry.size), entry.properties.dtype)
    return KeyDescription(None, None)


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
    pairs = _Matcher(missing, unexpected, cause or _cause).pairs()
    back: dict[str, tuple[str | None, str]] = {there: (key, cause) for key, (there, cause) in pairs.items()}
    nothing: tuple[str | None, str] = (None, "")
    diff = KeyDiff(
        [Unmatched(key, *pairs.get(key, nothing)) for key in missing],
        [Unmatched(key, *back.get(key, nothing)) for key in unexpected],
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


class _Matcher:
    """Pairs missing and unexpected names, the surest reasons first; each name is used once."""

    def __init__(self, missing: list[str], unexpected: list[str], cause: Callable[[str, str], str]) -> None:
        self._cause = cause
        self._missing = dict.fromkeys(name for name in missing if len(name) <= _COMPARED_CHARACTERS)
        self._unexpected = dict.fromkeys(name for name in unexpected if len(name) <= _COMPARED_CHARACTERS)
        self._pairs: dict[str, tuple[str, str]] = {}

    def pairs(self) -> dict[str, tuple[str, str]]:
        """For each missing name that has one, its candidate and the cause."""
        for forms in bare_forms():
            for name, other in paired(forms, self._missing, self._unexpected):
                self._take(name, other)
        self._match_suffixes()
        self._match_spelling()
        return self._pairs

    def _take(self, missing: str, candidate: str) -> None:
        del self._missing[missing], self._unexpected[candidate]
        self._pairs[missing] = (candidate, self._cause(missing, candidate))

    def _match_suffixes(self) -> None:
        owners: dict[str, str | None] = {}
        for name in self._unexpected:
            for suffix in _suffixes(name):
                owners[suffix] = None if suffix in owners else name
        for name in list(self._missing):
            for suffix in _suffixes(name):
                if (owner := owners.get(suffix)) is not None and owner in self._unexpected:
                    self._take(name, owner)
                    break

    def _match_spelling(self) -> None:
        for name in list(self._missing):
            if len(self._missing) * len(self._unexpected) > _FUZZY_PAIRS:
                return
            if close := difflib.get_close_matches(name, list(self._unexpected), n=1, cutoff=0.75):
                self._take(name, close[0])


def _bare(name: str) -> str:
    """Without anything that might be a wrapper's."""
    name = PARAMETRIZED.sub(r"\1\2", name)
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in PERHAPS_PARTS), last])


def _suffixes(name: str) -> Iterator[str]:
    """The name, then what is left without its first components; not the last component alone, which says little."""
    parts = name.split(".")
    yield name
    for count in range(min(len(parts) - 1, _SUFFIX_PARTS), 1, -1):
        yield ".".join(parts[-count:])


def only_in(name: str, other: str, parts: Iterable[str]) -> str | None:
    mine, theirs = name.split("."), other.split(".")
    return next((part for part in parts if mine.count(part) > theirs.count(part)), None)


def _cause(missing: str, candidate: str) -> str:
    if part := only_in(candidate, missing, WRAPPER_PARTS):
        return f'saved from {WRAPPER_PARTS[part]}; pass key_map="normalize"'
    if part := only_in(missing, candidate, WRAPPER_PARTS):
        return f"the state dict is that of {WRAPPER_PARTS[part]}; make it with dcpring.get_model_state_dict(model)"
    if PARAMETRIZED.search(candidate) or PARAMETRIZED.search(missing):
        return "parametrized on one side only; pass key_map= with both names"
    if part := only_in(candidate, missing, PERHAPS_PARTS):
        return f"saved from {PERHAPS_PARTS[part]}, perhaps; {_prefix_cure(missing, candidate)}"
    if part := only_in(missing, candidate, PERHAPS_PARTS):
        return (
            f"the state dict is that of {PERHAPS_PARTS[part]}, perhaps; make it with "
            "dcpring.get_model_state_dict(model)"
        )
    common = common_suffix(missing, candidate)
    if "." in common or common in (missing, candidate):
        return f"only the beginning differs; {_prefix_cure(missing, candidate)}"
    return "spelt differently"


def common_suffix(a: str, b: str) -> str:
    parts = []
    for mine, theirs in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if mine != theirs:
            break
        parts.append(mine)
    return ".".join(reversed(parts))


def _prefix_cure(missing: str, candidate: str) -> str:
    common = common_suffix(missing, candidate)
    old, new = candidate.removesuffix(common), missing.removesuffix(common)
    if not old:
        return f"pass key_map=lambda name: {new!r} + name"
    return f"pass key_map={{'prefixes': {{{shown(old)!r}: {shown(new)!r}}}}}"


# ---- reporting ----


def shown(name: str) -> str:
    if len(name) <= _SHOWN_CHARACTERS:
        return name
    half = _SHOWN_CHARACTERS // 2
    return f"{name[:half]}...{name[-half:]} ({len(name)} characters)"


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def compressed(keys: Sequence[str]) -> str:
    """The keys on one line, those that differ in one number as "layers.0-31.weight"; of many the first."""
    return some(_patterns(keys), _MOST_LISTED)


def _listed(lines: Sequence[str]) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - _MOST_LISTED
    return [*lines[:_MOST_LISTED], f"and {more} more"] if more > 0 else list(lines)


def _patterns(keys: Sequence[str]) -> list[str]:
    groups: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for key in keys:
        numbers = [int(number) for number in _NUMBER.findall(key)] if len(key) <= _COMPARED_CHARACTERS else []
        groups[_NUMBER.sub("*", key) if numbers else key].append((key, numbers))
    return [text for members in groups.values() for text in _compressed_group(members)]


def _compressed_group(members: list[tuple[str, list[int]]]) -> list[str]:
    columns = list(zip(*(numbers for _, numbers in members), strict=True))
    varying = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    if len(members) == 1 or len(varying) != 1:
        return [repr(shown(key)) for key, _ in members]
    runs = ranges(sorted(set(columns[varying[0]])), ",").split(",")
    spans = ",".join(runs if len(runs) <= _MOST_LISTED else [*runs[:_MOST_LISTED], "...", runs[-1]])
    counter = iter(range(len(columns)))
    text = _NUMBER.sub(lambda match: spans if next(counter) == varying[0] else match[0], members[0][0])
    return [repr(text)]


def unmatched_lines(items: list[Unmatched], other: str) -> Iterator[str]:
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
        yield from unmatched_lines(diff.missing, f"the {store}")
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
