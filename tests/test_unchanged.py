"""RingWriter(unchanged="link"): what has not changed is not written again, and every checkpoint is whole by itself."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import blank, equal
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from dcpring import _C, RingReader, RingSavePlanner, RingWriter, verify
from dcpring.format.ledger import decode_ledger
from dcpring.format.metadata import (
    METADATA_NAME,
    block_count,
    join_metadata,
    read_trailer,
    referenced_files,
    split_metadata,
)
from dcpring.move.pending import Pending
from dcpring.options import IOStats
from dcpring.torchside import versions

MIB = 1 << 20


def base_of(seed: int = 1, layers: int = 4) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"layer.{n}.weight": torch.randn(600, 500, generator=made) for n in range(layers)}


def adapters_of(seed: int = 2, layers: int = 4) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"layer.{n}.adapter": torch.randn(8, 500, generator=made) for n in range(layers)}


def state_of(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], step: int = 0) -> dict[str, Any]:
    return {"model": {**base, **adapters}, "train": {"step": step, "loss": 0.5}}


def hinted(base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in base.items()}


def save(path: Path, state: Mapping[str, Any], planner: Any = RingSavePlanner, **options: Any) -> IOStats:
    """Saves, and looks at what is there then: by stock, and by verify."""
    writer = RingWriter(path, **{"unchanged": "link", **options})
    dcp.save(dict(state), storage_writer=writer, planner=planner(), no_dist=True)
    check(path, state)
    assert writer.stats is not None
    return writer.stats


def check(path: Path, state: Mapping[str, Any]) -> None:
    for reader in (FileSystemReader(path), RingReader(path)):
        loaded = blank(dict(state))
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert equal(loaded, state)
    report = verify(path)
    assert report.ok, str(report)


def changed(adapters: Mapping[str, Tensor]) -> None:
    for tensor in adapters.values():
        tensor.add_(1)


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def linked_files(path: Path) -> list[Path]:
    return [file for file in path.glob("*.distcp") if file.stat().st_nlink > 1]


# ---- what is written ----


@pytest.mark.parametrize("planner", [RingSavePlanner, dcp.DefaultSavePlanner])
@pytest.mark.parametrize("files", [True, False])
def test_frozen_parameters_are_written_once(tmp_path: Path, planner: Any, files: bool) -> None:
    base, adapters = hinted(base_of()), adapters_of()
    for step in range(4):
        state = state_of(base, adapters, step)
        stats = save(tmp_path / f"step-{step}", state, planner, single_file_per_rank=files)
        if step == 0:
            assert stats.linked_bytes == 0
        else:
            assert stats.linked_bytes == size_of(base)
            assert stats.bytes <= 1.05 * size_of(adapters) + 4096 * 4
            assert stats.tensor_bytes == size_of(base) + size_of(adapters)
        changed(adapters)


def test_without_a_hint_it_takes_one_save_more(tmp_path: Path) -> None:
    base, adapters = base_of(), adapters_of()
    linked = []
    for step in range(4):
        linked.append(save(tmp_path / f"step-{step}", state_of(base, adapters, step)).linked_bytes)
        changed(adapters)
    assert linked == [0, 0, size_of(base), size_of(base)]


def test_nothing_is_linked_unless_asked_for(tmp_path: Path) -> None:
    state = state_of(hinted(base_of()), adapters_of())
    for step in range(3):
        stats = save(tmp_path / f"step-{step}", state, unchanged="write")
        assert not stats.linked_files and not linked_files(tmp_path / f"step-{step}")
        trailer = read_trailer(tmp_path / f"step-{step}" / METADATA_NAME)
        assert trailer is not None and not trailer.ledger_bytes


def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    base = hinted(base_of(layers=3))
    save(tmp_path / "step-0", state_of(base, {}))
    tensors = list(base.values())
    for number, (tensor, at) in enumerate([(0, 1), (1, 12_345), (2, 299_999), (0, 150_000)], 1):
        with torch.no_grad():
            value = tensors[tensor].view(-1)
            value[at] = -value[at]
        save(tmp_path / f"step-{number}", state_of(base, {}))  # which looks at what is there


def test_signs_of_zeros_and_of_nan_count(tmp_path: Path) -> None:
    base = {"weight": torch.nn.Parameter(torch.zeros(MIB), requires_grad=False)}
    save(tmp_path / "step-0", base)
    for number, value in enumerate((-0.0, float("nan")), 1):
        base["weight"].data[700_000] = value
        assert save(tmp_path / f"step-{number}", base).linked_files == 0
        loaded = blank(base)
        dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / f"step-{number}"), no_dist=True)
        assert torch.equal(loaded["weight"].view(torch.int32), base["weight"].data.view(torch.int32))


def test_frozen_parameters_can_be_trusted(tmp_path: Path) -> None:
    """Then a few of their bytes decide, where no change was counted; what is trained is read all the same."""
    base, adapters = hinted(base_of()), adapters_of()
    first = next(iter(base.values()))
    kept = state_of({name: tensor.clone() for name, tensor in base.items()}, adapters)
    for step in range(2):
        assert save(tmp_path / f"step-{step}", state_of(base, adapters), unchanged="trust").linked_files == step
    first.data.view(-1)[77] += 1
    writer = RingWriter(tmp_path / "step-2", unchanged="trust")
    dcp.save(state_of(base, adapters), storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
    check(tmp_path / "step-2", kept)  # as was promised
    with torch.no_grad():
        first.add_(1)
    assert save(tmp_path / "step-3", state_of(base, adapters), unchanged="trust").linked_files == 0
    trained = {name: tensor.requires_grad_() for name, tensor in base.items()}
    assert save(tmp_path / "step-4", state_of(trained, adapters), unchanged="trust").linked_files == 1
    with torch.no_grad():
        list(trained.values())[1].view(-1)[77] += 1
    assert save(tmp_path / "step-5", state_of(trained, adapters), unchanged="trust").linked_files == 0


def _compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each save has read to compare them."""
    counts: list[int] = []
    find_changed = _C.find_changed

    def count(tensors: Any, indices: list[int], *others: Any) -> Any:
        counts.append(len(indices))
        return find_changed(tensors, indices, *others)

    monkeypatch.setattr(_C, "find_changed", count)
    return counts


