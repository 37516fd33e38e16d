"""What is not trained is copied once by a stager that is told to trust, and again where it may have changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _kinds import assert_same_bits
from _twin import Twin, twin
from test_stager import Held
from test_unchanged_ranks import Lora
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcpring import _C, Checkpointer, RingLoadPlanner, RingReader, RingSavePlanner, RingStager, RingWriter
from dcpring.move import staging
from dcpring.move.device import Room
from dcpring.move.frozen import LEAST_BYTES, sign_of_content
from dcpring.move.staging import SideStreams, StagingBuffer

__all__ = ["twin"]

SIZE = LEAST_BYTES // 4
WAIT = 60.0


pytestmark = pytest.mark.usefixtures("group_of_one")


class Copied:
    """Counts the bytes of plain tensors in host memory that are copied, by the core's marks for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes = 0
        self._tensors: Callable[[list[Tensor]], _C.Tensors] = _C.Tensors
        self._sizes: dict[int, list[int]] = {}
        copy = _C.copy_tensors

        def copying(sources: _C.Tensors, targets: _C.Tensors, mask: bytes, workers: int) -> None:
            self._bytes += sum(compress(self._sizes[id(sources)], mask))
            copy(sources, targets, mask, workers)

        def made(tensors: list[Tensor]) -> _C.Tensors:
            handles = self._tensors(tensors)
            self._sizes[id(handles)] = [tensor.nbytes for tensor in tensors]
            return handles

        monkeypatch.setattr(_C, "copy_tensors", copying)
        monkeypatch.setattr(_C, "Tensors", made)

    def take(self) -> int:
        """Since the last call."""
        count, self._bytes = self._bytes, 0
        return count


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Copied:
    return Copied(monkeypatch)


def _frozen(seed: int = 0, size: int = SIZE) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(seed)), requires_grad=False)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def _dtensor(tensor: Tensor) -> nn.Parameter:
    made = DTensor.from_local(tensor.detach().clone(), _mesh(), [Shard(0)])
    return nn.Parameter(made, requires_grad=False)


def _stage(buffer: StagingBuffer, state: Any, frozen: Any = ()) -> Any:
    """Stages, and sees that nothing is stale."""
    staged = buffer.stage(state, frozen)
    assert_same_bits(_local(staged), _local(state))
    return staged


def _local(state: Any) -> Any:
    return {
        key: value.to_local().detach() if isinstance(value, DTensor) else value.detach() for key, value in state.items()
    }


# ---- what is copied ----


