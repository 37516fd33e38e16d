"""Lightning with its three plugs: ``install()``, ``RingCheckpointIO`` and ``RingCheckpoint``."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _ranks
import pytest
import torch
from _checkpoints import assert_equal, is_ours
from _logs import logged
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateFinder, Timer
from lightning.pytorch.demos.boring_classes import BoringModel

import dcpring
from dcpring.data import ElasticLoader, ElasticSampler
from dcpring.integrations.lightning import RingCheckpoint, RingCheckpointIO

_ranks.load_before("lightning_program", "fabric_program")


def train(folder: Path, world: int, *options: object) -> str:
    return _ranks.run("lightning_program.py", world, folder, *options)


def run_fabric(folder: Path, world: int, *options: object) -> str:
    return _ranks.run("fabric_program.py", world, folder, *options)


def assert_same_tree(left: Any, right: Any, at: str = "") -> None:
    assert type(left) is type(right), at
    if isinstance(left, dict):
        assert list(left) == list(right), at
        for key in left:
            assert_same_tree(left[key], right[key], f"{at}/{key!r}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), at
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same_tree(one, other, f"{at}/{i}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), at
    elif "path" not in at and "dirpath" not in at and ".ckpt" not in str(left):
        assert left == right, at


def check_install(run: Callable[..., str], folder: Path, strategy: str, names: tuple[str, ...]) -> None:
    """What is saved under these names, and what goes on from the first on 3 ranks, is stock's."""
    stock = ("--strategy", strategy)
    ring = (*stock, "--way", "install")
    run(folder / "ring", 2, *ring)
    run(folder / "stock", 2, *stock)
    for name in names:
        assert_equal(folder / "ring" / name, folder / "stock" / name)
    last = names[-1]
    assert is_ours(folder / "ring" / last) and not is_ours(folder / "stock" / last)
    half = folder / "ring" / names[0]
    run(folder / "on 3", 3, *ring, "--resume", half)
    run(folder / "stock on 3", 3, *stock, "--resume", half)
    assert_equal(folder / "on 3" / last, folder / "stock on 3" / last)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_install_serves_sharded_strategies(tmp_path: Path, strategy: str) -> None:
    check_install(train, tmp_path, strategy, ("step=3.ckpt", "step=6.ckpt", "last.ckpt"))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_install_serves_fabric(tmp_path: Path, strategy: str) -> None:
    check_install(run_fabric, tmp_path, strategy, ("step-3", "step-6"))
    half = tmp_path / "ring" / "step-3"
    run_fabric(tmp_path / "resumed", 2, "--strategy", strategy, "--way", "install", "--resume", half)
    assert_equal(tmp_path / "resumed" / "step-6", tmp_path / "stock" / "step-6")


def test_checkpoint_io_serves_fabric(tmp_path: Path) -> None:
    run_fabric(tmp_path / "ring", 2, "--strategy", "ddp", "--way", "io")
    run_fabric(tmp_path / "stock", 2, "--strategy", "ddp")
    ours = dcpring.load(tmp_path / "ring" / "step-6")
    assert_same_tree(ours, torch.load(tmp_path / "stock" / "step-6", weights_only=False))
    assert list(ours["optimizer"]["state"]) == list(range(6))
    run_fabric(tmp_path / "on 3", 3, "--strategy", "ddp", "--way", "io", "--resume", tmp_path / "ring" / "step-3")
    run_fabric(tmp_path / "stock on 3", 3, "--strategy", "ddp", "--resume", tmp_path / "stock" / "step-3")
    stocks = torch.load(tmp_path / "stock on 3" / "step-6", weights_only=False)
    assert_same_tree(dcpring.load(tmp_path / "on 3" / "step-6"), stocks)


@pytest.mark.parametrize("way", ["io", "async io"])
def test_checkpoint_io_gives_back_the_same_tree(tmp_path: Path, way: str) -> None:
    train(tmp_path / "ring", 2, "--strategy", "ddp", "--way", way)
    train(tmp_path / "stock", 2, "--strategy", "ddp")
    ours = dcpring.load(tmp_path / "ring" / "step=6.ckpt")
    stocks = torch.load(tmp_path / "stock" / "step=6.ckpt", weights_only=False)
    assert list(ours["optimizer_states"][0]["state"]) == list(range(6))
    assert_same_tree(ours, stocks)
    assert dcpring.verify(tmp_path / "ring" / "last.ckpt").ok


