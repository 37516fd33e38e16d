"""Checkpointer(unchanged="link") on several ranks: LoRA on a frozen base, retention, resumes on others, replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcpring import Checkpointer, Replicated, RingSavePlanner, RingWriter, verify
from dcpring.options import IOStats

WIDTH = 1024


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Lora:
    """A model of two such layers, over all ranks, with its optimizer."""

    def __init__(self, layout: str = "fsdp", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(Adapted(), Adapted())
        shape = {"hsdp": (2, dist.get_world_size() // 2), "fsdp": (dist.get_world_size(),)}.get(layout)
        if shape:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.progress = {"step": 0}

    @property
    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": Replicated(self.progress)}

    def train(self) -> None:
        self.model(torch.ones(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["step"] += 1

    def whole(self) -> dict[str, Tensor]:
        values = get_model_state_dict(self.model).items()
        return {key: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for key, value in values}


def disk_bytes(path: Path) -> int:
    """What a step takes of its own: files that no other step has."""
    return sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)


def base_bytes() -> int:
    return 2 * 4 * WIDTH * WIDTH


def _check_load(folder: Path, layout: str, step: int, expected: dict[str, Tensor]) -> None:
    other = Lora(layout, seed=1)
    with Checkpointer(folder, other.components) as checkpointer:
        checkpointer.load(step)
    found = other.whole()
    assert all(torch.equal(found[key], value) for key, value in expected.items()), step
    assert other.progress["step"] == step


def _train_and_save(folder: Path, layout: str, blocking: bool, unchanged: Any = "link") -> list[dict[str, Tensor]]:
    lora, states = Lora(layout), []
    with Checkpointer(folder, lora.components, unchanged=unchanged, keep_last=3) as checkpointer:
        for step in range(1, 6):
            lora.train()
            checkpointer.save(step, blocking=blocking)
            states.append(lora.whole())
            checkpointer.wait()
        assert checkpointer.steps() == [3, 4, 5]
    for step in (3, 4, 5):
        _check_load(folder, layout, step, states[step - 1])
    return states


@pytest.mark.parametrize(
    ("layout", "world", "blocking", "unchanged"),
    [
        ("fsdp", 2, True, "link"),
        ("fsdp", 2, False, "link"),
        ("hsdp", 4, True, "link"),
        ("none", 2, True, "link"),
        ("fsdp", 2, False, "trust"),
    ],
)
def test_lora(tmp_path: Path, layout: str, world: int, blocking: bool, unchanged: str) -> None:
    _distributed.run(world, _train_and_save, tmp_path / "ckpt", layout, blocking, unchanged)
    for step in (3, 4, 5):
        path = tmp_path / "ckpt" / f"step-{step}"
        assert disk_bytes(path) < base_bytes() / 10
        report = verify(path)
        assert report.ok, str(report)


def _resume(folder: Path, last: int, linked: bool) -> None:
    """Another run of the program: it loads, and saves the next step."""
    lora = Lora("fsdp", seed=2)
    with Checkpointer(folder, lora.components, unchanged="link") as checkpointer:
        checkpointer.load()
        lora.train()
        checkpointer.save(last + 1)
    path = folder / f"step-{last + 1}"
    assert (disk_bytes(path) < base_bytes() / 10) == linked
    _check_load(folder, "fsdp", last + 1, lora.whole())
    dist.barrier()


def test_a_resume_goes_on_with_the_files_that_are_there(tmp_path: Path) -> None:
    _distributed.run(2, _train_and_save, tmp_path, "fsdp", True)
    _distributed.run(2, _resume, tmp_path, 5, True)
    _distributed.run(3, _resume, tmp_path, 6, False)  # other parts: all is written, and linked from then on
    _distributed.run(3, _resume, tmp_path, 7, True)


def _save_alone(folder: Path) -> list[IOStats]:
    """Without collectives each rank has metadata, and a ledger, of its own."""
    frozen = nn.Parameter(torch.full((700, 500), float(dist.get_rank())), requires_grad=False)
    stats = []
    for step in range(3):
        writer = RingWriter(folder / f"step-{step}", unchanged="link")
        state = {"frozen": frozen, "changes": torch.full((3,), float(step))}
        dcp.save(state, storage_writer=writer, planner=RingSavePlanner(), use_collectives=False)
        assert writer.stats is not None
        stats.append(writer.stats)
    return stats


def test_without_collectives(tmp_path: Path) -> None:
    for stats in _distributed.run(2, _save_alone, tmp_path):
        assert [one.linked_files for one in stats] == [0, 1, 1]
    for step in range(3):
        assert verify(tmp_path / f"step-{step}").ok


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r'unchanged=.*must be "write"'):
        Checkpointer(tmp_path, {"progress": Replicated({"step": 0})}, unchanged="copy")  # type: ignore[arg-type]
