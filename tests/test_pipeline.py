"""Pipelines: ranks have the layers of their stages, and any other number of stages goes on from what they save."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _logs import logged
from _pipeline import LAYERS, LAYOUTS, Decoder, Training, adamw, same, stage_of
from _resume import error_of
from _versions import PIPELINES_RUN_ON_GLOO, needs
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcpring
from dcpring import (
    Checkpointer,
    CheckpointError,
    KeyMismatchError,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
    Sharded,
    get_model_state_dict,
    get_optimizer_state_dict,
    install,
    load_pretrained,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from dcpring.resume.param_groups import joined, match_groups

SAVED = [name for name in LAYOUTS if name != "one"]


def save_all(root: Path) -> None:
    for name in SAVED:
        training = Training(LAYOUTS[name])
        training.pretend()
        with Checkpointer(root / name, training.components()) as checkpointer:
            checkpointer.save(2, blocking=False)
        everything = training.everything()
        if dist.get_rank() == 0:
            torch.save(everything, root / f"{name}.pt")


def load_all(root: Path, pairs: list[tuple[str, str]]) -> list[str]:
    """The pairs, of the layout of the save and that of the load, in which something is not as it was saved."""
    wrong = []
    for saved, name in pairs:
        training = Training(LAYOUTS[name], seed=1)
        with Checkpointer(root / saved, training.components()) as checkpointer:
            checkpointer.load()
        if not same(torch.load(root / f"{saved}.pt"), training.everything()):
            wrong.append(f"{saved} -> {name}")
        assert all(one.last_epoch == 2 for one in training.schedulers)
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipelines")
    _distributed.run(4, save_all, root)
    return root


def test_any_number_of_stages_goes_on(saved: Path) -> None:
    """Each layout from another one; with ``--slow`` each from each."""
    others = [*SAVED[1:], SAVED[0]]
    assert _distributed.run(4, load_all, saved, [*zip(SAVED, others, strict=True)]) == [[]] * 4
    assert _distributed.run(1, load_all, saved, [(name, "one") for name in SAVED]) == [[]]


@pytest.mark.slow
def test_every_layout_goes_on_from_every_other(saved: Path) -> None:
    assert _distributed.run(4, load_all, saved, [*itertools.product(SAVED, SAVED)]) == [[]] * 4


def groups_in(path: Path) -> tuple[frozenset[str], ...]:
    """The members of the groups in a checkpoint, as stock reads them."""
    reader = FileSystemReader(path)
    keys = [key for key in reader.read_metadata().state_dict_metadata if key.endswith(".params")]
    state: dict[str, Any] = dict.fromkeys(keys)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return tuple(frozenset(state[key]) for key in sorted(keys))


def test_a_checkpoint_does_not_say_how_the_model_was_cut(saved: Path) -> None:
    parameters = dict(Decoder().named_parameters())
    matrices = frozenset(name for name, parameter in parameters.items() if parameter.dim() > 1)
    for name in SAVED:
        found = groups_in(saved / name / "step-2")
        if LAYOUTS[name].is_split:  # a rank's groups stay apart
            assert len(found) == 4 and (found[0] | found[2]) == matrices
        else:
            assert found == (matrices, frozenset(parameters.keys() - matrices))


def go_on(root: Path, layout: str) -> tuple[list[float], list[float], bool]:
    training = Training(LAYOUTS[layout])
    with Checkpointer(root, training.components()) as checkpointer:
        training.train(2)
        checkpointer.save(2, blocking=False)
        losses = training.train(4)
    other = Training(LAYOUTS[layout], seed=1)
    with Checkpointer(root, other.components()) as checkpointer:
        assert all(one.action == "loaded" for one in checkpointer.load().components.values())
    return losses, other.train(4), same(training.everything(), other.everything())


@needs(PIPELINES_RUN_ON_GLOO, "pipelines over gloo")
@pytest.mark.parametrize("layout", ["pp2 x dp2", "pp2 x tp2, cut elsewhere", "interleaved"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, layout: str) -> None:
    for rank, (losses, again, is_same) in enumerate(_distributed.run(4, go_on, tmp_path, layout)):
        assert losses == again and is_same
        assert len(losses) == (8 if rank > 1 else 0)


# ---- lists ----


def halves() -> list[nn.Module]:
    whole = Decoder()
    return [stage_of(whole, 0, 2), stage_of(whole, 2, 6)]


def test_parts_on_one_process_are_one_model(tmp_path: Path) -> None:
    parts = halves()
    optimizers = [adamw([part]) for part in parts]
    with Checkpointer(tmp_path, {"model": parts, "optimizer": optimizers}) as checkpointer:
        checkpointer.save(1, export="hf")
    whole = Decoder()
    with Checkpointer(tmp_path, {"model": whole, "optimizer": adamw([whole])}) as checkpointer:
        assert str(checkpointer.load()).count("loaded, as saved") == 2
    again = [tensor for part in parts for tensor in part.state_dict().values()]
    assert all(map(torch.equal, again, [whole.state_dict()[name] for part in parts for name in part.state_dict()]))
    assert dcpring.verify(tmp_path / "step-1" / "hf").ok


def test_what_a_load_of_parts_lacks_is_named(tmp_path: Path) -> None:
    first, second = halves()
    with Checkpointer(tmp_path, {"model": first}) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, {"model": [first, second]}) as checkpointer:
        assert "'head.bias', 'head.weight', 'layers.2" in error_of(checkpointer.load).replace("model.", "")
    with Checkpointer(tmp_path, {"model": Sharded([first, second], strict=False)}) as checkpointer:
        assert "not in the checkpoint, left as it was" in str(checkpointer.load())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([nn.Linear(2, 2), nn.Linear(2, 2)], "parts 0 and 1 of the model both have 'weight'"),
        ([], "is a list of nothing"),
        ([nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)])], "no model among the components has its parameters"),
    ],
)
def test_lists_that_are_no_component(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Checkpointer(tmp_path, {"model": value})


def test_schedulers_of_a_list_go_alike(tmp_path: Path) -> None:
    parts = halves()
    optimizers = [adamw([part]) for part in parts]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]
    optimizers[1].step()
    schedulers[1].step()
    with Checkpointer(tmp_path, {"model": parts, "optimizer": optimizers, "scheduler": schedulers}) as checkpointer:
        assert "schedulers 0 and 1 of the list are not in the same state" in error_of(checkpointer.save, 1)


class Wrapper:
    """As torchtitan's."""

    def __init__(self, model: list[nn.Module]) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value for part in self.model for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError


