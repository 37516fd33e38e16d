"""What a load does about keys, shapes and dtypes that do not match."""

from __future__ import annotations

import fnmatch
import logging
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.tensor import DTensor

from dcpring.base.arguments import strings
from dcpring.base.casts import Loss, loss
from dcpring.base.memory import memory_key
from dcpring.errors import KeyMismatchError
from dcpring.names.diff import (
    KeyDescription,
    KeyDiff,
    bare_forms,
    check_state_dict,
    compressed,
    diff_described,
    paired,
)
from dcpring.names.key_map import KeyMap
from dcpring.torchside.dcp import flatten_state_dict
from dcpring.torchside.tensors import PLAIN_TYPES, global_size, is_whole, local_tensor

logger = logging.getLogger("dcpring")

Missing = Literal["error", "warn", "allow"]
Unexpected = Literal["error", "warn", "log", "ignore"]
Casts = Literal["round", "any", "never"]

_LEVELS: dict[Unexpected, int] = {"log": logging.INFO, "warn": logging.WARNING}


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def checked_casts(casts: Casts | Literal["safe"]) -> Casts:
    """The option of that name, with what it was called before."""
    if casts != "safe":
        return casts
    warnings.warn('casts="safe" is called casts="round" now', DeprecationWarning, stacklevel=3)
    return "round"


def refused_cast(casts: Casts, stored: torch.dtype, wanted: torch.dtype) -> str:
    """Why a cast is not allowed, with the cure; "" where it is."""
    if stored == wanted or casts == "any":
        return ""
    text = f"the checkpoint has {stored}, the state dict {wanted}"
    if casts == "never":
        return f'{text}, and casts="never"'
    if loss(stored, wanted) is not Loss.RANGE:
        return ""
    return (
        f"{text}, and that cast can lose values; load into a {stored} tensor and convert it, or allow such casts: "
        'RingReader(..., casts="any"), or reader_options={"casts": "any"}'
    )


@dataclass(frozen=True)
class LoadPolicy:
    """What to do about what does not match.

    Args:
        missing: keys of the state dict that the checkpoint lacks: "error", "warn", or "allow".
        allow_missing: shell patterns (``fnmatch``) of keys that may be missing whatever ``missing`` says.
        unexpected: keys of the checkpoint that the state dict lacks: "error", "warn", "log" (at INFO), or "ignore".
        casts: "round", "any" or "never"; see ``RingReader``.
    """

    missing: Missing = "error"
    allow_missing: str | Sequence[str] = ()
    unexpected: Unexpected = "log"
    casts: Casts = "round"

    def __post_init__(self) -> None:
        _check_choice("missing", self.missing, ("error", "warn", "allow"))
        _check_choice("unexpected", self.unexpected, ("error", "warn", "log", "ignore"))
        _check_choice("casts", self.casts, ("round", "any", "never"))
        object.__setattr__(self, "allow_missing", strings(self.allow_missing, "allow_missing"))

    @property
    def looks_at_unexpected(self) -> bool:
        """Whether anybody will see what is said about unexpected keys."""
        return self.unexpected == "error" or (
            self.unexpected != "ignore" and logger.isEnabledFor(_LEVELS[self.unexpected])
        )

    def report_unexpected(
        self, planner: LoadPlanner, metadata: Metadata, rank: int, made_of: Container[str] = ()
    ) -> None:
        """Reports keys that a planner does not ask for, where it can be seen what it does.

        Args:
            made_of: keys that others are made of, for which nobody need ask.
        """
        wanted = getattr(planner, "state_dict", None)
        if isinstance(wanted, Mapping) and self.looks_at_unexpected:
            left = [key for key in metadata.state_dict_metadata if key not in wanted and key not in made_of]
            self.report(left, rank)

    def report(self, unexpected: Sequence[str], rank: int) -> None:
        """Does what the policy says about unexpected keys. Raises KeyMismatchError when that is an error."""
        if not unexpected or not self.looks_at_unexpected:
            return
        text = f"rank {rank}: unexpected in the checkpoint ({len(unexpected)}): {compressed(unexpected)}"
        if self.unexpected == "error":
            raise KeyMismatchError(f'{text}; to load the rest, pass unexpected="log"')
        logger.log(_LEVELS[self.unexpected], "%s", text)

    def check(self, wanted: Mapping[str, Any], metadata: Metadata, rank: int) -> None:
        """Compares a flat state dict with a checkpoint, and does what the policy says about all differences at once.

        Raises:
            KeyMismatchError: everything that is missing, unexpected or of another shape on this rank.
        """
        diff = diff_described(
            {key: describe_value(value) for key, value in wanted.items()}, describe_metadata(metadata)
        )
        fatal_keys = set(self.not_allowed([item.key for item in diff.missing], wanted))
        diff.missing = [item for item in diff.missing if item.key in fatal_keys]
        dtypes, diff.dtypes = diff.dtypes, []
        fatal = KeyDiff(
            diff.missing if self.missing == "error" else [],
            diff.unexpected if self.unexpected == "error" else [],
            diff.shapes,
        )
        if fatal:
            shown = replace(fatal, unexpected=diff.unexpected, dtypes=dtypes)
            words = _words_of_stock(fatal, wanted, metadata)
            raise KeyMismatchError(f"rank {rank}: the checkpoint does not fit the state dict:\n{shown}\n{words}")
        if diff.missing and self.missing == "warn":
            logger.warning("rank %d: these stay as they are:\n%s", rank, KeyDiff(diff.missing))
        self.report([item.key for item in diff.unexpected], rank)

    def not_allowed(self, missing: Sequence[str], wanted: Mapping[str, Any]) -> list[str]:
        """The missing keys that no pattern lets be missing, and that are not tied to keys that are there."""
        tied = _tied_to_others(wanted, set(missing))
        return [key for key in missing if key not in tied and not self.may_miss(key)]

    def may_miss(self, key: str) -> bool:
        """Whether a pattern lets a key be missing."""
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.allow_missing)


