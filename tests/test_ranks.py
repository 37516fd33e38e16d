"""What ranks do together: groups of any history, errors that all raise, and ranks that leave."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.utils as dcp_utils
from _resume import error_of
from fault._support import open_descriptors, run_python
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import Checkpointer, CheckpointError, PerRank, Replicated, RingSavePlanner, RingWriter, Sharded
from dcpring.base import groups, untold
from dcpring.base.joint import Joint
from dcpring.base.ranks import Ranks
from dcpring.torchside.frames import callers, local
from dcpring.torchside.groups import default_store


class Counter:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Weights:
    def __init__(self) -> None:
        self.tensors = {"w": torch.arange(1000.0), "b": torch.ones(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def some_state() -> dict[str, Any]:
    return {"weights": Sharded(Weights()), "step": Replicated(Counter(3)), "mine": PerRank(Counter(dist.get_rank()))}


def parts_are_right(parts: dict[str, Any]) -> bool:
    weights = parts["weights"].stateful.tensors["w"]
    return torch.equal(weights, torch.arange(1000.0)) and parts["mine"].stateful.value == dist.get_rank()


# ---- groups ----


def in_a_group_of_some(folder: Path) -> list[str]:
    """Errors of the processes 2 and 1, in a group of which they are the ranks 0 and 1."""
    rank = dist.get_rank()
    can_choose = "sort_ranks" in inspect.signature(dist.new_group).parameters
    group = dist.new_group([2, 1], **({"sort_ranks": False} if can_choose else {}))
    if rank == 0:
        return []
    found = []
    components = some_state() | {"other": Replicated(Counter(rank))}
    with Checkpointer(folder, components, process_group=group) as checkpointer:
        found.append(error_of(lambda: checkpointer.save(1)))
        components["other"].stateful.state_dict = mock.Mock(side_effect=OSError("it is gone") if rank == 1 else None)
        for blocking in (True, False):
            found.append(error_of(lambda blocking=blocking: checkpointer.save(1, blocking)))
    planner = RingSavePlanner(check_replicas="error")
    try:
        dcp.save({"w": torch.full((3,), rank)}, checkpoint_id=folder / "x", planner=planner, process_group=group)
    except CheckpointException as error:
        found.append(str(error.failures[0][0]))
    return found


def test_errors_name_ranks_of_the_group_and_say_so(tmp_path: Path) -> None:
    """As DCP's do. Planners named those of the job."""
    _, *found = _distributed.run(3, in_a_group_of_some, tmp_path / "checkpoints")
    assert found[0] == found[1]
    differ, gone, behind, planned = found[0]
    assert "rank 1 differ from rank 0" in differ
    for text in (gone, behind):
        assert "rank 1: OSError: it is gone" in text or "rank 0: OSError: it is gone" in text
    assert "'w' (rank 0 differs from 1)" in planned
    for text in found[0]:
        assert text.count("global ranks 2, 1 in this order") == 1 or "global ranks 1-2 in this order" in text


class Held:
    """Can be referred to weakly."""


def test_a_look_at_a_local_variable_keeps_no_other() -> None:
    def kept() -> bool:
        held, other = Held(), 1
        frame = next(frame for _, name, frame in callers() if name == "kept")
        assert local(frame, "other") == other == 1
        assert local(frame, "none") is None
        gone = weakref.ref(held)
        del held
        return gone() is not None

    assert not kept()


