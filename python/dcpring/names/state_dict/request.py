"""One call on a state dict: the model, its names, and the options."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcpring.base.collector import collection_paused
from dcpring.names.wrapping import model_keys
from dcpring.torchside import state_dict as stock


class Request:
    """One call: the model, its names, and the options, as stock's helpers want them (``info``)."""

    def __init__(self, model: nn.Module, options: StateDictOptions | None) -> None:
        options = options or StateDictOptions()
        if options.broadcast_from_rank0 and not options.full_state_dict:
            raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True.")
        self.model = model
        self.keys = model_keys(model, options.dsd_fqn_modifiers)
        fsdp_modules: list[nn.Module] = list(FSDP.fsdp_modules(model))
        self.info = stock.StateDictInfo(**vars(options), fsdp_modules=fsdp_modules)
        if fsdp_modules:
            self.info.fsdp_context = functools.partial(_fsdp_state_dict_type, model, options)

    def with_options(self, **changes: Any) -> Request:
        other = object.__new__(Request)
        other.model, other.keys, other.info = self.model, self.keys, replace(self.info, **changes)
        return other

    @property
    def has_everything(self) -> bool:
        """Whether this rank's dicts are complete: with broadcast_from_rank0 only those of rank 0 are."""
        return not self.info.broadcast_from_rank0 or dist.get_rank() == 0


@contextlib.contextmanager
def requested(model: nn.Module, options: StateDictOptions | None) -> Iterator[Request]:
    """A call, around all that is done for it: names are many objects, for which garbage is not collected in between.

    Where tensors are gathered or sent, or copied to the host, that is waited for, and the collector is left alone.
    """
    with collection_paused():
        request = Request(model, options)
        info = request.info
        waits = info.full_state_dict or info.broadcast_from_rank0 or info.cpu_offload or info.fsdp_modules
        if not waits:
            yield request
    if waits:
        yield request


@contextlib.contextmanager
def _fsdp_state_dict_type(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """What stock does for FSDP1, whose ``state_dict()`` depends on a mode of the model."""
    offload = options.cpu_offload
    if options.full_state_dict:
        kind = StateDictType.FULL_STATE_DICT
        config: Any = FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload)
        optim_config: Any = FullOptimStateDictConfig(
            offload_to_cpu=offload, rank0_only=offload or options.broadcast_from_rank0
        )
    else:
        kind = StateDictType.SHARDED_STATE_DICT
        config = ShardedStateDictConfig(offload_to_cpu=offload)
        optim_config = ShardedOptimStateDictConfig(offload_to_cpu=offload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FSDP.state_dict_type(model, kind, config, optim_config):
            yield


def listed(keys: Iterable[str]) -> str:
    return "\n".join(f"  {key}" for key in keys)