def test_what_holds_parts_is_asked_for_them(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"holds several Decoders in \.model, which are recognised: give that list"):
        Checkpointer(tmp_path, {"model": Wrapper(halves())})


# ---- parameter groups ----


def group(decay: float, *names: str) -> dict[str, Any]:
    return {"weight_decay": decay, "params": list(names)}


def test_joining_groups() -> None:
    first, second = [group(0.1, "a"), group(0, "b")], [group(0.1, "c"), group(0, "d")]
    assert joined({0: first, 1: second}) == ([group(0.1, "a", "c"), group(0, "b", "d")], [])
    assert joined({0: first, 2: [group(0, "d")]}) == ([group(0.1, "a"), group(0, "b", "d")], [])
    assert joined({0: first, 2: [group(0.2, "c")]}) == ([*first, group(0.2, "c")], [])
    assert joined({0: [group(0, "a"), group(0, "b")], 1: [group(0, "c")]})[0] == [group(0, "a", "c"), group(0, "b")]
    assert joined({0: [group(0.1, "a")], 1: [group(0.1), group(0, "b")]}) == ([group(0.1, "a"), group(0, "b")], [])
    shared = {0: [group(0.1, "tied", "a")], 1: [group(0.1, "b", "tied")]}
    assert joined(shared) == ([group(0.1, "tied", "a", "b")], [])
    _, (problem,) = joined({0: [group(0.1, "tied")], 3: [group(0.2, "tied", "b")]})
    assert problem == "a parameter is in groups with different options: 'tied' (ranks 0 and 3)"


