"""Checkpointer.save(export="hf"): the model's weights beside the checkpoint, for from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from dcpring import Checkpointer, CheckpointError, Replicated, load_pretrained, save_pretrained_weights


class Config:
    """As transformers' are."""

    def __init__(self) -> None:
        self.dtype, self.architectures = "float32", None

    def save_pretrained(self, path: Path) -> None:
        (path / "config.json").write_text(json.dumps(vars(self)))


def config_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def net() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))
    model.config = Config()  # type: ignore[assignment]
    return model


def weights_of(folder: Path, *parts: str) -> dict[str, torch.Tensor]:
    return load_file(folder.joinpath("hf", *parts, "model.safetensors"))


def assert_weights(folder: Path, model: nn.Module, *parts: str) -> None:
    found, wanted = weights_of(folder, *parts), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("blocking", (True, False))
def test_one_process(tmp_path: Path, blocking: bool) -> None:
    model, state = net(), {"step": 3}
    wanted = net()
    with Checkpointer(tmp_path, {"model": model, "state": Replicated(state)}, keep_last=1) as checkpointer:
        handle = checkpointer.save(1, blocking, export="hf")
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[union-attr]
        handle.wait()
        assert_weights(tmp_path / "step-1", wanted)
        assert config_in(tmp_path / "step-1" / "hf") == {"dtype": "float32", "architectures": ["Sequential"]}
        other = net()
        load_pretrained(other, tmp_path / "step-1" / "hf")
        assert torch.equal(other[0].weight, wanted[0].weight)  # type: ignore[arg-type, union-attr]
        checkpointer.load(1)
        assert torch.equal(model[0].weight, wanted[0].weight)  # type: ignore[arg-type, union-attr]
        checkpointer.save(2)
        assert not (tmp_path / "step-1").exists()
        assert not (tmp_path / "step-2" / "hf").exists()


def test_a_step_that_is_saved_again(tmp_path: Path) -> None:
    model = net()
    with Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.save(1, export="hf")
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[union-attr]
        checkpointer.save(1, export="hf")
        assert_weights(tmp_path / "step-1", model)
        checkpointer.save(1)
        assert not (tmp_path / "step-1" / "hf").exists()


def test_several_models_and_casts(tmp_path: Path) -> None:
    models: dict[str, Any] = {"a": net(), "b": nn.Linear(3, 2)}
    with Checkpointer(tmp_path, models, export_options={"dtype": torch.bfloat16}) as checkpointer:
        checkpointer.save(1, export="hf")
    assert weights_of(tmp_path / "step-1", "a")["0.weight"].dtype == torch.bfloat16
    assert config_in(tmp_path / "step-1" / "hf" / "a")["dtype"] == "bfloat16"
    assert models["a"].config.dtype == "float32" and models["a"].config.architectures is None
    assert not (tmp_path / "step-1" / "hf" / "b" / "config.json").exists()
    assert torch.equal(weights_of(tmp_path / "step-1", "b")["weight"], models["b"].weight.to(torch.bfloat16))


def save_config(path: str, kind: str, dtype: Any) -> None:
    model: nn.Module = net()
    if kind == "sharded":
        fully_shard(model[0])  # type: ignore[index]
        fully_shard(model)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    save_pretrained_weights(model, path, config=True, dtype=dtype)


@pytest.mark.parametrize("kind", ("sharded", "ddp"))
@pytest.mark.parametrize(
    "dtype, expected", ((None, "float32"), (torch.float16, "float16"), ({"0.*": torch.bfloat16}, "bfloat16"))
)
def test_save_pretrained_weights_writes_the_configuration(tmp_path: Path, kind: str, dtype: Any, expected: str) -> None:
    _distributed.run(2, save_config, str(tmp_path), kind, dtype)
    assert config_in(tmp_path) == {"dtype": expected, "architectures": ["Sequential"]}


def cannot_write_config(path: str) -> str:
    (Path(path) / "config.json").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        save_pretrained_weights(net(), path, config=True)
    return str(caught.value)


def test_a_configuration_that_cannot_be_written(tmp_path: Path) -> None:
    first, second = _distributed.run(2, cannot_write_config, str(tmp_path))
    assert first == second and "the configuration cannot be written" in first


def test_what_cannot_be(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"state": Replicated({"a": 1})}) as checkpointer:
        with pytest.raises(CheckpointError, match="no component is a model"):
            checkpointer.save(1, export="hf")
        with pytest.raises(ValueError, match="export='gguf'"):
            checkpointer.save(1, export="gguf")  # type: ignore[arg-type]
        assert checkpointer.steps() == []


def save_sharded(path: str, blocking: bool) -> None:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    with Checkpointer(path, {"model": model}) as checkpointer:
        checkpointer.save(1, blocking, export="hf").wait()
        (Path(path) / "step-2").mkdir(exist_ok=True)
        (Path(path) / "step-2" / "hf").touch()
        dist.barrier()
        with pytest.raises(CheckpointError, match="step-2 is saved, but cannot be exported"):
            checkpointer.save(2, blocking, export="hf").wait()
        dist.barrier()
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.load(2).step == 2


@pytest.mark.parametrize("blocking", (True, False))
def test_sharded(tmp_path: Path, blocking: bool) -> None:
    _distributed.run(2, save_sharded, str(tmp_path), blocking)
    assert_weights(tmp_path / "step-1", net())


def ask_for_different_things(path: str) -> str:
    with Checkpointer(path, {"model": net()}) as checkpointer:
        try:
            checkpointer.save(1, export="hf" if dist.get_rank() else None)
        except CheckpointError as error:
            return str(error)
    return ""


def test_ranks_ask_for_different_things(tmp_path: Path) -> None:
    for text in _distributed.run(2, ask_for_different_things, str(tmp_path)):
        assert "exported as hf" in text and "call save() alike" in text