def of_other_histories(folder: Path) -> list[bool]:
    """Each rank has been in another number of groups, and some have been destroyed again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [[0, 1], [2, 3]]
    groups = [dist.new_group(pair) for pair in pairs]  # first: torch itself names these by how many there are
    for count in range(rank):
        group = dist.new_group([rank], use_local_synchronization=True)
        if count % 2:
            dist.destroy_process_group(group)
    mine = groups[rank // 2]
    found = []
    for turn in range(3):
        together = Checkpointer(folder / "all", some_state())
        apart = Checkpointer(folder / f"pair-{rank // 2}", some_state(), process_group=mine)
        if rank >= 2:  # more Checkpointers on some ranks than on others
            Checkpointer(folder / "more", some_state(), process_group=mine).close()
        for checkpointer in (apart, together):
            checkpointer.save(turn, blocking=turn != 1)
            checkpointer.wait()
            found.append(checkpointer.load().step == turn and parts_are_right(checkpointer.components))
        apart.close()
        together.close()
    assert world == 4
    return found


def test_members_of_different_numbers_of_groups(tmp_path: Path) -> None:
    assert _distributed.run(4, of_other_histories, tmp_path) == [[True] * 6] * 4


def other_order(folder: Path) -> list[int]:
    """The ranks of a Checkpointer are those of its process group, in their order."""
    can_choose = "sort_ranks" in inspect.signature(dist.new_group).parameters
    group = dist.new_group([2, 0], **({"sort_ranks": False} if can_choose else {}))
    if dist.get_rank() == 1:
        return []
    with Checkpointer(folder, {"mine": PerRank(Counter(dist.get_rank()))}, process_group=group) as checkpointer:
        checkpointer.save(1)
        return [checkpointer._member.rank, dist.get_rank(group)]


def test_the_order_of_the_group(tmp_path: Path) -> None:
    for found in _distributed.run(3, other_order, tmp_path):
        assert not found or found[0] == found[1]


def what_is_held() -> tuple[int, int, int, int]:
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("dcpring")]
    keys = default_store().num_keys()
    groups = torch.distributed.distributed_c10d._world.pg_names
    return open_descriptors(), len(threads), keys, len(groups)


def made_and_closed(folder: Path) -> list[tuple[int, int, int, int]]:
    def once() -> tuple[int, int, int, int]:
        with Checkpointer(folder, some_state()) as checkpointer:
            checkpointer.save(1)
            checkpointer.save(2, blocking=False)
            checkpointer.wait()
            checkpointer.load()
            with pytest.raises(CheckpointError, match="rank 1: RuntimeError: no"):
                _fail_alone(checkpointer)
        dist.barrier()
        held = what_is_held()
        dist.barrier()  # until then the other does not begin anew
        return held

    return [once() for _ in range(5)]


def _fail_alone(checkpointer: Checkpointer) -> None:
    with checkpointer._ranks.operation("test"):
        if dist.get_rank() == 1:
            raise RuntimeError("no")


def test_nothing_is_left_of_closed_ones(tmp_path: Path) -> None:
    for first, *others in _distributed.run(2, made_and_closed, tmp_path):
        assert others == [first] * 4


# ---- one operation ----


def one_word_fails(where: str) -> tuple[str, str, list[int]]:
    ranks = Ranks()
    rank = dist.get_rank()

    def call() -> None:
        with ranks.operation("test") as joint:
            if where == "first":
                _raise_on(1)
            joint.gather("one", rank)
            with joint.doing("cannot count"):
                if where == "doing":
                    _raise_on(1)
            if where == "unpicklable":
                joint.gather("two", (lambda: None) if rank == 1 else 0)
            joint.gather("two", rank)
            if where == "last":
                _raise_on(1)
            if where == "all":
                raise ValueError("a mistake")
            if where == "all but one" and rank:
                raise ValueError(f"a mistake of {rank}")

    try:
        call()
        text, kind = "", ""
    except BaseException as error:
        text, kind = str(error), type(error).__name__
    with ranks.operation("test") as joint:
        found = joint.gather("one", rank)
    ranks.close()
    return text, kind, found


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("where", "text", "kind"),
    (
        ("first", "rank 1: RuntimeError: boom", "CheckpointError"),
        ("doing", "cannot count: rank 1: RuntimeError: boom", "CheckpointError"),
        ("unpicklable", "rank 1: ", "CheckpointError"),
        ("last", "rank 1: RuntimeError: boom", "CheckpointError"),
        ("all", "a mistake", "ValueError"),
        ("all but one", "rank 1: ValueError: a mistake of 1; rank 2: ValueError: a mistake of 2", "CheckpointError"),
    ),
)
def test_what_is_raised_on_one_is_raised_on_all(where: str, text: str, kind: str) -> None:
    for found, raised, after in _distributed.run(3, one_word_fails, where):
        assert found.startswith(text) if where == "unpicklable" else found == text
        assert (raised, after) == (kind, [0, 1, 2])


def after_the_last_word() -> list[int]:
    ranks = Ranks()
    joint = Joint(ranks, "test")
    joint.gather("one", 0, is_last=True)
    if dist.get_rank() == 1:
        error = RuntimeError("nobody listens")
        assert joint.tell(error) is error
    with ranks.operation("next") as following:
        found = following.gather("two", dist.get_rank())
    ranks.close()
    return found


def test_what_is_raised_after_the_last_word_is_not_told() -> None:
    assert _distributed.run(2, after_the_last_word) == [[0, 1]] * 2


def large_words() -> list[int]:
    ranks = Ranks()
    with ranks.operation("test") as joint:
        found = joint.gather("one", b"x" * (dist.get_rank() * 5000))
    ranks.close()
    return list(map(len, found))


def test_words_of_any_size() -> None:
    assert _distributed.run(3, large_words) == [[0, 5000, 10000]] * 3


def different_calls(folder: Path) -> list[str]:
    rank = dist.get_rank()
    messages = []
    with Checkpointer(folder, some_state(), busy="skip") as checkpointer:
        checkpointer.save(1)
        calls: list[Callable[[], Any]] = [lambda: checkpointer.save(2), checkpointer.load]
        messages.append(error_of(calls[rank]))
        calls = [checkpointer.wait, lambda: checkpointer.load(missing_ok=True)]
        messages.append(error_of(calls[rank]))
        messages.append(error_of(checkpointer.save, 2, blocking=bool(rank)))
        checkpointer.save(2, blocking=False)
        messages.append(error_of(checkpointer.save, 3, blocking=bool(rank)))
        checkpointer.wait()
        checkpointer.save(4)
        assert checkpointer.steps() == [1, 2, 4]
    return messages


def test_ranks_that_call_different_methods(tmp_path: Path) -> None:
    results = _distributed.run(2, different_calls, tmp_path)
    assert results[0] == results[1]
    first, second, third, fourth = results[0]
    assert first == (
        "all ranks must make the same calls in the same order, and have not: rank 0 in save(); rank 1 in load()"
    )
    assert second.endswith("rank 0 in wait(); rank 1 in load()")
    assert third.startswith("rank 0 saves step 2 of weights, step, mine, in the background, but rank 1: step 2 of")
    assert "rank 0 in save(), is the last one written?; rank 1 in save(), notes" in fourth


def bad_arguments_on_one(folder: Path) -> list[str]:
    rank = dist.get_rank()
    messages = []
    bad: tuple[dict[str, Any], ...] = ({"keep_last": 0}, {"busy": "no"}, {"writer_options": 3})
    for options in bad:
        messages.append(error_of(Checkpointer, folder, some_state(), **(options if rank else {})))
    messages.append(error_of(Checkpointer, folder, {"a": Counter()} if rank else some_state()))
    with Checkpointer(folder, some_state()) as checkpointer:
        messages.append(error_of(checkpointer.save, -1 if rank else 1))
        checkpointer.save(1)
        messages.append(error_of(checkpointer.load, exclude=5 if rank else ()))
        checkpointer.load()
    options = {"writer_options": {"engine": "warp"}} if rank else {}
    messages.append(error_of(Checkpointer, folder, some_state(), **options))
    return messages


def test_arguments_that_are_wrong_on_one_rank(tmp_path: Path) -> None:
    results = _distributed.run(2, bad_arguments_on_one, tmp_path)
    assert results[0] == results[1]
    found = results[0]
    assert found[0] == "rank 1: ValueError: keep_last=0: must be an int of at least 1"
    assert all("rank 1: " in message for message in found)
    assert "engine='warp'" in found[-1]


# ---- ranks that leave ----


def one_is_gone(folder: Path) -> str:
    checkpointer = Checkpointer(folder, some_state())
    checkpointer.save(1)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    began = time.monotonic()
    message = error_of(checkpointer.save, 2)
    message += error_of(checkpointer.load)
    assert time.monotonic() - began < 30
    checkpointer.close()
    return message


def test_a_rank_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(_distributed.RankFailure) as caught:
        _distributed.run(3, one_is_gone, tmp_path, timeout=60, grace=20)
    assert caught.value.tracebacks == {1: "died, exit code -9\n"}, "the others have raised, and ended"


# ---- ranks that do not answer ----


def timeouts(folder: Path) -> list[float]:
    """Of groups whose parents have other timeouts than torch's default, and of Checkpointers that are given one."""
    other = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    found = []
    for parent in (None, other):
        ranks = Ranks(parent)
        twin = ranks.twin()
        found += [waits_for(ranks.group), waits_for(twin.group)]
        dist.barrier()  # the other is connected as well
        twin.close()
        ranks.close()
    for timeout in (55, timedelta(minutes=3)):
        with Checkpointer(folder, some_state(), timeout=timeout) as checkpointer:
            checkpointer.save(1, blocking=False)
            checkpointer.wait()
            found += [waits_for(checkpointer._ranks.group), waits_for(checkpointer._background._ranks.group)]
    return found


