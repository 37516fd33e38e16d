"""What the Checkpointer saves and loads with: DCP, the planners, and the state dicts of models and optimizers."""

from __future__ import annotations

from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpring.names.state_dict.by_name import (
    has_flat_parameters,
    load_named_optimizer_state,
    named_optimizer_state,
    named_parameters,
)
from dcpring.names.state_dict.interface import get_model_state_dict, set_model_state_dict
from dcpring.names.state_dict.optimizers import is_numbered
from dcpring.names.state_dict.set_optimizers import same_value
from dcpring.plan.load_planner import RingLoadPlanner as LoadPlanner
from dcpring.plan.replicas import fingerprints, is_hashed
from dcpring.plan.save_planner import RingSavePlanner as SavePlanner
from dcpring.torchside.dcp import load, save

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "StateDictOptions",
    "fingerprints",
    "get_model_state_dict",
    "has_flat_parameters",
    "is_hashed",
    "is_numbered",
    "load",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "named_parameters",
    "same_value",
    "save",
    "set_model_state_dict",
]