def test_what_is_frozen_is_copied_once(copied: Copied) -> None:
    """And only if it is trusted. What is small, no parameter, or requires a gradient, is copied each time."""
    base, wrapped = _frozen(), _dtensor(_frozen(1))
    state = {
        **{"base": base, "dtensor": wrapped, "transposed": nn.Parameter(torch.randn(128, SIZE // 128).t(), False)},
        **{"small": _frozen(2, SIZE - 1), "buffer": torch.randn(SIZE), "trained": nn.Parameter(torch.randn(SIZE))},
        "gaps": nn.Parameter(torch.randn(2 * SIZE)[::2], requires_grad=False),
    }
    everything = 6 * LEAST_BYTES + LEAST_BYTES - 4
    trusting, plain = StagingBuffer(), StagingBuffer()
    counts = []
    for buffer, frozen in ((trusting, ()), (trusting, ()), (trusting, ()), (plain, None), (plain, None)):
        _stage(buffer, state, frozen)
        counts.append(copied.take())
    rest = everything - 3 * LEAST_BYTES
    assert counts == [everything, rest, rest, everything, everything]
    _stage(trusting, state, None)
    assert copied.take() == everything, "all is copied where nothing is trusted"
    _stage(trusting, state)
    assert copied.take() == everything, "nor is anything known of such a copy"


def test_tensors_that_do_not_say_it_are_named(copied: Copied) -> None:
    """Those of ``state_dict()`` are no parameters."""
    one, other = torch.randn(SIZE), torch.randn(SIZE)
    dtensor = DTensor.from_local(torch.randn(SIZE), _mesh(), [Shard(0)])
    state, buffer = {"one": one, "other": other, "dtensor": dtensor}, StagingBuffer()
    counts = []
    for frozen in ((), (), (one, dtensor), (one, dtensor), (one,)):
        _stage(buffer, state, frozen)
        counts.append(copied.take() // LEAST_BYTES)
    assert counts == [3, 3, 3, 1, 2]


def test_what_is_tied_is_frozen_if_all_of_it_is(copied: Copied) -> None:
    one, other = _frozen(), _frozen(1)
    state = {"one": one, "tied": one, "other": other, "same": other.detach()}
    buffer = StagingBuffer()
    for _ in range(2):
        staged = _stage(buffer, state)
        assert staged["one"].data_ptr() == staged["tied"].data_ptr()
    assert copied.take() == (2 + 1) * LEAST_BYTES


def test_the_state_is_not_kept_alive() -> None:
    state, buffer = {"base": _frozen()}, StagingBuffer()
    copy = buffer.stage(state, ())["base"]
    sign = sign_of_content(copy, copy)
    assert sign is not None and not sign.storage.expired()
    del state
    assert sign.storage.expired()


# ---- what has changed ----


def _load_again(value: Tensor, folder: Path, planner: Any = None) -> None:
    stored = {"w": torch.randn(SIZE)}
    dcp.save(stored, storage_writer=RingWriter(folder))
    dcp.load({"w": value.detach()}, storage_reader=RingReader(folder), planner=planner)


def _train(value: Any, **options: Any) -> None:
    value.requires_grad_(True)
    optimizer = torch.optim.AdamW([value], lr=0.1, **options)
    (value * 2).sum().backward()
    optimizer.step()
    value.grad = None
    value.requires_grad_(False)


def _replace_data(value: Any) -> None:
    value.data = torch.randn(SIZE)


def _write_one(value: Any) -> None:
    with torch.no_grad():
        value[3000] = -1.0  # which no sample sees


CHANGES: dict[str, Callable[[Any, Path], Any]] = {
    "one element": lambda value, _: _write_one(value),
    "its data": lambda value, _: value.data.add_(1),
    "other data": lambda value, _: _replace_data(value),
    "by NumPy": lambda value, _: value.detach().numpy().__iadd__(1),
    "stock's load": lambda value, folder: dcp.load(
        {"w": value.detach()}, storage_reader=_saved(folder, FileSystemReader)
    ),
    "a load": lambda value, folder: _load_again(value, folder),
    "a load by tables": lambda value, folder: _load_again(value, folder, RingLoadPlanner()),
    "training": lambda value, _: _train(value),
    "training, foreach": lambda value, _: _train(value, foreach=True),
    "training, fused": lambda value, _: _train(value, fused=True),
    "broadcast": lambda value, _: dist.broadcast(value.data.mul_(2), 0),
}
DTENSOR_CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda value: value.detach().add_(1),
    "its local part": lambda value: value.to_local().detach().add_(1),
    "its data": lambda value: value.data.add_(1),
    "foreach": lambda value: torch._foreach_add_([value.detach()], [1.0]),
    "training": lambda value: _train(value),
    "training, foreach": lambda value: _train(value, foreach=True),
}


def _saved(folder: Path, reader: Any) -> Any:
    dcp.save({"w": torch.randn(SIZE)}, storage_writer=RingWriter(folder))
    return reader(folder)


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_copied_again(tmp_path: Path, copied: Copied, change: str) -> None:
    """``_stage`` compares; what has not changed stays uncopied."""
    state, buffer = {"w": _frozen(), "other": _frozen(1)}, StagingBuffer()
    for n in range(3):
        _stage(buffer, state)
        copied.take()
        CHANGES[change](state["w"], tmp_path / str(n))
        _stage(buffer, state)
        assert copied.take() == LEAST_BYTES
        _stage(buffer, state)
        assert copied.take() == 0


@pytest.mark.parametrize("change", DTENSOR_CHANGES)
def test_a_dtensor_that_has_changed_is_copied_again(copied: Copied, change: str) -> None:
    state, buffer = {"w": _dtensor(_frozen()), "other": _frozen(1)}, StagingBuffer()
    for _ in range(3):
        _stage(buffer, state)
        copied.take()
        DTENSOR_CHANGES[change](state["w"])
        _stage(buffer, state)
        assert copied.take() == LEAST_BYTES
        _stage(buffer, state)
        assert copied.take() == 0


def test_memory_that_was_let_go_of_and_taken_again() -> None:
    """As FSDP does with what it gathers, without a count."""
    state, buffer = {"w": _frozen(), "other": _frozen(1)}, StagingBuffer()
    storage = state["w"].untyped_storage()
    for value in range(3):
        storage.resize_(0)
        storage.resize_(LEAST_BYTES)
        state["w"].data.fill_(value)
        assert bool((buffer.stage(state, ())["w"] == value).all())


def test_another_tensor_in_the_same_memory_is_another_one(copied: Copied) -> None:
    """As after a model was thrown away, and another one made: the address is the same, and so may be the count."""
    memory, buffer = bytearray(LEAST_BYTES), StagingBuffer()
    for _ in range(3):
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        _stage(buffer, {"w": nn.Parameter(tensor, requires_grad=False)})
        assert copied.take() == LEAST_BYTES
        memory[9000] ^= 255  # which no sample sees, and no count
        del tensor


def test_a_tensor_that_is_saved_while_it_is_trained(copied: Copied) -> None:
    state, buffer = {"w": _frozen()}, StagingBuffer()
    _stage(buffer, state)
    state["w"].requires_grad_(True)
    _stage(buffer, state)
    state["w"].requires_grad_(False)
    copied.take()
    _stage(buffer, state)
    assert copied.take() == LEAST_BYTES
    _stage(buffer, state)
    assert copied.take() == 0


def test_a_copy_that_somebody_has_written_to_is_none(copied: Copied) -> None:
    state, buffer = {"w": _frozen()}, StagingBuffer()
    staged = _stage(buffer, state)
    staged["w"].add_(1)
    _stage(buffer, state)
    assert copied.take() == 2 * LEAST_BYTES


def test_tensors_that_change_places(copied: Copied) -> None:
    one, other, buffer = _frozen(), _frozen(1), StagingBuffer()
    for state in ({"a": one, "b": other}, {"a": other, "b": one}, {"b": one, "a": other}):
        _stage(buffer, state)
    assert copied.take() == (2 + 2 + 2) * LEAST_BYTES


def test_other_states_take_the_memory_anew(copied: Copied) -> None:
    """Their tensors lie elsewhere, whatever the buffer knew of those before."""
    base, buffer = _frozen(), StagingBuffer()
    states = [
        {"w": base},
        {"first": torch.ones(7), "w": base},
        {"w": nn.Parameter(base.view(2, -1), False)},
        {"w": nn.Parameter(base.to(torch.float64), False)},
        {"w": base},
    ]
    for state in states:
        _stage(buffer, state)
        assert copied.take() == sum(tensor.nbytes for tensor in state.values())
    buffer.release()
    _stage(buffer, {"w": base})
    assert copied.take() == LEAST_BYTES


def test_tensors_that_are_no_stretch_of_memory() -> None:
    """Sparse ones do not say how large they are."""
    frozen = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in _strange_tensors().items()}
    buffer = StagingBuffer()
    for _ in range(2):
        assert all(map(_is_equal, buffer.stage(frozen, list(frozen.values())).values(), frozen.values()))


def _strange_tensors() -> dict[str, Tensor]:
    square, lazy = torch.randn(200, 200), torch.randn(SIZE).cfloat().conj()
    sparse = {"coo": square.to_sparse(), "csr": square.to_sparse_csr()}
    return {**sparse, "meta": square.to("meta"), "gaps": square[:, ::2], "lazy": lazy}


def _is_equal(staged: Tensor, tensor: Tensor) -> bool:
    if tensor.is_meta:
        return staged.is_meta
    return staged.layout == tensor.layout and torch.equal(staged.to_dense(), tensor.to_dense())


def test_tensors_of_inference_mode_are_copied(copied: Copied) -> None:
    """Nobody counts their changes."""
    with torch.inference_mode():
        tensor = torch.randn(SIZE)
    buffer = StagingBuffer()
    for _ in range(2):
        _stage(buffer, {"w": tensor}, [tensor])
        with torch.inference_mode():
            tensor[3000] += 1
    assert copied.take() == 2 * LEAST_BYTES


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_after_an_error_all_is_copied(monkeypatch: pytest.MonkeyPatch, copied: Copied, error: type) -> None:
    """The copy may have been written to in part."""
    state, buffer = {"w": _frozen(), "x": torch.randn(SIZE)}, StagingBuffer()
    _stage(buffer, state)
    copied.take()
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise error

        patched.setattr(_C, "copy_tensors", fail)
        with pytest.raises(error):
            buffer.stage(state, ())
    _stage(buffer, state)
    assert copied.take() == 2 * LEAST_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_changes(tmp_path: Path, seed: int) -> None:
    """Rounds of saves of some of the tensors, changed in any of the ways: what is staged is always what there is."""
    chosen = random.Random(seed)
    values = {f"w{n}": _frozen(n) for n in range(6)}
    buffers = [StagingBuffer(), StagingBuffer()]
    for number in range(40):
        for key in chosen.sample(sorted(values), chosen.randrange(4)):
            change = chosen.choice([name for name in CHANGES if "load" not in name])
            CHANGES[change](values[key], tmp_path)
        some = {key: values[key] for key in values if number % 10 or key != "w0"}
        _stage(chosen.choice(buffers), some, None if chosen.random() < 0.1 else ())


# ---- accelerators ----


def test_frozen_tensors_of_devices(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied once. Kernels that are not counted are seen by samples; what is still under way is waited for."""
    state = {str(n): nn.Parameter(twin.tensor(torch.full((SIZE,), float(n))), n == 3) for n in range(4)}
    state["host"] = _frozen()
    copies: list[Tensor] = []
    alone, together = staging.copy_one, Room.to_host

    def copy_one(tensor: Tensor, host: Tensor) -> None:
        copies.append(tensor)
        alone(tensor, host)

    def to_host(room: Room, tensors: list[Tensor], hosts: list[Tensor]) -> None:
        copies.extend(tensors)
        together(room, tensors, hosts)

    monkeypatch.setattr(staging, "copy_one", copy_one)
    monkeypatch.setattr(Room, "to_host", to_host)
    buffer = StagingBuffer()
    for expected, changed in ((4, None), (1, None), (2, "1"), (1, None), (2, "2"), (2, "2")):
        if changed is not None:
            twin.write(state[changed], torch.full((SIZE,), float(len(copies) + 10)))
        wanted = {
            key: tensor.detach().clone() if key == "host" else twin.values(tensor) for key, tensor in state.items()
        }
        copies.clear()
        assert_same_bits(_local(buffer.stage(state, ())), wanted)
        assert len(copies) == expected
    assert not twin.under_way


def test_frozen_tensors_of_devices_are_looked_at_behind_the_current_stream(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {str(n): nn.Parameter(twin.tensor(torch.zeros(SIZE), n % 2), False) for n in range(4)}

    def refuse(device: torch.device) -> None:
        raise AssertionError(f"all streams of {device} are waited for")

    buffer = StagingBuffer(is_shared=True)
    for value in (1.0, 2.0, 2.0, 3.0):
        for tensor in state.values():
            twin.write(tensor, torch.full((SIZE,), value))
        with monkeypatch.context() as patched:
            patched.setattr(twin, "synchronize", refuse)
            staged = buffer.fill(buffer.open(state, SideStreams(), ()))
        assert all(bool((staged[key] == value).all()) for key in state)
    assert buffer.allocations == 1


# ---- savers ----


def test_each_buffer_of_a_stager_knows_its_own(tmp_path: Path, copied: Copied) -> None:
    """The second state is copied while the first is being written."""
    model, counts = {"w": _frozen(), "x": torch.zeros(1)}, []
    with RingStager(buffers=2, unchanged="trust") as stager:
        for turn in range(4):
            writers = [Held(tmp_path / f"{turn}.{n}") for n in range(2)]
            responses: list[Any] = []
            for writer in writers:
                if turn == 2 and writer is writers[1]:
                    model["w"].data.fill_(3)
                responses.append(dcp.async_save({"model": model}, storage_writer=writer, async_stager=stager))
                stager.synchronize()
                counts.append(copied.take() // LEAST_BYTES)
                assert writers[0].is_writing.wait(WAIT)
            for writer, response in zip(writers, responses, strict=True):
                writer.go.set()
                response.upload_completion.result(WAIT)
            _check(tmp_path / f"{turn}.1", model)
        assert stager.allocations == 2
    assert counts == [1, 1, 0, 0, 0, 1, 1, 0]


def test_what_a_stager_may_be_told() -> None:
    with pytest.raises(ValueError, match='unchanged=\'link\': must be "copy" or "trust"'):
        RingStager(unchanged="link")  # type: ignore[arg-type]


def _check(path: Path, state: Any) -> None:
    for reader in (FileSystemReader(path), RingReader(path)):
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load({"model": loaded}, storage_reader=reader)
        assert_same_bits(loaded, {key: value.detach() for key, value in state.items()})


@pytest.mark.parametrize("unchanged", ["write", "link", "trust"])
def test_staged_saves_are_written_and_linked_as_ever(tmp_path: Path, copied: Copied, unchanged: Any) -> None:
    """By a stager that trusts, whatever the writer does; tensors that are seen to have changed are in the files."""
    model = {"base": _frozen(size=1 << 19), "adapter": nn.Parameter(torch.randn(SIZE))}
    counts, linked = [], []
    with RingStager(unchanged="trust") as stager:
        for n in range(5):
            if n == 3:
                model["base"].data.neg_()
            writer = RingWriter(tmp_path / str(n), unchanged=unchanged)
            response: Any = dcp.async_save(
                {"model": model}, storage_writer=writer, planner=RingSavePlanner(), async_stager=stager
            )
            response.upload_completion.result(WAIT)
            counts.append(copied.take())
            assert writer.stats is not None
            linked.append(writer.stats.linked_bytes)
            _check(tmp_path / str(n), model)
            with torch.no_grad():
                model["adapter"].add_(1)
    base, adapter = model["base"].nbytes, LEAST_BYTES
    assert counts == [base + adapter, adapter, adapter, base + adapter, adapter]
    assert linked[:4] == ([0] * 4 if unchanged == "write" else [0, base, base, 0])


def _change_of_a_row(way: str, folder: Path, model: nn.Module, row: Tensor) -> Path:
    """Saves four times. What is trained changes each time, and before the third a row of what is not."""
    stager, checkpointer = RingStager(unchanged="trust"), None
    if way.startswith("Checkpointer"):
        checkpointer = Checkpointer(folder, {"model": model}, unchanged="trust")
    for step in range(4):
        with torch.no_grad():
            model.head.weight.add_(1)  # type: ignore[union-attr, operator]
            if step == 2:
                row.fill_(7)
        if checkpointer is not None:
            checkpointer.save(step, blocking=way.endswith("blocking"))
            checkpointer.wait()
            continue
        response: Any = dcp.async_save(
            {"model": model.state_dict(keep_vars=True)},
            storage_writer=RingWriter(folder / f"step-{step}", unchanged="trust"),
            planner=RingSavePlanner(),
            async_stager=stager,
        )
        response.upload_completion.result(WAIT)
    stager.close()
    if checkpointer is not None:
        checkpointer.close()
    return folder / "step-3"


@pytest.mark.parametrize("way", ["Checkpointer, blocking", "Checkpointer, in the background", "RingStager"])
def test_a_counted_change_that_no_sample_sees_is_written(tmp_path: Path, way: str) -> None:
    model = nn.ModuleDict({"base": nn.Embedding(8000, 64), "head": nn.Linear(64, 8)})
    model.base.requires_grad_(False)
    row = model.base.weight[17]  # type: ignore[index, union-attr]
    path = _change_of_a_row(way, tmp_path, model, row)  # type: ignore[arg-type]
    loaded = {"model.base.weight": torch.zeros(8000, 64)}
    dcp.load(loaded, storage_reader=RingReader(path))
    assert torch.equal(loaded["model.base.weight"], model.base.weight)  # type: ignore[arg-type, union-attr]


def test_a_writer_that_keeps_its_copy(tmp_path: Path, copied: Copied) -> None:
    model = {"base": _frozen(), "adapter": nn.Parameter(torch.randn(SIZE))}
    writer = RingWriter(tmp_path / "0", unchanged="trust", cache_staged_state_dict=True)
    counts = []
    for n in range(3):
        checkpoint_id: Any = tmp_path / str(n)
        future: Any = dcp.async_save({"model": model}, storage_writer=writer, checkpoint_id=checkpoint_id)
        future.result(WAIT)
        counts.append(copied.take() // LEAST_BYTES)
        _check(tmp_path / str(n), model)
    assert counts == [2, 1, 1]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(512, 512, bias=False)
        self.base.weight.requires_grad_(False)
        self.tied = self.base
        self.adapter = nn.Linear(512, 32, bias=False)
        self.norm = nn.BatchNorm1d(512)

    def forward(self, x: Tensor) -> Any:
        return self.adapter(self.norm(self.base(x)))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("parallel", [False, True], ids=["alone", "DDP"])
def test_a_checkpointer_that_trusts(tmp_path: Path, copied: Copied, asynchronous: bool, parallel: bool) -> None:
    """It knows the model, whose state dict does not say what is frozen."""
    model: nn.Module = Base()
    module = model
    if parallel:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    counts = []
    base_bytes = 512 * 512 * 4
    with Checkpointer(tmp_path, {"model": model}, unchanged="trust") as checkpointer:
        for step in range(4):
            model(torch.randn(4, 512)).square().mean().backward()
            checkpointer.synchronize()
            optimizer.step()
            if step == 2:
                module.base.weight.data.mul_(2)  # type: ignore[union-attr]
            checkpointer.save(step, blocking=False, async_staging=asynchronous)
            checkpointer.wait()
            counts.append(copied.take() >= base_bytes)
            loaded = Base()
            with Checkpointer(tmp_path, {"model": loaded}) as other:
                other.load(step)
            assert_same_bits(loaded.state_dict(), module.state_dict())
    assert counts == [True, False, True, False]


def test_a_checkpointer_that_links_copies_everything(tmp_path: Path, copied: Copied) -> None:
    """``"link"`` compares what is in memory: nobody has promised anything."""
    model = Base()
    with Checkpointer(tmp_path, {"model": model}, unchanged="link") as checkpointer:
        for step in range(2):
            checkpointer.save(step, blocking=False)
            checkpointer.wait()
            assert copied.take() >= 512 * 512 * 4


# ---- several ranks ----


def _trusts_on_ranks(folder: str, layout: str) -> list[tuple[bool, int]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        copied, lora, found = Copied(monkeypatch), Lora(layout), []
        frozen = [p for p in lora.model.parameters() if not p.requires_grad]
        with Checkpointer(folder, lora.components, unchanged="trust") as checkpointer:
            for step in range(4):
                lora.train()
                if step == 2:
                    frozen[0].data.mul_(2)
                checkpointer.save(step, blocking=False, async_staging=True)
                checkpointer.synchronize()
                found.append(copied.take())
                checkpointer.wait()
                loaded = Lora(layout, seed=1)
                with Checkpointer(folder, loaded.components) as other:
                    other.load(step)
                for one, two in zip(lora.model.parameters(), loaded.model.parameters(), strict=True):
                    local = [p.to_local() if isinstance(p, DTensor) else p for p in (one, two)]
                    assert torch.equal(*local)
    return [(count == found[1], count) for count in found]


@pytest.mark.parametrize("layout", ["fsdp", "replicated"])
def test_ranks_that_trust(tmp_path: Path, layout: str) -> None:
    for found in _distributed.run(2, _trusts_on_ranks, str(tmp_path), layout):
        assert [is_small for is_small, _ in found] == [False, True, False, True]
        least = 1024 * 1024 * 4 // (2 if layout == "fsdp" else 1)
        assert found[0][1] - found[1][1] == 2 * least and found[2][1] - found[1][1] == least