@pytest.mark.parametrize("saved, resumed", [("io", "io"), ("stock", "io")])
def test_a_resume_with_checkpoint_io_goes_on_as_with_stock(tmp_path: Path, saved: str, resumed: str) -> None:
    train(tmp_path / "whole", 2, "--strategy", "ddp", "--way", saved)
    train(tmp_path / "ring", 2, "--strategy", "ddp", "--way", resumed, "--resume", tmp_path / "whole" / "step=3.ckpt")
    train(tmp_path / "stock", 2, "--strategy", "ddp")
    ours = dcpring.load(tmp_path / "ring" / "step=6.ckpt")
    stocks = torch.load(tmp_path / "stock" / "step=6.ckpt", weights_only=False)
    assert_same_tree(ours["state_dict"], stocks["state_dict"])
    assert_same_tree(ours["optimizer_states"], stocks["optimizer_states"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_callback_resumes_where_training_ended(tmp_path: Path, strategy: str) -> None:
    ring = ("--way", "callback", "--strategy", strategy)
    train(tmp_path / "whole", 2, *ring)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["step-3", "step-6"]
    train(tmp_path / "cut", 2, *ring, "--steps", 3)
    train(tmp_path / "cut", 2, *ring)
    for learnt in ("model.*", "optimizer_0.*", "scheduler_0.*"):  # an iterator of the loader draws random numbers
        assert_equal(tmp_path / "whole" / "step-6", tmp_path / "cut" / "step-6", learnt)
    train(tmp_path / "cut", 3, *ring, "--steps", 8)
    assert dcpring.verify(tmp_path / "cut" / "step-8").ok


class Dies(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("as asked for")


def test_the_callback_closes_its_checkpointer_when_training_fails(tmp_path: Path) -> None:
    """As a notebook goes on: the save in the background is over, and another training may use the folder."""
    saving = RingCheckpoint(tmp_path / "ckpt", every_n_steps=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=3, callbacks=[saving, Dies()], **quiet)
    with pytest.raises(RuntimeError, match="as asked for"):
        trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.ones(8, 32)))
    assert saving.checkpointer is None
    assert dcpring.verify(tmp_path / "ckpt" / "step-1").ok


def test_epochs_are_whole_on_other_ranks(tmp_path: Path) -> None:
    """Cut within the first epoch on 2 ranks, within the second on 1, at its end on 3: each has all samples, once."""
    ring = ("--way", "callback", "--strategy", "ddp", "--epochs", 4)
    given: dict[str, list[int]] = {}
    validated: list[int] = []
    for world, cut_at in ((2, 3), (1, 27), (3, 33), (2, 0)):
        train(tmp_path, world, *ring, "--die-at", cut_at)
        for rank in range(world):
            seen = json.loads((tmp_path / f"seen-by-{rank}-of-{world}.json").read_text())
            for epoch, samples in seen["given"].items():
                given.setdefault(epoch, []).extend(samples)
        validated += seen["validated"]
    assert {epoch: sorted(samples) for epoch, samples in given.items()} == {str(n): list(range(48)) for n in range(4)}
    assert validated == [0, 1, 2, 3]


def test_a_loader_of_each_rank_goes_on_where_it_is_the_one_that_runs(tmp_path: Path) -> None:
    """Of one without a sampler for ranks Lightning makes another: the state of the given one would say nothing."""
    ring = ("--way", "callback", "--strategy", "ddp", "--per-rank")

    def given(name: str) -> list[list[int]]:
        seen = [json.loads((tmp_path / name / f"seen-by-{rank}-of-2.json").read_text()) for rank in range(2)]
        return [each["given"]["0"] for each in seen]

    train(tmp_path / "whole", 2, *ring, "own")
    train(tmp_path / "cut", 2, *ring, "own", "--die-at", 4)
    train(tmp_path / "cut", 2, *ring, "own")
    assert given("cut") == [whole[6:] for whole in given("whole")] and given("cut")[0] != given("cut")[1]
    with pytest.raises(AssertionError, match=r"component 'data' is not the loader.*use_distributed_sampler=False"):
        train(tmp_path / "other", 2, *ring, "lightning")
    assert not (tmp_path / "other").exists()


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Counting(BoringModel):
    """Notes what each epoch was given, and fails once, at the batch ``die_at``."""

    def __init__(self, die_at: int | None = None) -> None:
        super().__init__()
        self.die_at, self.given = die_at, dict[int, list[int]]()
        self.batches = 0

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        self.batches += 1
        if self.batches - 1 == self.die_at:
            raise RuntimeError("as asked for")
        self.given.setdefault(self.current_epoch, []).extend(batch[:, 0].int().tolist())
        return super().training_step(batch, index)


@pytest.mark.parametrize("die_at, begins_at", [(2, 0), (5, 4), (9, 8), (None, 24)])
@pytest.mark.parametrize("is_reused", [True, False])
def test_another_fit_goes_on_where_the_checkpoint_was(
    tmp_path: Path, die_at: int | None, begins_at: int, is_reused: bool
) -> None:
    """After one that has failed before the first checkpoint, within an epoch, at its end, and after a whole one."""
    numbers = torch.arange(16.0).unsqueeze(1).expand(16, 32)
    loader = ElasticLoader(torch.utils.data.DataLoader(numbers, batch_size=2, sampler=ElasticSampler(16)))
    saving = RingCheckpoint(tmp_path / "ckpt", every_n_steps=4, components={"data": loader})
    trainer, model = Trainer(max_epochs=3, callbacks=[saving], **QUIET), Counting(die_at)
    if die_at is None:
        trainer.fit(model, loader)
    else:
        with pytest.raises(RuntimeError, match="as asked for"):
            trainer.fit(model, loader)
    model.given = {}
    if not is_reused:
        saving = RingCheckpoint(tmp_path / "ckpt", every_n_steps=4, components={"data": loader})
        trainer = Trainer(max_epochs=3, callbacks=[saving], **QUIET)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, loader)
    assert saving.report is not None and saving.report.step == (begins_at or None)
    assert "afterwards" not in str(saving.report)
    first, skipped = divmod(begins_at, 8)
    sampler = ElasticSampler(16)
    orders = []
    for epoch in range(first, 4):
        sampler.seek(epoch, 2 * skipped if epoch == first else 0)
        orders.append(list(sampler))
    assert model.given == dict(zip(range(first, 4), orders, strict=True))


