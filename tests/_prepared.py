"""Processes that are forked from one which has loaded torch: to start one takes milliseconds, not seconds of CPU.

The process that they are forked from is that of multiprocessing's ``forkserver``. It loads the modules in ``LOADED``
and calls nothing in them, so it has one thread when it forks, and no thread pool, group or CUDA context is inherited.
Its environment is that of the moment when the first process was started. What it has loaded, and the seed of its hashes
of strings, all its children share; a test for which that matters starts a new interpreter.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
LOADED = (
    *("pytest", "numpy", "rich.console", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"),
    *("dcpring.checkpointer", "dcpring.cli._app"),
)
CONTEXT.set_forkserver_preload(list(LOADED))


def start(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that calls ``function(*args)``, which is one of a module's top level."""
    process = CONTEXT.Process(target=_begin, args=(function, args))  # no daemon: those may not have children
    process.start()
    return process


def _begin(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()  # to look through all that is loaded takes a quarter of a second each time
    function(*args)