def waits_for(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_group_waits_as_long_as_the_job_has_said(tmp_path: Path) -> None:
    """It waited for 30 minutes, whatever was said."""
    for found in _distributed.run(2, timeouts, tmp_path, timeout=100):
        assert found == [100, 100, 77, 77, 55, 55, 180, 180]


def wrong_timeouts(folder: Path) -> list[str]:
    wrong = (0, -1, timedelta(0), "soon")
    return [error_of(Checkpointer, folder, some_state(), timeout=each if dist.get_rank() else None) for each in wrong]


def test_a_timeout_that_is_none(tmp_path: Path) -> None:
    results = _distributed.run(2, wrong_timeouts, tmp_path)
    assert results[0] == results[1]
    assert results[0][0] == "rank 1: ValueError: timeout=0: must be more than 0 seconds, or None"
    assert all(text.startswith("rank 1: ") for text in results[0])


def wait_until_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def one_is_late(folder: Path, where: str, blocking: bool) -> tuple[str, list[int]]:
    """Rank 2 comes when the others have waited in vain for as long as was said."""
    rank, begun = dist.get_rank(), time.monotonic()
    write_data = RingWriter.write_data

    def late(*args: Any) -> Any:
        wait_until_there(folder / "given-up")
        return write_data(*args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("dcpring.base.groups.host_id", lambda: f"node{rank // 2}/boot-{rank // 2}"))
        for name, seconds in (("_QUIET_SECONDS", 30.0), ("_ROLL_SECONDS", 5.0)):
            stack.enter_context(mock.patch.object(groups, name, seconds))
        checkpointer = stack.enter_context(Checkpointer(folder, some_state(), timeout=3))
        if rank == 2 and where == "writing":
            stack.enter_context(mock.patch.object(RingWriter, "write_data", late))
        if rank == 2 and where == "before":
            wait_until_there(folder / "given-up")
        text = error_of(lambda: checkpointer.save(1, blocking).wait())
        assert rank == 2 or time.monotonic() > begun + 3
        (folder / "given-up").touch()
        checkpointer._ranks.set_timeout(timedelta(seconds=60))  # time to come together again
        if checkpointer._background is not None:
            checkpointer._background._ranks.set_timeout(timedelta(seconds=60))
        wait_until_there(folder / "given-up")
        RingWriter.write_data = write_data
        checkpointer.save(2, blocking).wait()
        return text, checkpointer.steps()


@pytest.mark.parametrize(("where", "blocking"), (("writing", True), ("writing", False), ("before", True)))
def test_who_does_not_answer_is_named_with_its_host(tmp_path: Path, where: str, blocking: bool) -> None:
    """It was said that another rank had ended, or closed its Checkpointer, which was not so."""
    (text, steps), *others = _distributed.run(3, one_is_late, tmp_path, where, blocking)
    assert others == [(text, steps)] * 2
    assert "rank 2 did not answer for 3 s" in text and text.endswith("(rank 2 on host node1)")
    assert 2 in steps


def interrupted_before_dcp() -> tuple[str, list[int]]:
    """Ctrl-C on rank 1 while it waits for the word after which all go on into DCP's collectives."""
    ranks, rank = Ranks(), dist.get_rank()
    original = groups._all_gather

    def interrupted(*args: Any) -> list[bytes]:
        if rank == 1:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    def work(group: dist.ProcessGroup | None) -> None:
        dist.all_gather_object([None, None], None, group=group)

    with mock.patch.object(groups, "_all_gather", interrupted):
        try:
            with ranks.operation("test") as joint:
                joint.run_dcp("working", "cannot work", work)
            text = ""
        except (CheckpointError, KeyboardInterrupt) as caught:
            text = f"{type(caught).__name__}: {caught}"
    with ranks.operation("test") as joint:
        found = joint.gather("one", rank)
    ranks.close()
    return text, found


def test_ctrl_c_at_the_word_before_dcp_ends_the_wait_of_the_others() -> None:
    (told, first), (own, second) = _distributed.run(2, interrupted_before_dcp, timeout=60)
    assert told == "CheckpointError: cannot work: rank 1: KeyboardInterrupt"
    assert own == "KeyboardInterrupt: "
    assert first == second == [0, 1]


def interrupted_at_each_word(folder: Path) -> list[tuple[str, float]]:
    """Ctrl-C on rank 1 at each word of a save in the background, in turn."""
    original, left = groups._all_gather, 1 << 30

    def interrupted(*args: Any) -> list[bytes]:
        nonlocal left
        if threading.current_thread() is threading.main_thread():
            left -= 1
            if left == -1 and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGINT)
        return original(*args)

    found = []
    with Checkpointer(folder, some_state()) as checkpointer, mock.patch.object(groups, "_all_gather", interrupted):
        checkpointer.save(0, blocking=False).wait()
        for number in range(100):
            left = number
            began = time.monotonic()
            try:
                checkpointer.save(1, blocking=False, async_staging=True)
                text = "saved"
            except (CheckpointError, KeyboardInterrupt) as caught:
                text = f"{type(caught).__name__}: {caught}"
            if left >= 0:
                break
            left = 1 << 30
            checkpointer.save(2, blocking=False).wait()
            found.append((text, time.monotonic() - began))
        assert checkpointer.latest() == 2
    return found