def test_matching_groups_that_were_joined_or_cut() -> None:
    one, two = group(0.1, "a", "c"), group(0, "b")
    cut = [[["a"]], [["b"]], [["c"]]]
    saved = [one["params"], two["params"]]
    alike, unlike = [group(1), group(2), group(1)], [group(1), group(2), group(3)]
    assert match_groups(cut, saved, alike, [one, two]) == ([0, 1, 0], [])
    assert "'c' (in group 0 there, 2 here)" in str(match_groups(cut, saved, unlike, [one, two])[1])
    whole, apart = [[["a"], ["b"], ["c"]]], [["a", "b"], ["c"]]
    assert match_groups(whole, apart, [group(1)], [group(0), group(0)]) == ([0], [])
    assert "'c' (in group 1 there, 0 here)" in str(match_groups(whole, apart, [group(1)], [group(0), group(1)])[1])
    assert match_groups([[["a"]], []], saved, alike, [one, two]) == ([0, 1], [])


def save_groups(root: Path, decays: list[float]) -> str:
    """Each rank has a stage of one part, and one group."""
    part = halves()[dist.get_rank()]
    optimizer = torch.optim.AdamW(part.parameters(), weight_decay=decays[dist.get_rank()])
    with Checkpointer(root, {"model": part, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
    return ""


def test_groups_with_other_options_stay_apart(tmp_path: Path) -> None:
    _distributed.run(2, save_groups, tmp_path, [0.1, 0.2])
    parts = halves()
    groups = [{"params": list(part.parameters()), "weight_decay": 9.0 + index} for index, part in enumerate(parts)]
    optimizer = torch.optim.AdamW(groups)
    with Checkpointer(tmp_path, {"model": parts, "optimizer": optimizer}) as checkpointer:
        checkpointer.load()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.2]
    with Checkpointer(tmp_path, {"model": parts, "optimizer": adamw(parts)}) as checkpointer:
        assert "parameters are in other groups than they were saved in" in error_of(checkpointer.load)


def with_groups(part: nn.Module, is_padded: bool) -> dict[str, Any]:
    """Two groups, by matrices and others: the second one alone where there are no matrices, or an empty one too."""
    split = [[one for one in part.parameters() if (one.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in zip(split, (0.1, 0.0), strict=True)
        if members or is_padded
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    optimizer.step()
    return {"model": part, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def uneven(rank: int) -> nn.Module:
    """A stage with matrices and others, and one without matrices."""
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 3)) if rank == 0 else OrderedDict(second=nn.LayerNorm(3)))


def save_uneven(root: Path, is_padded: bool) -> str:
    components = with_groups(uneven(dist.get_rank()), is_padded)
    with Checkpointer(root, components) as checkpointer:
        if not is_padded:
            return error_of(checkpointer.save, 1)
        checkpointer.save(1)
        checkpointer.load()
    return ""


def test_stages_without_some_parameters_have_empty_groups(tmp_path: Path) -> None:
    for text in _distributed.run(2, save_uneven, tmp_path, False):
        assert "component 'scheduler': rank 1 differ from rank 0" in text and "empty ones" in text
    assert _distributed.run(2, save_uneven, tmp_path, True) == ["", ""]
    whole = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), second=nn.LayerNorm(3)))
    with Checkpointer(tmp_path, with_groups(whole, True)) as checkpointer:
        assert str(checkpointer.load()).count("loaded, as saved") == 3


# ---- names that collide ----


class Stage(nn.Module):
    """With names of its own, that are those of other stages too."""

    def __init__(self, number: int, width: int, own: str) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        if own:
            self.add_module(own, nn.Linear(width, width))


