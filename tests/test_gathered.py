"""FSDP2's modules with whole parameters in them: state dicts are those that they have when all is sharded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
from _resume import same, train, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import dcpring
from dcpring import Checkpointer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("no such token")
        return torch.relu(self.inner(x))


class Net(nn.Module):
    """Its head has the weight of its embedding."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 12)
        self.block = Block()
        self.wrapped = wrap(Block())
        self.head = nn.Linear(12, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.wrapped(self.block(self.embedding(tokens))))


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "checkpointed": checkpoint_wrapper,
    "compiled": _compiled,
}


def _made(seed: int, wrap: str = "plain", reshard: bool | int | None = None) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Net(WRAPS[wrap])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.block, model.wrapped, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer)
    return model, optimizer


TOKENS = torch.arange(8)


def _evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(TOKENS)


def _inferred(model: nn.Module) -> None:
    with torch.inference_mode():
        model(TOKENS)


def _not_yet_backward(model: nn.Module) -> None:
    model(TOKENS)


def _failed(model: nn.Module) -> None:
    blocks = [one for one in model.modules() if isinstance(one, Block)]
    blocks[-1].fails = True
    with contextlib.suppress(RuntimeError):
        model(TOKENS)
    blocks[-1].fails = False


def _sharded_parts(model: nn.Module) -> Iterator[FSDPModule]:
    return (one for one in model.modules() if isinstance(one, FSDPModule))


def _unsharded(model: nn.Module) -> None:
    for part in _sharded_parts(model):
        part.unshard()


def _being_unsharded(model: nn.Module) -> None:
    for part in _sharded_parts(model):
        part.unshard(async_op=True)


def _kept_after_backward(model: nn.Module) -> None:
    for part in _sharded_parts(model):
        part.set_reshard_after_backward(False)
    model(TOKENS).sum().backward()


def _not_synchronised(model: nn.Module) -> None:
    next(_sharded_parts(model)).set_requires_gradient_sync(False)
    model(TOKENS).sum().backward()


STATES = [
    _evaluated,
    _inferred,
    _not_yet_backward,
    _failed,
    _unsharded,
    _being_unsharded,
    _kept_after_backward,
    _not_synchronised,
]


def _same(a: Any, b: Any) -> bool:
    return same(whole(a), whole(b))


def _problems(case: str, enter: Callable[[nn.Module], None], **how: Any) -> list[str]:
    """What is not as it is with a model of which nothing is gathered."""
    model, optimizer = _made(1, **how)
    want = stock.get_state_dict(model, optimizer)
    other = stock.get_state_dict(*_made(2, **how))
    problems = []

    def check(what: str, made: Callable[[], Any], expected: Any) -> None:
        enter(model)
        try:
            if not _same(made(), expected):
                problems.append(f"{case}: {what} differs")
        except Exception as error:
            problems.append(f"{case}: {what}: {error!r}")

    def loaded() -> Any:
        dcpring.set_state_dict(model, optimizer, model_state_dict=other[0], optim_state_dict=other[1])
        return stock.get_state_dict(model, optimizer)

    def optimizer_loaded() -> Any:
        dcpring.set_optimizer_state_dict(model, optimizer, want[1])
        return stock.get_optimizer_state_dict(model, optimizer)

    def model_loaded() -> Any:
        dcpring.set_model_state_dict(model, want[0])
        return stock.get_model_state_dict(model)

    check("get_state_dict", lambda: dcpring.get_state_dict(model, optimizer), want)
    check("get_optimizer_state_dict", lambda: dcpring.get_optimizer_state_dict(model, optimizer), want[1])
    check("get_model_state_dict", lambda: dcpring.get_model_state_dict(model), want[0])
    check("set_state_dict", loaded, other)
    check("set_optimizer_state_dict", optimizer_loaded, want[1])
    check("set_model_state_dict", model_loaded, want[0])
    return problems


def _all_states(wraps: Iterable[str], reshards: Iterable[bool | int | None]) -> list[str]:
    problems = []
    for wrap, reshard, enter in itertools.product(wraps, reshards, STATES):
        problems += _problems(f"{wrap} {reshard} {enter.__name__}", enter, wrap=wrap, reshard=reshard)
    return problems


@pytest.mark.parametrize(("world_size", "wraps", "reshards"), [(1, WRAPS, [None, False]), (4, ["plain"], [2])])
def test_state_dicts_are_those_of_the_sharded_model(world_size: int, wraps: Any, reshards: Any) -> None:
    assert _distributed.run(world_size, _all_states, list(wraps), reshards) == [[]] * world_size


def _checkpointed(folder: str) -> list[str]:
    problems = []
    for number, enter in enumerate(STATES):
        case = enter.__name__.strip("_")
        model, optimizer = _made(1)
        other, its_optimizer = _made(2)
        want = whole(stock.get_state_dict(model, optimizer))
        for one in (model, other):
            enter(one)
        with (
            Checkpointer(f"{folder}/{number}", {"model": model, "optimizer": optimizer}) as checkpointer,
            Checkpointer(f"{folder}/{number}", {"model": other, "optimizer": its_optimizer}) as others,
        ):
            for step, blocking in enumerate((True, False)):
                enter(model)
                checkpointer.save(step, blocking=blocking)
                checkpointer.wait()
                enter(other)
                others.load()
                if not same(whole(stock.get_state_dict(other, its_optimizer)), want):
                    problems.append(f"{case} {step}: what was loaded differs")
    return problems


def test_checkpointers_save_and_load_whatever_is_gathered(tmp_path: Path) -> None:
    assert _distributed.run(2, _checkpointed, str(tmp_path)) == [[], []]