def test_ctrl_c_at_any_word_of_a_save_in_the_background(tmp_path: Path) -> None:
    told, own = _distributed.run(2, interrupted_at_each_word, tmp_path, timeout=200)
    assert len(told) == len(own) > 2
    for (one, seconds), (other, _) in zip(told[:-1], own[:-1], strict=True):
        assert "rank 1: KeyboardInterrupt" in one and other == "KeyboardInterrupt: " and seconds < 20
    assert told[-1][0] == "saved" and own[-1][0] == "KeyboardInterrupt: ", "the last word says that all are through"


class Unpicklable(Exception):
    """DCP cannot send it, and raises on this rank alone."""

    def __init__(self) -> None:
        super().__init__("what cannot be sent")
        self.lock = threading.Lock()


class Unreadable(Exception):
    """DCP can send it, and no rank can read it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def out_of_dcp(folder: Path, blocking: bool) -> list[tuple[str, float]]:
    """Exceptions that leave DCP's collectives on one rank, while the other waits in them."""
    errors: list[Callable[[], BaseException]] = [
        Unpicklable,
        lambda: Unreadable("one", "another"),
        lambda: KeyboardInterrupt(),
    ]
    found = []
    with Checkpointer(folder, some_state()) as checkpointer:
        checkpointer.save(1)
        for place in ("gather_object", "all_gather_object", "write_data"):
            for error in errors:
                target = RingWriter if place == "write_data" else dcp_utils._DistWrapper
                with mock.patch.object(target, place, _raising(getattr(target, place), error)):
                    began = time.monotonic()
                    try:
                        checkpointer.save(2, blocking)
                        checkpointer.load(1)
                    except (CheckpointError, KeyboardInterrupt) as caught:
                        found.append((f"{type(caught).__name__}: {caught}", time.monotonic() - began))
                    else:
                        found.append(("", 0.0))
                checkpointer.save(3, blocking)
                checkpointer.load(3)
    return found


