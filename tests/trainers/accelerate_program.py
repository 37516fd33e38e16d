"""accelerate with FSDP2 on CPUs: one rank that trains, saves with ``save_state`` and resumes with ``load_state``.

accelerate turns FSDP on for accelerators only; here it is told that CPUs are some.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType


def take_cpus_for_devices() -> None:
    construct = PartialState.__init__

    def __init__(self: PartialState, *args: object, **kwargs: object) -> None:
        construct(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = __init__


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(33, 33) for _ in range(4)])


def main() -> None:
    options = arguments()
    if options.install:
        import dcpring

        dcpring.install()
    take_cpus_for_devices()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    first = 0
    if options.resume:
        accelerator.load_state(str(options.resume))
        first = int(options.resume.name)
    for step in range(first, options.steps):
        inputs = torch.full((2, 33), float(step + 1))  # the same on each rank: what is learnt depends on none
        accelerator.backward(net(inputs).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.save_state(str(options.folder / str(step + 1)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
