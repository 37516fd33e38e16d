"""The configuration of a model of transformers beside its weights, as ``save_pretrained`` writes it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dcpring.names.wrapping import wrapper_of
from dcpring.torchside.modules import class_before_fsdp


def write_configs(model: nn.Module, path: Path, dtype: torch.dtype | None) -> None:
    """Writes ``config.json``, ``generation_config.json`` and a custom model's code; nothing where there is no config.

    The model's own configuration stays as it is, while ``save_pretrained`` changes it.

    Args:
        model: as it is trained, in any wrapper.
        path: the directory of the weights.
        dtype: in which the weights are stored there; None: as the configuration says.
    """
    own: Any = model
    while wrapper := wrapper_of(own):
        own = getattr(own, wrapper.attribute)
    if not hasattr(getattr(own, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(own.config)
    kind = class_before_fsdp(own)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [kind.__name__]
    custom: Any = sys.modules.get("transformers.dynamic_module_utils")
    if custom is not None and hasattr(own, "is_remote_code") and own.is_remote_code():
        custom.custom_object_save(kind.__new__(kind), path, config=config)
    config.save_pretrained(path)
    generation: Any = getattr(own, "generation_config", None)
    if hasattr(generation, "save_pretrained") and (not hasattr(own, "can_generate") or own.can_generate()):
        generation.save_pretrained(path)
