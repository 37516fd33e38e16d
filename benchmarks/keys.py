"""Names and optimizer state, against stock: the numbers of docs/keys.md. ``python benchmarks/keys.py`` prints them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as stock

import dcpring
from dcpring import _C
from dcpring.state_dict import StateDictOptions

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ROUNDS = 3


def best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def optimizer_state(count: int) -> tuple[float, float, float, float]:
    """Seconds to load AdamW state of so many parameters: flattened by stock and by us, nested by both."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    flat = dcpring.get_optimizer_state_dict(model, optimizer, options=FLAT)
    nested = dcpring.get_optimizer_state_dict(model, optimizer)
    return (
        best(lambda: stock.set_optimizer_state_dict(model, optimizer, flat, options=FLAT)),
        best(lambda: dcpring.set_optimizer_state_dict(model, optimizer, flat, options=FLAT)),
        best(lambda: stock.set_optimizer_state_dict(model, optimizer, nested)),
        best(lambda: dcpring.set_optimizer_state_dict(model, optimizer, nested)),
    )


def names(count: int, layers: int) -> float:
    """Seconds to make so many raw names canonical, below DDP and so many compiled layers."""
    nodes = [("", 0, _C.KEY_PLAIN), ("module", 0, _C.KEY_WRAPPED), ("layers", 1, _C.KEY_PLAIN)]
    for layer in range(layers):
        nodes += [(str(layer), 2, _C.KEY_PLAIN), ("_orig_mod", len(nodes), _C.KEY_WRAPPED)]
    each = count // layers
    raw = [f"module.layers.{i // each}._orig_mod.feed_forward.w{i % each}.weight" for i in range(count)]
    return best(lambda: _C.canonical_keys(nodes, raw))


def main() -> None:
    print("| parameters | stock, flattened | dcpring, flattened | stock, nested | dcpring, nested |")
    print("| --- | --- | --- | --- | --- |")
    for count in (1_000, 4_000, 16_000):
        print(f"| {count:,} | {' | '.join(f'{seconds:.3f}' for seconds in optimizer_state(count))} |")
    print(f"\n100,000 names: {1e3 * names(100_000, 1_000):.1f} ms")


if __name__ == "__main__":
    main()
