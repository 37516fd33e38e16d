"""Every way of wrapping a model that names have to look through, alone and in pairs; for tests and for docs/keys.md."""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import dcpring

WIDTH = 16
"""Float8 wants multiples of 16."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale


class Net(nn.Module):
    """A plain model; ``block`` is the submodule that is wrapped."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.first(x)))


class Shift(nn.Module):
    """A parametrization that stores the tensor as it was."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Lora(nn.Module):
    """An adapter, as a user writes one: it wraps a module, and owns parameters besides."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.zeros(WIDTH, 4))
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + (x @ self.lora_a).sum(-1, keepdim=True)


dcpring.register_wrapper(Lora, "base_layer")


def _fsdp1(module: nn.Module, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def _fsdp2(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _compile_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def _parametrized(module: nn.Module) -> nn.Module:
    for child in list(module.modules()):
        if isinstance(child, nn.Linear) and not parametrize.is_parametrized(child):
            parametrize.register_parametrization(child, "weight", Shift())
    return module


def _float8(module: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(module, config=Float8LinearConfig(emulate=True))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP1 (flat)": lambda module: _fsdp1(module, use_orig_params=False),
    "FSDP1 (use_orig_params)": lambda module: _fsdp1(module, use_orig_params=True),
    "FSDP2": _fsdp2,
    "torch.compile": torch.compile,
    "Module.compile": _compile_in_place,
    "checkpoint_wrapper": checkpoint_wrapper,
    "AveragedModel": AveragedModel,
    "parametrization": _parametrized,
    "LoRA (registered)": Lora,
    "float8": _float8,
}

OWN = ("n_averaged", "lora_a")
"""The last components of what wrappers own besides the module: state that a plain model has no place for."""


class Case(NamedTuple):
    """How a model is wrapped.

    Attributes:
        outer: the wrapper around ``inner``, "" for none.
        inner: the wrapper that is put on first.
        where: "root" or "block", the submodule.
    """

    outer: str
    inner: str
    where: str

    def __str__(self) -> str:
        return f"{self.outer}({self.inner})-{self.where}" if self.outer else f"{self.inner}-{self.where}"


def cases() -> Iterator[Case]:
    for outer, inner in itertools.product(["", *WRAPPERS], WRAPPERS):
        for where in ("root", "block"):
            yield Case(outer, inner, where)


def build(case: Case, seed: int = 0) -> nn.Module:
    """A wrapped model. Raises whatever torch raises for what it cannot nest."""
    quiet()
    model: nn.Module = Net(seed)
    if case.where == "root":
        return _wrap(case, model)
    model.block = _wrap(case, model.block)
    return model


def _wrap(case: Case, module: nn.Module) -> nn.Module:
    module = WRAPPERS[case.inner](module)
    return WRAPPERS[case.outer](module) if case.outer else module


def raw_keys(model: nn.Module) -> list[str]:
    """What ``state_dict()`` says, in the mode that FSDP1 needs."""
    if not FullyShardedDataParallel.fsdp_modules(model):
        return list(model.state_dict())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return list(model.state_dict())


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def quiet() -> None:
    """These wrappers warn about being old, about one rank, about gloo."""
    os.environ.setdefault("TORCHAO_SKIP_LOADING_SO_FILES", "1")
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.fsdp").setLevel(logging.ERROR)


def plain_values(state: dict[str, Any]) -> dict[str, Tensor]:
    """Full tensors, without what belongs to wrappers."""
    return {key: full_tensor(value) for key, value in state.items() if key.rsplit(".")[-1] not in OWN}


def full_tensor(value: Any) -> Tensor:
    if hasattr(value, "full_tensor"):
        return value.full_tensor().detach().clone()
    if hasattr(value, "local_shards"):
        gathered = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, gathered)
        result = [gathered]
        dist.broadcast_object_list(result, src=0)
        assert result[0] is not None
        return result[0]
    return value.detach().clone()
