"""What the Checkpointer takes from DCP: planners, and state dicts of models and optimizers. The place to swap them."""

from __future__ import annotations

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dcpring.load_planner import RingLoadPlanner as LoadPlanner
from dcpring.planner import RingSavePlanner as SavePlanner

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
]