def test_what_is_trusted_is_what_this_process_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that are counted, other memory and another earlier checkpoint are seen; what is as it was is not read."""
    base, compared = hinted(base_of(layers=2)), _compared(monkeypatch)
    first = base["layer.0.weight"]

    def saved(step: int, **options: Any) -> int:
        compared.clear()
        return save(tmp_path / f"step-{step}", state_of(base, {}), unchanged="trust", **options).linked_files

    assert saved(0) == 0 and saved(1) == 1 and compared == [0]
    with torch.no_grad():
        first.view(-1)[77] += 1
    assert saved(2) == 0 and compared == [1]
    assert saved(3) == 1 and compared == [0]
    assert saved(4, unchanged_from=tmp_path / "step-1") == 0 and compared[0]
    other = torch.nn.Parameter(base["layer.1.weight"].detach().clone(), requires_grad=False)
    other.data.view(-1)[77] += 1
    base["layer.1.weight"] = other
    assert saved(5) == 0 and compared == [1]


def test_a_file_goes_where_one_of_its_tensors_changes(tmp_path: Path) -> None:
    """The others are written once more, in a file of those that have stayed."""
    base = hinted(base_of())
    save(tmp_path / "step-0", state_of(base, {}))
    first = next(iter(base.values()))
    with torch.no_grad():
        first.add_(1)
    assert save(tmp_path / "step-1", state_of(base, {})).linked_bytes == 0
    with torch.no_grad():
        first.add_(1)
    assert save(tmp_path / "step-2", state_of(base, {})).linked_bytes == size_of(base) - first.nbytes


def test_what_changes_now_and_then_is_expected_to_stay_ever_more_seldom(tmp_path: Path) -> None:
    base = hinted(base_of(layers=1))
    tensor = next(iter(base.values()))
    linked = []
    for step in range(12):
        if step % 2:
            with torch.no_grad():
                tensor.view(-1)[77] += 1
        linked.append(save(tmp_path / f"step-{step}", state_of(base, {})).linked_files)
    assert sum(linked[:6]) >= 1 and sum(linked) <= 3


def test_transposed_and_sliced_tensors(tmp_path: Path) -> None:
    whole = torch.randn(700, 900)
    base = hinted({"transposed": whole.t(), "rows": whole[100:600], "columns": whole[:, 5:800], "empty": whole[:0]})
    for step in range(3):
        stats = save(tmp_path / f"step-{step}", base)
        assert stats.linked_files == (step > 0)
    whole[399, 400] += 1
    assert save(tmp_path / "step-3", base).linked_files == 0


def test_tied_tensors(tmp_path: Path) -> None:
    shared = torch.nn.Parameter(torch.randn(500, 600), requires_grad=False)
    state = {"embed": shared, "head": shared, "other": torch.ones(3)}
    for step in range(3):
        stats = save(tmp_path / f"step-{step}", state)
        assert stats.linked_files == (step > 0)
    state["head"] = torch.nn.Parameter(shared.clone(), requires_grad=False)
    save(tmp_path / "step-3", state)


def test_few_bytes_get_no_file_of_their_own(tmp_path: Path) -> None:
    state = {"buffer": torch.ones(1000), "weight": torch.randn(1000, 600)}
    for step in range(3):
        save(tmp_path / f"step-{step}", state)
        assert len(referenced_files(tmp_path / f"step-{step}" / METADATA_NAME)) == 1
        state["weight"].add_(1)


def test_planners_that_make_tensors_write_them_all(tmp_path: Path) -> None:
    class Halves(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return data.clone() if isinstance(data, Tensor) else data

    state = state_of(hinted(base_of()), {})
    for step in range(3):
        assert save(tmp_path / f"step-{step}", state, Halves).linked_files == 0


# ---- which checkpoint is the one before ----


def test_overwriting_links_its_own_files(tmp_path: Path) -> None:
    base, adapters = hinted(base_of()), adapters_of()
    for step in range(3):
        stats = save(tmp_path / "last", state_of(base, adapters, step))
        assert stats.linked_files == (step > 0)
        changed(adapters)
    assert not linked_files(tmp_path / "last")  # the names that went were the others
    assert {entry.name for entry in (tmp_path / "last").iterdir()} == {
        METADATA_NAME,
        *referenced_files(tmp_path / "last" / METADATA_NAME),
    }


def test_the_earlier_one_can_be_given(tmp_path: Path) -> None:
    base = hinted(base_of())
    save(tmp_path / "a" / "one", base)
    assert save(tmp_path / "b" / "two", base).linked_files == 0
    assert save(tmp_path / "c" / "three", base, unchanged_from=tmp_path / "a" / "one").linked_files == 1
    shutil.rmtree(tmp_path / "a")
    assert save(tmp_path / "c" / "four", base, unchanged_from=tmp_path / "a" / "one").linked_files == 0


def test_a_failed_save_is_no_earlier_checkpoint(tmp_path: Path) -> None:
    base = hinted(base_of())
    save(tmp_path / "step-0", base)
    save(tmp_path / "step-1", base)
    (tmp_path / "step-1" / METADATA_NAME).unlink()
    assert save(tmp_path / "step-2", base).linked_files == 1


@pytest.mark.parametrize("goes", [0, 1, 2])
def test_removing_any_harms_no_other(tmp_path: Path, goes: int) -> None:
    base, adapters = hinted(base_of()), adapters_of()
    states = []
    for step in range(3):
        states.append(state_of(base, {name: tensor.clone() for name, tensor in adapters.items()}, step))
        save(tmp_path / f"step-{step}", states[-1])
        changed(adapters)
    shutil.rmtree(tmp_path / f"step-{goes}")
    for step in {0, 1, 2} - {goes}:
        check(tmp_path / f"step-{step}", states[step])


def test_overwriting_a_step_leaves_those_that_share_its_files(tmp_path: Path) -> None:
    base = hinted(base_of())
    before = state_of({name: tensor.clone() for name, tensor in base.items()}, {})
    for step in range(2):
        save(tmp_path / f"step-{step}", state_of(base, {}))
    with torch.no_grad():
        for tensor in base.values():
            tensor.mul_(2)
    for options in ({"unchanged": "link"}, {"unchanged": "write"}):
        save(tmp_path / "step-1", state_of(base, {}), **options)
        check(tmp_path / "step-0", before)
    dcp.save(state_of(base, {}), storage_writer=dcp.FileSystemWriter(tmp_path / "step-1"), no_dist=True)
    check(tmp_path / "step-0", before)


# ---- what does not fit ----


def test_other_names_and_shapes_are_written(tmp_path: Path) -> None:
    base = hinted(base_of())
    save(tmp_path / "step-0", base)
    renamed = {f"other.{name}": tensor for name, tensor in base.items()}
    assert save(tmp_path / "step-1", renamed).linked_files == 0
    reshaped = {name: torch.nn.Parameter(tensor.view(500, 600), requires_grad=False) for name, tensor in base.items()}
    assert save(tmp_path / "step-2", reshaped, unchanged_from=tmp_path / "step-0").linked_files == 0
    typed = {name: torch.nn.Parameter(tensor.view(torch.int32), requires_grad=False) for name, tensor in base.items()}
    assert save(tmp_path / "step-3", typed, unchanged_from=tmp_path / "step-0").linked_files == 0
    more = {"new": torch.ones(5), **base, "train": {"step": 5}}
    assert save(tmp_path / "step-4", more, unchanged_from=tmp_path / "step-0").linked_files == 1
    fewer = dict(list(base.items())[1:])
    assert save(tmp_path / "step-5", fewer, unchanged_from=tmp_path / "step-0").linked_files == 0


def test_a_key_map_goes_by_the_new_names(tmp_path: Path) -> None:
    base = hinted(base_of())
    names = {name: name.replace("layer", "block") for name in base}
    for step in range(3):
        writer = RingWriter(tmp_path / f"step-{step}", unchanged="link", key_map=names)
        dcp.save(dict(base), storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
        check(tmp_path / f"step-{step}", {names[name]: tensor for name, tensor in base.items()})
        assert writer.stats is not None and writer.stats.linked_files == (step > 0)


def test_linked_files_are_synced_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a checkpoint that was not made durable, and clones: all are under way when anything is waited for."""
    base, synced = hinted(base_of()), []
    wait = Pending.wait

    def waiting(pending: Pending, events: Any) -> None:
        synced.append(len(pending.synced))
        wait(pending, events)

    monkeypatch.setattr(Pending, "wait", waiting)
    options: dict[str, Any] = {"single_file_per_rank": False}
    save(tmp_path / "step-0", base, sync_files=False, **options)
    assert save(tmp_path / "step-1", base, **options).linked_files == len(base)
    assert save(tmp_path / "step-2", base, **options).linked_files == len(base)
    assert synced == [len(base) + 1, len(base) + 1, 1], "besides the metadata; what is durable is not synced again"