def test_what_a_resume_does_not_fit_can_be_left_out(tmp_path: Path) -> None:
    loader, folder = torch.utils.data.DataLoader(torch.ones(8, 32)), tmp_path / "ckpt"
    trainer = Trainer(max_steps=2, callbacks=[RingCheckpoint(folder, every_n_steps=2)], **QUIET)
    trainer.fit(BoringModel(), loader)
    trainer.save_checkpoint(tmp_path / "lightning.ckpt")
    more = {"every_n_steps": 2, "components": {"more": dcpring.Replicated({"n": 1})}}
    with pytest.raises(dcpring.CheckpointError, match=r"exclude=\['more'\]"):
        Trainer(max_steps=4, callbacks=[RingCheckpoint(folder, **more)], **QUIET).fit(BoringModel(), loader)
    trainer = Trainer(max_steps=4, callbacks=[RingCheckpoint(folder, exclude=["more"], **more)], **QUIET)
    trainer.fit(BoringModel(), loader)
    assert trainer.global_step == 4
    trainer = Trainer(max_steps=6, callbacks=[RingCheckpoint(folder, **more)], **QUIET)
    with pytest.raises(ValueError, match="leave ckpt_path out"):
        trainer.fit(BoringModel(), loader, ckpt_path=tmp_path / "lightning.ckpt")