def _raising(original: Any, error: Callable[[], BaseException]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise error()
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("blocking", (True, False), ids=("blocking", "background"))
def test_what_leaves_dcp_on_one_rank_ends_the_wait_of_the_others(tmp_path: Path, blocking: bool) -> None:
    first, second = _distributed.run(2, out_of_dcp, tmp_path, blocking, timeout=100)
    for (one, seconds), (other, _) in zip(first, second, strict=True):
        assert one and other and seconds < 30, (first, second)
    assert all("what cannot be sent" in text for text, _ in (first[0], second[0], first[3], second[3]))


class Sick:
    """Cannot be saved, and says so with an exception that cannot be sent."""

    def __reduce__(self) -> Any:
        raise Unpicklable if dist.get_rank() == 1 else Unreadable("one", "another")


def of_the_users_own(path: str, planner: Any) -> str:
    try:
        dcp.save({"sick": Sick(), "a": torch.ones(3)}, storage_writer=RingWriter(path), planner=planner())
    except CheckpointException as error:
        return str(error)
    return ""


@pytest.mark.parametrize("planner", (RingSavePlanner, dcp.DefaultSavePlanner))
def test_exceptions_that_cannot_be_sent_are_told_in_words(tmp_path: Path, planner: Any) -> None:
    for message in _distributed.run(2, of_the_users_own, str(tmp_path), planner, timeout=60):
        assert "what cannot be sent" in message or "one and another" in message


def after_the_group(folder: str) -> list[str]:
    """Saves after the process group was destroyed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    checkpointer = Checkpointer(folder, {"t": Replicated(Counter(1))})
    checkpointer.save(1)
    dist.destroy_process_group()
    found = []
    for blocking in (True, True, False):
        try:
            checkpointer.save(2, blocking)
        except CheckpointError as error:
            found.append(str(error))
    checkpointer.close()
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=size)
    dist.barrier()
    return found


def test_each_save_after_the_group_says_so(tmp_path: Path) -> None:
    for found in _distributed.run(2, after_the_group, str(tmp_path / "run")):
        assert len(found) == 3 and all(
            "the process groups have been destroyed; close the Chec" in text for text in found
        )


# ---- what nobody hears of ----


def test_a_save_that_failed_keeps_nothing_of_a_checkpointer_that_is_dropped(tmp_path: Path) -> None:
    """What is said at the end of the program is text."""
    model = torch.nn.Linear(3, 3)
    dropped = weakref.ref(model)
    checkpointer = Checkpointer(tmp_path, {"model": model}, writer_options={"overwrite": False})
    checkpointer.save(1)
    handle = checkpointer.save(1, blocking=False)
    assert handle._written is not None
    error = handle._written.exception()
    for thread in threading.enumerate():
        if thread.name == "dcpring-save":
            thread.join(60)
    del checkpointer, handle, model
    gc.collect()
    assert "overwrite=False" in str(error) and dropped() is None
    untold._untold.clear()  # as if somebody had asked


ENDS: dict[str, tuple[str, int]] = {
    "ends": ("", 120),
    "exits": ("sys.exit(3)", 120),
    "no stderr": ("sys.stderr = None", 0),
    "closed": ("checkpointer.close()", 1),
    "told": ("try: checkpointer.wait()\nexcept Exception: pass", 0),
    "forked": ("while not checkpointer._background.is_done: time.sleep(0.01)\nif os.fork(): os.wait()", 120),
    "used in a fork": (
        "if not os.fork():\n    try: checkpointer.wait()\n    except ValueError: os._exit(5)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 5",
        120,
    ),
    "body": ("with checkpointer: raise KeyError('of the body')", 1),
}
"""How a program ends whose save in the background has failed, and with which status."""

PROGRAM = """
import json, os, sys, time
from test_ranks import ENDS, Counter
from dcpring import Checkpointer, Replicated

statuses = {}
for number, (name, (body, _)) in enumerate(ENDS.items()):
    child = os.fork()  # it has torch loaded already, and ends as a program does
    if child == 0:
        os.dup2(os.open(f"{sys.argv[1]}/{number}.txt", os.O_CREAT | os.O_WRONLY), 2)
        break
    statuses[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(statuses))
    os._exit(0)
checkpointer = Checkpointer(
    f"{sys.argv[1]}/{number}", {"t": Replicated(Counter(1))}, writer_options={"overwrite": False}
)
checkpointer.save(1)
checkpointer.save(1, blocking=False)
exec(body)
"""


def test_a_save_that_failed_and_nobody_asked(tmp_path: Path) -> None:
    statuses = json.loads(run_python(PROGRAM, str(tmp_path), is_new=True))
    assert statuses == {name: status for name, (_, status) in ENDS.items()}
    for number, (name, (_, status)) in enumerate(ENDS.items()):
        said = (tmp_path / f"{number}.txt").read_text()
        logged = "a save in the background has failed, and the next call will raise this: cannot save"
        assert logged in said or name == "no stderr"
        assert said.count("and no call has raised it:") == (status == 120)
        assert ("dcpring.errors.CheckpointError: cannot save" in said) == (status == 120 or name == "closed")
        assert name != "body" or said.rstrip().endswith("KeyError: 'of the body'")