def save_colliding(root: Path, width: int, dp: int, differ: bool, way: str) -> tuple[str, list[str]]:
    """What a save raises, and what it logs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // dp, dp), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    stage = Stage(number, width, f"only{number}" if differ else "")
    model = fully_shard(stage, mesh=mesh["dp"]) if dp > 1 else stage
    with logged() as records:
        try:
            if way == "dcp":
                dcp.save({"model": model.state_dict()}, storage_writer=RingWriter(root), planner=RingSavePlanner())
            else:
                with Checkpointer(root, {"model": model}) as checkpointer:
                    checkpointer.save(1)
        except (CheckpointError, CheckpointException) as error:
            return str(error), records
    return "", records


@pytest.mark.parametrize("width", [8, 256], ids=["small", "large"])
@pytest.mark.parametrize("way", ["dcp", "Checkpointer"])
def test_stages_that_share_names_are_refused(tmp_path: Path, width: int, way: str) -> None:
    """Each stage on a mesh of its own: half of one tensor and half of the other would be saved."""
    for text, _ in _distributed.run(4, save_colliding, tmp_path, width, 2, False, way):
        assert "'model.layers.0.weight' (rank 0 differs from 2; rank 1 differs from 3)" in text
        assert "Stages of a pipeline keep the names that their layers have in the whole model" in text
    assert not [*tmp_path.rglob(".metadata")]


@pytest.mark.parametrize("width", [8, 256], ids=["small", "large"])
def test_whole_tensors_that_share_names(tmp_path: Path, width: int) -> None:
    """A Checkpointer refuses parameters if the ranks have others besides; else they may be replicas: a warning."""
    for text, _ in _distributed.run(2, save_colliding, tmp_path / "refused", width, 1, True, "Checkpointer"):
        assert "ranks 0-1 have different layers, and different tensors that are called 'layers.0.bias'," in text
    for way in ("dcp", "Checkpointer"):
        (text, records), _ = _distributed.run(2, save_colliding, tmp_path / way, width, 1, way == "dcp", way)
        assert not text and "'model.layers.0.weight' (rank 0 differs from 1)" in "".join(records)
        assert "Stages of a pipeline keep the names" in "".join(records)


def save_shared(root: Path, dp: int) -> tuple[str, list[str], bool]:
    """The first stage and the last one have a tensor in common, as tied embeddings are, and keep it alike."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // dp, dp), mesh_dim_names=("pp", "dp"))
    first, second = stage_of(Decoder(), 0, 3), stage_of(Decoder(), 3, LAYERS)
    stage = first if mesh["pp"].get_local_rank() == 0 else second
    torch.manual_seed(0)
    stage.tied = nn.Linear(256, 256)
    model: nn.Module = fully_shard(stage, mesh=mesh["dp"]) if dp > 1 else stage
    optimizer = torch.optim.AdamW(model.parameters())
    weight = stage.tied.weight.detach()
    expected = weight.full_tensor().clone() if isinstance(weight, DTensor) else weight.clone()
    with logged() as records, Checkpointer(root, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            stage.tied.weight.zero_()
        text = str(checkpointer.load())
    weight = stage.tied.weight.detach()
    found = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return text, records, torch.equal(found, expected)


@pytest.mark.parametrize("dp", [1, 2])
def test_what_stages_share_is_saved_once(tmp_path: Path, dp: int) -> None:
    for text, records, is_same in _distributed.run(2 * dp, save_shared, tmp_path, dp):
        assert is_same and not records and text.count("loaded, as saved") == 2


# ---- dcp.save and dcp.load ----


def save_by_hand(root: Path, saved: str, loaded: str) -> bool:
    """As torchtitan does it: one state dict of all parts, with flat names of options; ours and stock's by turns."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_of(training: Training) -> dict[str, Any]:
        pairs = [*zip(training.parts, training.optimizers, strict=True)]
        return {
            "model": {key: value for part in training.parts for key, value in get_model_state_dict(part).items()},
            "optimizer": {
                key: value
                for part, optimizer in pairs
                for key, value in get_optimizer_state_dict(part, optimizer, options=flat).items()
            },
        }

    training = Training(LAYOUTS[saved])
    training.pretend()
    with install():
        dcp.async_save(state_of(training), checkpoint_id=root).result()
    other = Training(LAYOUTS[loaded], seed=1)
    state = state_of(other)
    dcp.load(
        state, storage_reader=RingReader(root), planner=RingLoadPlanner(share="host", process_group=dist.group.WORLD)
    )
    for part, optimizer in zip(other.parts, other.optimizers, strict=True):
        own = part.state_dict().keys()
        set_model_state_dict(part, {key: value for key, value in state["model"].items() if key in own})
        set_optimizer_state_dict(part, optimizer, state["optimizer"], options=flat)
    return same(training.everything(), other.everything())


def test_state_dicts_by_hand(tmp_path: Path) -> None:
    split = "interleaved, an optimizer for each part"
    assert all(_distributed.run(4, save_by_hand, tmp_path / "1", split, "pp2 x tp2, cut elsewhere"))
    assert all(_distributed.run(4, save_by_hand, tmp_path / "2", "pp4", split))


def save_nested(root: Path) -> tuple[list[str], str]:
    stage = halves()[dist.get_rank()]
    optimizer = torch.optim.AdamW(stage.parameters())
    state = {"optimizer": get_optimizer_state_dict(stage, optimizer)}
    with logged() as records:
        dcp.save(state, storage_writer=RingWriter(root), planner=RingSavePlanner())
    dcp.load(state, storage_reader=RingReader(root), planner=RingLoadPlanner())
    try:
        set_optimizer_state_dict(stage, optimizer, state["optimizer"])
    except KeyMismatchError as error:
        return records, str(error)
    return records, ""


def test_nested_groups_say_the_cure(tmp_path: Path) -> None:
    (records, *first), (_, *second) = _distributed.run(2, save_nested, tmp_path)
    assert "'optimizer.param_groups" in records[0] and "flatten_optimizer_state_dict=True" in records[0]
    (failure,) = filter(None, first + second)  # that of the stage whose groups another has not written
    assert "flatten_optimizer_state_dict=True" in failure


# ---- a rank that fails ----


def fail_on_one(root: Path, blocking: bool) -> tuple[list[str], int | None, bool]:
    """The second stage's state cannot be had, then its disk is full; and the save that comes after works."""
    training = Training(LAYOUTS["pp2 x dp2"])
    training.pretend()
    texts = []
    is_at_fault = dist.get_rank() == 3
    with Checkpointer(root, training.components()) as checkpointer:
        for what in ("dcpring.names.state_dict.interface.get_model", "dcpring.store.writer.RingWriter.write_data"):
            with mock.patch(what, side_effect=OSError(28, "full")) if is_at_fault else contextlib.nullcontext():
                started = time.monotonic()
                try:
                    checkpointer.save(1, blocking=blocking).wait()
                except CheckpointError as error:
                    texts.append(str(error))
                assert time.monotonic() - started < 30
        assert checkpointer.latest() is None
        checkpointer.save(2)
    other = Training(LAYOUTS["pp2 x dp2"], seed=1)
    with Checkpointer(root, other.components()) as checkpointer:
        step = checkpointer.load().step
    return texts, step, same(training.everything(), other.everything())


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_stage_that_fails_fails_the_save_on_all(tmp_path: Path, blocking: bool) -> None:
    for texts, step, is_same in _distributed.run(4, fail_on_one, tmp_path, blocking):
        assert len(texts) == 2 and all("rank 3" in text and "full" in text for text in texts)
        assert step == 2 and is_same


# ---- directories of safetensors ----


def export(root: Path, layout: str) -> bool:
    training = Training(LAYOUTS[layout])
    training.pretend()
    with Checkpointer(root, training.components()) as checkpointer:
        checkpointer.save(1, export="hf")
    other = Training(LAYOUTS["pp2 x dp2"], seed=1)
    for part in other.parts:
        load_pretrained(part, root / "step-1" / "hf", unexpected="ignore")
    before, after = training.everything(), other.everything()
    return all(torch.equal(before[name]["value"], after[name]["value"]) for name in before)


@pytest.mark.parametrize("layout", ["pp2 x tp2, cut elsewhere", "interleaved"])
def test_an_export_has_all_stages(tmp_path: Path, layout: str) -> None:
    assert all(_distributed.run(4, export, tmp_path, layout))
    whole = Decoder()
    load_pretrained(whole, tmp_path / "step-1" / "hf")
