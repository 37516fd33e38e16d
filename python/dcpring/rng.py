"""Random number generators as a component: each rank's own, exact on the same number of ranks, else derived."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dcpring import _tree
from dcpring._stored import Stored
from dcpring.components import Component, PerRank, Place, Plan
from dcpring.errors import CheckpointError

__all__ = ["RNG"]

logger = logging.getLogger("dcpring")

_SEED_BYTES = 8
_NUMPY_SEEDS = 1 << 32


class RNG(PerRank):
    """The states of torch's CPU generator, the current accelerator's, Python's and (where imported) NumPy's.

    On the number of ranks that saved, every rank goes on with exactly its numbers. On another, each is seeded anew from
    the seed that was saved, what the generators had come to, and its rank; ``derived`` says so, and is saved too.

    Args:
        seed: of the training, for the record and for deriving others; default: ``torch.initial_seed()``.

    Attributes:
        derived: one entry for each time that seeds were derived: ``{"from": ranks, "to": ranks}``.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(self, reshard=self._derive)
        self.seed = torch.initial_seed() if seed is None else seed
        self.derived: list[dict[str, int]] = []

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "seed": self.seed,
            "derived": list(self.derived),
            "cpu": torch.get_rng_state(),
            "python": _python_state(),
        }
        if "numpy" in sys.modules:
            state["numpy"] = _numpy_state()
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.accelerator.is_available():
            state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
        return state

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        return {**super().entry(notes), "seed": self.seed, "derived": self.derived}

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        plan = super().plan(name, stored, place)
        if plan.resharded:
            plan.change += ", new seeds derived from the one that was saved"
        return plan

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        state = super().prepare(name, stored, target, place)
        if not isinstance(state, dict) or not {"seed", "derived"} <= state.keys():
            raise CheckpointError("it was not saved from an RNG")
        return state

    def _derive(self, states: list[Any], old_world: int, new_world: int, rank: int) -> dict[str, Any]:
        first = states[0]
        text = f"{first['seed']} {_tree.digest(first)} {old_world} {new_world} {rank}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_SEED_BYTES).digest(), "little")
        derived = [*first["derived"], {"from": old_world, "to": new_world}]
        return {"seed": first["seed"], "derived": derived, "new_seed": number}

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        self.seed, self.derived = state["seed"], list(state["derived"])
        if "new_seed" in state:
            _seed_all(state["new_seed"])
            return
        torch.set_rng_state(state["cpu"])
        _set_python_state(state["python"])
        if "numpy" in state and "numpy" in sys.modules:
            _set_numpy_state(state["numpy"])
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type in state:
            torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])
        elif accelerator is not None:
            logger.warning("the checkpoint has no state of a %s generator: that goes on as it is", accelerator.type)


def _seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % _NUMPY_SEEDS)


def _python_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    return {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}


def _set_python_state(state: dict[str, Any]) -> None:
    random.setstate((state["version"], tuple(state["numbers"].tolist()), state["gauss"]))


def _numpy_state() -> dict[str, Any]:
    name, numbers, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
    return {
        "name": name,
        "numbers": torch.tensor(numbers.tolist()),
        "position": position,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


def _set_numpy_state(state: dict[str, Any]) -> None:
    numbers = state["numbers"].tolist()
    sys.modules["numpy"].random.set_state(
        (state["name"], numbers, state["position"], state["has_gauss"], state["gauss"])
    )
