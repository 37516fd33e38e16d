"""Runs a function in N processes that form a gloo group, and collects what each returns.

The processes are forked from one that has loaded torch, and kept from one call to the next; every call gets a process
group of its own. A call that fails or takes too long ends the processes, and the next starts new ones.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import _gil
import _prepared

TIMEOUT_SECONDS = 120.0
START_SECONDS = 300.0
"""How long processes may take to start and to import what is called; a busy machine takes its time."""
CACHES = (
    *("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans"),
    *("_cached_global_plan", "_cached_metadata"),
)
"""Of DCP's SavePlanner: the plans that outlive a save."""


class RankFailure(AssertionError):
    """Some ranks raised, died or did not answer.

    Attributes:
        tracebacks: by rank.
    """

    def __init__(self, tracebacks: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(tracebacks.items())))
        self.tracebacks = tracebacks


class _Worker:
    def __init__(self, is_new: bool) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process: BaseProcess
        if is_new:
            self.process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
            self.process.start()
        else:
            self.process = _prepared.start(_serve, theirs)
        theirs.close()

    def end(self) -> None:
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


_workers: list[_Worker] = []


def close() -> None:
    """Ends the processes."""
    for worker in _workers:
        worker.pipe.close()
    while _workers:
        _workers.pop().end()


atexit.register(close)


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    grace: float = 3.0,
    are_new: bool = False,
) -> list[Any]:
    """Calls ``function(*args)`` in every rank of a gloo group; returns the results by rank.

    Args:
        function: one of a module's top level, with picklable results.
        timeout: seconds for the call, once all ranks have begun it.
        grace: seconds that are left to the others once one has failed: they may wait for it for ever.
        are_new: the ranks are new interpreters, each with other hashes of strings.

    Raises:
        RankFailure: with the traceback of each rank that did not return.
    """
    if are_new:
        close()
    while len(_workers) < world_size:
        _workers.append(_Worker(are_new))
    workers = _workers[:world_size]
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(workers):
            worker.pipe.send((function, args, rank, world_size, str(Path(folder, "store")), timeout))
        results, failures = _collect(workers, timeout, grace)
    if failures or are_new:
        close()
    if failures:
        raise RankFailure(failures)
    return [results[rank] for rank in range(world_size)]


def _collect(workers: list[_Worker], timeout: float, grace: float) -> tuple[dict[int, Any], dict[int, str]]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting: dict[Connection, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    begun: set[int] = set()
    deadline = time.monotonic() + START_SECONDS
    while waiting:
        ready = wait_for(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            failures |= {rank: "no answer\n" for rank in waiting.values()}
            break
        for pipe in ready:
            rank = waiting[pipe]
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, f"died, exit code {_exit_code(workers[rank])}\n"
            if good is None:
                begun.add(rank)
                if len(begun) == len(workers) and not failures:
                    deadline = time.monotonic() + timeout
                continue
            del waiting[pipe]
            (results if good else failures)[rank] = value
            if not good:
                deadline = min(deadline, time.monotonic() + grace)
    return results, failures


def _exit_code(worker: _Worker) -> int | None:
    worker.process.join(3)
    return worker.process.exitcode


def _serve(pipe: Connection) -> None:
    faulthandler.enable()
    while True:
        try:
            function, args, rank, world_size, store, timeout = pipe.recv()
        except EOFError:
            return
        pipe.send((None, "begun"))
        faulthandler.dump_traceback_later(0.9 * timeout)
        try:
            answer = (True, _call(function, args, rank, world_size, store, timeout))
        except BaseException:  # CheckpointException is one
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store: str, timeout: float
) -> Any:
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import SavePlanner

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    try:
        dist.barrier()  # a rank that has connected, and is through at once, would leave while others still connect
        with _gil.free_for_others():
            return function(*args)
    finally:
        dist.destroy_process_group()
        for cache in CACHES:
            getattr(SavePlanner, cache).clear()
        gc.collect()
