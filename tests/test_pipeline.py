"""Pipelines: ranks have the layers of their stages, and any other number of stages goes on from what they save."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _pipeline import LAYOUTS, Decoder, Training, adamw, same, stage_of
from _resume import error_of
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

import dcpring
from dcpring import Checkpointer, Sharded
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
