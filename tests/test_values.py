"""Equality by value: of replicas, of Replicated components, and of the objects of two checkpoints."""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

from dcpring.base.values import digest
from dcpring.plan import replicas
from dcpring.resume import trees
from dcpring.tools.inspect.compare_objects import difference

WORDS = [f"w{n}" for n in range(100)]


def test_objects_are_compared_by_value() -> None:
    assert digest(set(WORDS)) == digest(set(reversed(WORDS))) != digest(set(WORDS[1:]))
    assert digest({"a": 1, "b": (2, None)}) == digest({"b": (2, None), "a": 1}) != digest({"a": 1, "b": (2, 0)})
    assert digest(collections.OrderedDict(a="x" * 2)) == digest(collections.OrderedDict(a="xx")) == digest({"a": "xx"})
    assert digest([1]) != digest((1,)) and digest(1) != digest(1.0) != digest("1")
    assert digest([]) != digest({}) != digest(()) and digest([[], []]) != digest([[]])
    assert digest(float("nan")) == digest(float("nan")) and digest(0.0) != digest(-0.0)


class Custom:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


VALUES: dict[str, tuple[Any, Any, Any]] = {
    "array": (np.arange(3), np.arange(3), np.arange(4)),
    "array of another dtype": (np.zeros(2), np.zeros(2), np.zeros(2, np.float32)),
    "scalar": (np.float32(1), np.float32(1), np.float64(1)),
    "date": (datetime.date(2020, 1, 2), datetime.date(2020, 1, 2), datetime.date(2020, 1, 3)),
    "decimal": (decimal.Decimal("1.5"), decimal.Decimal("1.5"), decimal.Decimal("1.50")),
    "path": (pathlib.Path("a/b"), pathlib.Path("a") / "b", pathlib.Path("a")),
    "deque": (collections.deque([{1, 2}]), collections.deque([{2, 1}]), collections.deque([{2}])),
    "maxlen": (collections.deque([1], 2), collections.deque([1], 2), collections.deque([1], 3)),
    "counter": (collections.Counter("ab"), collections.Counter("ba"), collections.Counter("abb")),
    "defaultdict": (
        collections.defaultdict(int, a=1, b=2),
        collections.defaultdict(int, b=2, a=1),
        collections.defaultdict(list, b=2, a=1),
    ),
    "buffer": (io.BytesIO(b"ab"), io.BytesIO(b"ab"), io.BytesIO(b"abc")),
    "random state": (random.Random(1), random.Random(1), random.Random(2)),
    "generator": (np.random.default_rng(1), np.random.default_rng(1), np.random.default_rng(2)),
    "class": (int, int, float),
    "user's": (Custom(a={"x", "y"}), Custom(a={"y", "x"}), Custom(a={"x"})),
    "tensor": (torch.ones(2), torch.ones(2), torch.ones(3)),
    "strided": (torch.arange(4.0).reshape(2, 2).t(), torch.tensor([[0.0, 2], [1, 3]]), torch.ones(2, 2)),
    "conjugate": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), torch.tensor([1 + 2j])),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), torch.eye(3).to_sparse()),
    "meta": (torch.ones(2, device="meta"), torch.ones(2, device="meta"), torch.ones(3, device="meta")),
    "quantized": tuple(torch.quantize_per_tensor(torch.ones(n), 0.1, 0, torch.quint8) for n in (2, 2, 3)),  # type: ignore[dict-item]
    "subclass": (torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2)), torch.ones(3)),
}


@pytest.mark.parametrize("name", VALUES)
def test_data_is_compared_by_value(name: str) -> None:
    value, same, other = VALUES[name]
    assert digest({"x": [value]}) == digest({"x": [same]}) != digest({"x": [other]})


def test_what_cannot_be_taken_apart_is_its_class() -> None:
    assert digest(sys.stdout) == digest(sys.stdout)
    assert digest(lambda: 1) == digest(lambda: 2)


def test_what_holds_itself_or_is_held_often_takes_no_time() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    often: list[Any] = [1]
    for _ in range(60):
        often = [often, often]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    started = time.perf_counter()
    for value in (itself, often, deep):
        digest(value)
    assert time.perf_counter() - started < 30


PROGRAM = """
import collections
from dcpring.plan import replicas
from dcpring.resume import trees
words = {"alpha", "beta", "gamma", "delta"}
value = {"s": words, "f": {frozenset(words): 1}, "d": collections.deque([words]), "c": collections.Counter(words)}
print(trees.digest(value), sorted(trees.digests(value).items()), replicas.fingerprints([value]).hex())
"""


def test_the_hash_seed_does_not_count() -> None:
    """Each rank has its own, unless PYTHONHASHSEED is set."""
    found = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        result = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True)
        assert result.returncode == 0, result.stderr
        found.add(result.stdout)
    assert len(found) == 1


def test_replicas_and_components_agree() -> None:
    for value, same, other in VALUES.values():
        if isinstance(value, torch.Tensor):
            continue
        assert trees.digest(value) == trees.digest(same) != trees.digest(other)
        prints = [replicas.fingerprints([one]) for one in (value, same, other)]
        assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("name", [name for name in VALUES if name not in ("meta", "user's")])
def test_objects_of_two_checkpoints(name: str) -> None:
    def saved(value: Any) -> bytes:
        archive = io.BytesIO()
        torch.save({"x": [value]}, archive)
        return archive.getvalue()

    value, same, other = VALUES[name]
    assert difference(saved(value), saved(same)) == ""
    assert difference(saved(value), saved(other)) != ""