def without_links(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(_: str, __: str, directory: str, name: str, *___: Any) -> bool:
        Path(directory, name).touch()  # as on a storage that is slow to remove what was tried
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_C, "link_file", refuse)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.EIO, errno.ENOENT])
def test_where_links_cannot_be_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    base, adapters = hinted(base_of()), adapters_of()
    versions.say_once.cache_clear()
    without_links(monkeypatch, number)
    with caplog.at_level(logging.INFO, "dcpring"):
        for step in range(4):
            stats = save(tmp_path / f"step-{step}", state_of(base, adapters, step))
            assert stats.linked_files == 0 and stats.bytes > size_of(base)
            changed(adapters)
    said = [record for record in caplog.records if "unchanged tensors" in record.message]
    assert len(said) == (number != errno.ENOENT)
    assert all(os.strerror(number) in record.message for record in said)


def test_a_file_that_was_cut_is_not_linked(tmp_path: Path) -> None:
    base = hinted(base_of())
    save(tmp_path / "step-0", base)
    for file in (tmp_path / "step-0").glob("*.distcp"):
        os.truncate(file, 5000)
    assert save(tmp_path / "step-1", base).linked_files == 0


def damage(change: Callable[[bytes], bytes], path: Path) -> None:
    """Changes the ledgers in a metadata file, whose CRC stays right."""
    parts = split_metadata(path.read_bytes(), path)
    assert parts.trailer is not None
    ledgers = [change(bytes(ledger)) for ledger in parts.ledgers]
    path.write_bytes(join_metadata(bytes(parts.pickled), parts.trailer, bytes(parts.tables), ledgers))


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: b"",
        lambda ledger: ledger[:30],
        lambda ledger: ledger[:-20],
        lambda ledger: b"DRL\x09" + ledger[4:],
        lambda ledger: ledger[:4] + b"\xff\xff\xff\x7f" + ledger[8:],
        lambda ledger: ledger[:200] + bytes(len(ledger) - 200),
        lambda ledger: bytes(len(ledger)),
    ],
)
def test_ledgers_that_are_none(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    base = hinted(base_of())
    save(tmp_path / "step-0", base)
    damage(change, tmp_path / "step-0" / METADATA_NAME)
    assert save(tmp_path / "step-1", base).linked_files == 0
    check(tmp_path / "step-0", base)


@pytest.mark.parametrize("less", [4, 600_000])
def test_ledgers_of_other_sizes(tmp_path: Path, less: int) -> None:
    base = hinted(base_of())
    save(tmp_path / "step-0", base)

    def lie(ledger: bytes) -> bytes:
        read = decode_ledger(ledger)
        storage = _C.StorageIndex(len(read))
        places = [read.place(row) for row in range(len(read))]
        storage.put([(*place[:5], place[5] - less, None) for place in places])
        read.storage = storage
        counts = [block_count(place[4], place[5] - less) for place in places]
        read.digests = {row: bytes(_C.DIGEST_BYTES * count) for row, count in enumerate(counts)}
        return read.encode()

    damage(lie, tmp_path / "step-0" / METADATA_NAME)
    for unchanged in ("link", "trust"):
        path = tmp_path / unchanged
        assert save(path, base, unchanged_from=tmp_path / "step-0", unchanged=unchanged).linked_files == 0


def test_ledgers_do_not_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    base = hinted(base_of())
    save(tmp_path / "step-0", base)
    (secret,) = (tmp_path / "step-0").glob("*.distcp")
    moved = secret.rename(tmp_path / secret.name)
    metadata = tmp_path / "step-0" / METADATA_NAME
    for name in (f"../{moved.name}", str(moved)):

        def lead_out(ledger: bytes, name: str = name) -> bytes:
            read = decode_ledger(ledger)
            storage = _C.StorageIndex(len(read))
            storage.put([(name, *read.place(row)[1:]) for row in range(len(read))])
            read.storage = storage
            return read.encode()

        damage(lead_out, metadata)
        assert save(tmp_path / "step-1", base, unchanged_from=tmp_path / "step-0").linked_files == 0
    moved.rename(secret)
    secret.rename(tmp_path / "target")
    secret.symlink_to(tmp_path / "target")
    assert save(tmp_path / "step-2", base, unchanged_from=tmp_path / "step-0").linked_files == 0


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='must be "write", "link" or "trust"'):
        RingWriter(tmp_path, unchanged="copy")  # type: ignore[arg-type]