def test_weights_of_a_checkpoint_are_tested_as_the_page_says(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(torch.ones(8, 32))
    trained, module = BoringModel(), BoringModel()
    trainer = Trainer(max_steps=2, callbacks=[RingCheckpoint(tmp_path / "ckpt", every_n_steps=2)], **QUIET)
    trainer.fit(trained, data)
    module.load_state_dict(dcpring.load(tmp_path / "ckpt" / "step-2")["model"])
    assert_same_tree(module.state_dict(), trained.state_dict())
    assert trainer.test(module, data) == Trainer(**QUIET).test(trained, data)
    with pytest.raises(ValueError, match="not configured to save the best"):
        trainer.test(dataloaders=data)


class TwoSteps(BoringModel):
    """Each batch is a step of two optimizers."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.layer.weight], lr=0.1), torch.optim.Adam([self.layer.bias], lr=0.1)]


def test_steps_that_a_batch_skips_are_saved_after_it(tmp_path: Path) -> None:
    trainer = Trainer(max_steps=10, callbacks=[RingCheckpoint(tmp_path, every_n_steps=3)], **QUIET)
    trainer.fit(TwoSteps(), torch.utils.data.DataLoader(torch.ones(8, 32)))
    assert {path.name for path in tmp_path.iterdir()} == {"step-4", "step-6", "step-10"}


class Averages(EMAWeightAveraging):
    """As the page of Lightning has it: the average is part of the callback's state."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"average": self._average_model.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average_model.load_state_dict(state_dict["average"])
        super().load_state_dict(state_dict)


def fit_with_callbacks(folder: Path, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The average that ``fit`` ends with, and what stops early."""
    torch.manual_seed(0)
    stopping = EarlyStopping("train_loss", patience=9, mode="max", check_on_train_epoch_end=True)
    callbacks = [RingCheckpoint(folder, every_n_steps=2), Averages(decay=0.5), Timer("00:01:00:00"), stopping]
    trainer = Trainer(max_steps=steps, callbacks=callbacks, **QUIET)

    class Model(BoringModel):
        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            loss = super().training_step(batch, index)["loss"]
            self.log("train_loss", loss, on_epoch=True)
            return loss

    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 32), batch_size=2))
    return model.state_dict(), stopping.state_dict()


def test_callbacks_go_on_where_they_were(tmp_path: Path) -> None:
    whole = fit_with_callbacks(tmp_path / "whole", 6)
    fit_with_callbacks(tmp_path / "cut", 4)
    shutil.rmtree(tmp_path / "cut" / "step-4")  # the callback that averages ends with the average in the model
    assert_same_tree(fit_with_callbacks(tmp_path / "cut", 6), whole)


def test_what_hooks_put_into_checkpoints_is_said_to_be_left_out(tmp_path: Path) -> None:
    with logged() as texts:
        for callback in EMAWeightAveraging(), Timer():
            callbacks = [RingCheckpoint(tmp_path / type(callback).__name__, every_n_steps=2), callback]
            trainer = Trainer(max_steps=1, callbacks=callbacks, **QUIET)
            trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.ones(8, 32)))
    assert [text for text in texts if "what on_save_checkpoint of EMAWeightAveraging adds" in text] == texts


class Tunable(BoringModel):
    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_tuner_runs_before_a_resume(tmp_path: Path) -> None:
    """It saves and restores a checkpoint of its own, which is none that ``fit`` was given."""
    for steps in (2, 4):
        callbacks = [RingCheckpoint(tmp_path / "ckpt", every_n_steps=2), LearningRateFinder(num_training_steps=3)]
        trainer = Trainer(max_steps=steps, callbacks=callbacks, default_root_dir=tmp_path, **QUIET)
        trainer.fit(Tunable(), torch.utils.data.DataLoader(torch.ones(8, 32)))
        assert trainer.global_step == steps
    assert {path.name for path in (tmp_path / "ckpt").iterdir()} == {"step-2", "step-4"}


def test_a_file_of_before_stays_until_the_folder_in_its_place_is_complete(tmp_path: Path) -> None:
    path, plugin = tmp_path / "last.ckpt", RingCheckpointIO(objects="error")
    torch.save({"step": 1}, path)
    with pytest.raises(dcpring.CheckpointError, match="'what'"):
        plugin.save_checkpoint({"what": RingCheckpointIO()}, path)
    assert plugin.load_checkpoint(path) == {"step": 1}
    plugin.save_checkpoint({"step": {2: 3}}, path)
    assert plugin.load_checkpoint(path) == {"step": {2: 3}}
    assert list(tmp_path.iterdir()) == [path]


@dataclass
class Config:
    lr: float = 0.1


class Configured(BoringModel):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_what_a_load_would_refuse_is_said_in_lightnings_words(tmp_path: Path) -> None:
    """Hyperparameters of a class of one's own: at the save, and at the load. What is said helps."""
    path, data = tmp_path / "a.ckpt", torch.utils.data.DataLoader(torch.ones(8, 32))
    quiet = {**QUIET, "enable_checkpointing": False}
    with logged() as texts:
        trainer = Trainer(max_steps=1, plugins=RingCheckpointIO(), **quiet)
        trainer.fit(Configured(Config()), data)
        trainer.save_checkpoint(path)
    (warning,) = (text for text in texts if "what a load refuses by default" in text)
    with pytest.raises(dcpring.CheckpointError) as not_saved:
        RingCheckpointIO(objects="error").save_checkpoint({"config": Config()}, tmp_path / "b.ckpt")
    with pytest.raises(dcpring.UntrustedCheckpointError) as not_loaded:
        Trainer(max_steps=2, plugins=RingCheckpointIO(), **quiet).fit(Configured(Config()), data, ckpt_path=path)
    for said in warning, str(not_saved.value), str(not_loaded.value):
        assert "weights_only=False" in said and "RingCheckpointIO(safe_globals=[" in said and "Config" in said
        assert not re.search("RingReader|RingWriter|trusted=", said)
    for plugin, given in (RingCheckpointIO(), {"weights_only": False}), (RingCheckpointIO(safe_globals=[Config]), {}):
        trainer = Trainer(max_steps=2, plugins=plugin, **quiet)
        trainer.fit(Configured(Config()), data, ckpt_path=path, **given)
        assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("plug", "said"),
    (
        (lambda path: RingCheckpointIO(worker=4), "RingWriter() has no argument 'worker'; did you mean 'workers'?"),
        (lambda path: RingCheckpointIO(objects="all"), "objects='all': must be"),
        (
            lambda path: RingCheckpoint(path, every_n_steps=1, keep_lst=1),
            "RingCheckpoint() has no argument 'keep_lst'; did you mean 'keep_last'?",
        ),
    ),
)
def test_options_are_tried_when_a_plug_is_made(tmp_path: Path, plug: Callable[[Path], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        plug(tmp_path)
    assert said in str(caught.value)


def test_remote_folders_are_refused_in_lightnings_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dcpring.CheckpointError, match=r"s3://bucket/ckpt is remote.*or use ModelCheckpoint, which"):
        RingCheckpoint("s3://bucket/ckpt", every_n_steps=1)
    plugin = RingCheckpointIO()
    with pytest.raises(dcpring.CheckpointError, match="or use ModelCheckpoint without RingCheckpointIO"):
        plugin.save_checkpoint({"step": 1}, "memory://last.ckpt")
    assert not list(tmp_path.iterdir())
    TorchCheckpointIO().save_checkpoint({"step": 1}, "memory://last.ckpt")
    assert plugin.load_checkpoint("memory://last.ckpt") == {"step": 1}


def test_a_link_is_replaced_and_what_it_shows_stays(tmp_path: Path) -> None:
    """As where ``save_last="link"`` has become ``save_last=True``."""
    best, last, plugin = tmp_path / "best.ckpt", tmp_path / "last.ckpt", RingCheckpointIO()
    plugin.save_checkpoint({"step": 1}, best)
    last.symlink_to(best.name)
    plugin.save_checkpoint({"step": 2}, last)
    assert (plugin.load_checkpoint(best), plugin.load_checkpoint(last)) == ({"step": 1}, {"step": 2})
    assert not last.is_symlink()