def _words_of_stock(diff: KeyDiff, wanted: Mapping[str, Any], metadata: Metadata) -> str:
    """What stock says of the first key that is missing, and of the first that does not fit: programs look for it."""
    words = [f"Missing key in checkpoint state_dict: {item.key}." for item in diff.missing[:1]]
    for item in diff.shapes[:1]:
        entry, value = metadata.state_dict_metadata[item.key], wanted[item.key]
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata):
            words.append(f"Size mismatch between saved {entry.size} and current: {value.size()} for {item.key}")
        elif isinstance(entry, TensorStorageMetadata):
            kind = f"expected BytesStorageMetadata but found {type(entry)}"
            words.append(f"Invalid checkpoint metadata for {item.key}, {kind}")
    return "\n".join(words)


def _memory_of(value: Any) -> tuple[Any, ...] | None:
    local = local_tensor(value) if isinstance(value, DTensor) else value
    is_part = type(local) in PLAIN_TYPES and not is_whole(local)
    if not isinstance(local, Tensor) or is_part or local.numel() == 0 or local.device.type == "meta":
        return None
    try:
        key = memory_key(local)
    except RuntimeError:  # no memory of its own
        return None
    return key if key[0] else None


def _tied_to_others(wanted: Mapping[str, Any], missing: set[str]) -> set[str]:
    """Keys that are missing, but are the same memory as ones that are there: loading those loads them."""
    if not missing:
        return set()
    there = {_memory_of(value) for key, value in wanted.items() if key not in missing} - {None}
    return {key for key in missing if _memory_of(wanted[key]) in there}


# ---- what keys stand for ----


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


# ---- names that a key map finds ----


def match_names(key_map: KeyMap, wanted: list[str], stored: list[str]) -> dict[str, str]:
    """What each stored key is called in the state dict.

    A stored key that is wanted under its own name keeps it, with ``"normalize"``; else the normalised names are
    compared, and of those left over what is equal, and the only one, without anything that might be a wrapper's.
    """
    if key_map.given != "normalize":
        return key_map.rename(stored)
    present = set(stored)
    names = {name: name for name in stored}
    open_wanted = [name for name in wanted if name not in present]
    taken = set(wanted) & present
    for forms in bare_forms():
        left = [name for name in stored if name not in taken and names[name] == name]
        found = dict(paired(forms, open_wanted, left))
        names |= {other: name for name, other in found.items()}
        open_wanted = [name for name in open_wanted if name not in found]
    return names
