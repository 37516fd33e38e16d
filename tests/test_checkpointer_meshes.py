"""Models and AdamW states come back bit for bit on any mesh, whatever mesh they were saved on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _resume import WORLDS, adamw, everything, same, spread, train
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from dcpring import Checkpointer


def save_all(root: Path, layouts: list[str]) -> None:
    for seed, layout in enumerate(layouts):
        model = spread(layout, seed)
        optimizer = adamw(model)
        train(model, optimizer)
        with Checkpointer(root / layout, {"model": model, "optimizer": optimizer}) as checkpointer:
            checkpointer.save(seed)
        expected = everything(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, root / f"{layout}.pt")


def load_all(root: Path, layouts: list[str]) -> dict[tuple[str, str], tuple[bool, str]]:
    """Every checkpoint into every layout: whether all is as it was, and what the report says of the model."""
    found = {}
    for target in layouts:
        for saved in WORLDS:
            model = spread(target, 77)
            optimizer = adamw(model)
            with Checkpointer(root / saved, {"model": model, "optimizer": optimizer}) as checkpointer:
                report = checkpointer.load()
            expected = torch.load(root / f"{saved}.pt")
            found[saved, target] = same(everything(model, optimizer), expected), report.components["model"].detail
    return found


def by_world() -> dict[int, list[str]]:
    worlds = sorted(set(WORLDS.values()))
    return {world: [layout for layout, size in WORLDS.items() if size == world] for world in worlds}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("meshes")
    for world, layouts in by_world().items():
        _distributed.run(world, save_all, root, layouts)
    return root


def test_any_mesh_to_any(saved: Path) -> None:
    found: dict[tuple[str, str], tuple[bool, str]] = {}
    for world, layouts in by_world().items():
        results = _distributed.run(world, load_all, saved, layouts)
        for pair in results[0]:
            found[pair] = all(result[pair][0] for result in results), results[0][pair][1]
    assert [pair for pair, (good, _) in found.items() if not good] == []
    assert len(found) == len(WORLDS) ** 2
    assert found["hsdp", "hsdp"][1] == "as saved"
    assert found["hsdp", "tp-fsdp"][1] == "from mesh (replicate=2, shard=2) to mesh (dp=2, tp=2) and mesh (dp=2)"
    assert found["ddp", "fsdp-3"][1] == "from whole tensors to mesh (3)"


def stock_load(root: Path) -> bool:
    model = spread("fsdp-3", 5)
    optimizer = adamw(model)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "dcpring": "",
    }
    dcp.load(state, checkpoint_id=str(root / "tp-fsdp" / f"step-{list_of_four().index('tp-fsdp')}"))
    assert '"world_size": 4' in state["dcpring"]
    return same(everything(model, optimizer), torch.load(root / "tp-fsdp.pt"))


def list_of_four() -> list[str]:
    return by_world()[WORLDS["tp-fsdp"]]


def test_stock_reads_it(saved: Path) -> None:
    assert _distributed.run(3, stock_load, saved) == [True] * 3
