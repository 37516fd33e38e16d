"""Random number generators as a component: each rank's own, exact on the same number of ranks, else derived."""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dcpring.base import random_states
from dcpring.errors import CheckpointError
from dcpring.resume import trees
from dcpring.resume.components import AS_SAVED, Component, ComponentPlan, Member, Remarks, SaveCheck
from dcpring.resume.manifest import Stored
from dcpring.resume.whole import PerRank

__all__ = ["RNG"]

_SEED_BYTES = 8
_NUMPY_SEEDS = 1 << 32
_NO_DEVICES = {"seed", "derived", "cpu", "python", "numpy"}
"""What a state holds besides the generators of accelerators."""


class RNG(PerRank):
    """The states of torch's CPU generator, the current accelerator's, Python's and (where imported) NumPy's.

    On the number of ranks that saved, every rank goes on with exactly its numbers. On another, each is seeded anew from
    the seed that was saved, what the generators had come to, and its rank; ``derived`` says so, and is saved too.

    Args:
        seed: of the training, for the record and for deriving others; default: ``torch.initial_seed()``.

    Attributes:
        derived: one entry for each time that seeds were derived: ``{"from": ranks, "to": ranks}``.
    """

    goes_last = True

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(self, reshard=self._derive)
        self.seed = torch.initial_seed() if seed is None else seed
        self.derived: list[dict[str, int]] = []

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "seed": self.seed,
            "derived": list(self.derived),
            "cpu": torch.get_rng_state(),
            "python": random_states.python_state(),
        }
        if "numpy" in sys.modules:
            state["numpy"] = random_states.numpy_state()
        device = random_states.accelerator()
        if device is not None:
            state[device.type] = torch.get_device_module(device).get_rng_state()
        return state

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        check = super().check(state, notes, member)
        check.entry |= {"seed": self.seed, "derived": self.derived}
        return check

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        plan = super().plan(name, stored, member)
        plan.change = f"{plan.change}, new seeds derived from the one that was saved" if plan.resharded else AS_SAVED
        rebuild = plan.rebuild
        assert rebuild is not None
        plan.rebuild = lambda read: _checked(rebuild(read))
        return plan

    def _derive(self, states: list[Any], old_world: int, new_world: int, rank: int) -> dict[str, Any]:
        first = states[0]
        text = f"{first['seed']} {trees.digest(first)} {old_world} {new_world} {rank}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_SEED_BYTES).digest(), "little")
        derived = [*first["derived"], {"from": old_world, "to": new_world}]
        return {"seed": first["seed"], "derived": derived, "new_seed": number}

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        left_out = self.load_state_dict(ready)
        return lambda: left_out

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Sets the generators; says which of them go on as they are, as only one side has them."""
        self.seed, self.derived = state["seed"], list(state["derived"])
        if "new_seed" in state:
            _seed_all(state["new_seed"])
            return []
        torch.set_rng_state(state["cpu"])
        random_states.set_python_state(state["python"])
        return [*self._apply_numpy(state), *self._apply_devices(state)]

    def _apply_numpy(self, state: dict[str, Any]) -> list[str]:
        if "numpy" not in state:
            return ["the checkpoint has no state of NumPy's, which goes on as it is"] if "numpy" in sys.modules else []
        try:
            importlib.import_module("numpy")  # a script may come to it after the load
        except ImportError:
            return ["NumPy's is left out, as it is not installed"]
        random_states.set_numpy_state(state["numpy"])
        return []

    def _apply_devices(self, state: dict[str, Any]) -> list[str]:
        device = random_states.accelerator()
        own = device.type if device is not None else ""
        if device is not None and own in state:
            torch.get_device_module(device).set_rng_state(state[own])
        others = sorted(state.keys() - {own, *_NO_DEVICES})
        left = [f"that of a {kind} generator is left out, as there is none here" for kind in others]
        if own and own not in state:
            left.append(f"the checkpoint has no state of a {own} generator, which goes on as it is")
        return left


def _checked(state: Any) -> Any:
    if not isinstance(state, dict) or not {"seed", "derived"} <= state.keys():
        raise CheckpointError("it was not saved from an RNG")
    return state


def _seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % _NUMPY_SEEDS)
