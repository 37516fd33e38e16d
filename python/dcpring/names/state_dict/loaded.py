"""An optimizer's state dict that is to be loaded, looked up by names."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

from dcpring.torchside.optim import GROUPS, PARAMS, STATE


class LoadedState:
    """An optimizer state dict that was given, nested or flattened, with a lookup for each thing that is in it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self.nested = STATE in given
        self.groups: list[dict[str, Any]] = list(given.get(GROUPS, [])) if self.nested else []
        self._group_of = {name: index for index, group in enumerate(self.groups) for name in group[PARAMS]}
        self._sorted: list[str] | None = None

    @property
    def by_number(self) -> bool:
        """Whether parameters are numbered, as in ``optimizer.state_dict()``: nothing to rename then."""
        if not self.nested:
            return False
        names = [*self._given[STATE], *(name for group in self.groups for name in group[PARAMS])]
        return bool(names) and all(isinstance(name, int) for name in names)

    def group_of(self, name: str) -> int | None:
        return self._group_of.get(name)

    def has(self, name: str, options: Iterable[str]) -> bool:
        """Whether the parameter is in there by this name."""
        if self.nested:
            return name in self._group_of or name in self._given[STATE]
        return any(f"{GROUPS}.{name}.{option}" in self._given for option in options)

    def option(self, name: str, option: str) -> tuple[bool, Any]:
        key = f"{GROUPS}.{name}.{option}"
        return key in self._given, self._given.get(key)

    def state(self, name: str, parts: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, list[str]]:
        """The state of a parameter, None when there is none, and the keys that are missing of it.

        Args:
            name: the parameter's.
            parts: what its state should have; None where that is not known.
        """
        if self.nested:
            found = self._given[STATE].get(name)
            if found is None:
                return None, [f"{STATE}.{name}"] if parts else []
            return found, [f"{STATE}.{name}.{part}" for part in parts or () if part not in found]
        if parts is None:
            return self._below(f"{STATE}.{name}") or None, []
        state: dict[str, Any] = {}
        missing = []
        for part in parts:
            key = f"{STATE}.{name}.{part}"
            if key in self._given:
                state[part] = self._given[key]
            elif nested := self._below(key):
                state[part] = nested
            else:
                missing.append(key)
        return state, missing

    def _below(self, key: str) -> dict[str, Any]:
        """The nested dict (Shampoo's, say) that was flattened under a key."""
        if self._sorted is None:
            self._sorted = sorted(self._given)
        prefix = key + "."
        found: dict[str, Any] = {}
        for index in range(bisect.bisect_left(self._sorted, prefix), len(self._sorted)):
            if not self._sorted[index].startswith(prefix):
                break
            *path, last = self._sorted[index].removeprefix(prefix).split(".")
            inner = found
            for step in path:
                inner = inner.setdefault(step, {})
            inner[last] = self._given[self._sorted[index]]
        return found
