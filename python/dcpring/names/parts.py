"""A model of which a process has several parts, each a module with some of the layers, under the whole model's names.

So has a rank of a pipeline whose schedule is interleaved. The parts are the caller's, and are not changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dcpring.names.wrapping import model_keys
from dcpring.torchside.modules import add_metadata, copy_metadata
from dcpring.torchside.state_dict import IncompatibleKeys

__all__ = ["ModelParts"]


class ModelParts(nn.Module):
    """Several modules as one, whose state dict has all of their names, without any of its own.

    Args:
        parts: modules; no two of them have a tensor of the same name.

    Raises:
        ValueError: two of them do; the message has the name.
        TypeError: a part is FSDP1, which names its optimizer's state by the module at the top.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        owner: dict[str, int] = {}
        for number, part in enumerate(parts):
            if any(isinstance(module, FullyShardedDataParallel) for module in part.modules()):
                raise TypeError(f"part {number} of the model has FullyShardedDataParallel in it; use fully_shard")
            for name in model_keys(part).names:
                if owner.setdefault(name, number) != number:
                    raise ValueError(
                        f"parts {owner[name]} and {number} of the model both have {name!r}; cut the parts out of the "
                        "whole model, so that each layer keeps the name that it has there"
                    )
            self.add_module(str(number), part)

    @property
    def parts(self) -> list[nn.Module]:
        return list(self.children())

    def _fqn_modifiers(self) -> dict[str, str]:
        """For ``wrapping``, as DCP has it: the children whose names are in no name of a tensor."""
        return {str(number): str(number) for number in range(len(self.parts))}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state: OrderedDict[str, Any] = OrderedDict()
        for part in self.parts:
            own = part.state_dict(*args, **kwargs)
            state.update(own)
            add_metadata(own, state)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Gives each part what is its own."""
        missing: list[str] = []
        unexpected = list(state_dict)
        for part in self.parts:
            own: OrderedDict[str, Any] = OrderedDict()
            own.update((name, state_dict[name]) for name in part.state_dict() if name in state_dict)
            copy_metadata(state_dict, own)
            result = part.load_state_dict(own, strict=strict, assign=assign)
            missing += result.missing_keys
            unexpected = [*(name for name in unexpected if name not in own), *result.unexpected_keys]
        if strict and unexpected:
            raise RuntimeError(f"no part of the model has {', '.join(map(repr, unexpected))}")
        return IncompatibleKeys(missing, unexpected)
