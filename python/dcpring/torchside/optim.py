"""Names of ``torch.optim``, most of them private."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dcpring.torchside.versions import optional

STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
"""Of an optimizer's state dict."""

_GLOBAL_HOOKS: list[dict[int, Any]] = [
    optional("torch.optim.optimizer", "_global_optimizer_pre_hooks", {}),
    optional("torch.optim.optimizer", "_global_optimizer_post_hooks", {}),
]


def inner_schedulers(scheduler: LRScheduler) -> Sequence[LRScheduler]:
    """The schedulers that one is made of; none for most."""
    return getattr(scheduler, "_schedulers", ())


def hook_names(optimizer: Optimizer) -> list[str]:
    """The attributes in which an optimizer keeps hooks."""
    return [name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")]


def plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """A class's step without the wrapper that torch puts around it, which calls hooks."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


@contextlib.contextmanager
def no_global_hooks() -> Iterator[None]:
    """Hooks on the steps of all optimizers are not called: a class's step may call another's, with its wrapper."""
    before = [dict(hooks) for hooks in _GLOBAL_HOOKS]
    for hooks in _GLOBAL_HOOKS:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in zip(_GLOBAL_HOOKS, before, strict=True):
            hooks.update(entries)
