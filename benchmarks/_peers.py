"""What people would pick instead and can install from PyPI; one process, cold loads.

Peers save the state's tensors under flat names. None of them syncs what it saved, so that is added here, inside the
measured time. Peers that hand out tensors of their own are not charged for a copy into the state dict; those
that only map the file are, because before the copy nothing has been read.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from pathlib import Path

import torch
from _contestants import Case, Contestant
from _disk import sync_file
from _measure import LOAD_COLD, SAVE, Meter, Reading
from _shapes import difference, named_tensors

RUNAI = "runai-model-streamer"


class Peer(Contestant):
    packages: tuple[str, ...]  # as PyPI names them
    file_name: str
    fsync = "added"
    allocates = False  # the loaded tensors are the peer's own, and not counted as memory beyond the state dict
    phases: tuple[str, ...] = (LOAD_COLD,)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._tensors = dict(named_tensors(case.state))
        self._target = dict(named_tensors(case.target))
        self._loaded: dict[str, torch.Tensor] = {}

    def save(self, path: Path) -> Reading:
        file = path / self.file_name
        with Meter() as meter:
            self.write(file)
            sync_file(file)
            sync_file(path)
        return meter.reading()

    def load(self, path: Path) -> Reading:
        with Meter() as meter:
            self._loaded = self.read(path / self.file_name)
        reading = meter.reading()
        if self.allocates and reading.whole.peak_bytes is not None:
            reading.whole.peak_bytes = max(0, reading.whole.peak_bytes - self.case.size_bytes)
        return reading

    def wrong_tensor(self) -> str | None:
        wrong = difference(self._tensors, self._loaded)
        self._loaded = {}
        return wrong

    def write(self, file: Path) -> None:
        raise NotImplementedError

    @abstractmethod
    def read(self, file: Path) -> dict[str, torch.Tensor]: ...

    def into_target(self, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in loaded.items():
            self._target[name].copy_(tensor)
        return self._target


class TorchSave(Peer):
    name, folder, file_name = "torch.save", "torch", "state.pt"
    packages = ("torch",)
    phases: tuple[str, ...] = (SAVE, LOAD_COLD)
    allocates = True

    def write(self, file: Path) -> None:
        torch.save(self._tensors, file)

    def read(self, file: Path) -> dict[str, torch.Tensor]:
        return dict(torch.load(file, weights_only=True))


class TorchMmap(TorchSave):
    name = "torch.load mmap"
    phases = (LOAD_COLD,)
    allocates = False

    def read(self, file: Path) -> dict[str, torch.Tensor]:
        return self.into_target(torch.load(file, weights_only=True, mmap=True))


class Safetensors(Peer):
    name = folder = "safetensors"
    packages = ("safetensors",)
    file_name = "state.safetensors"
    phases = (SAVE, LOAD_COLD)

    def write(self, file: Path) -> None:
        from safetensors.torch import save_file

        save_file(self._tensors, file)

    def read(self, file: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return self.into_target(load_file(file))


class Fastsafetensors(Peer):
    name = "fastsafetensors"
    packages = ("safetensors", "fastsafetensors")
    folder, file_name = Safetensors.folder, Safetensors.file_name
    allocates = True

    def read(self, file: Path) -> dict[str, torch.Tensor]:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, device="cpu", nogds=True)
        loader.add_filenames({0: [str(file)]})
        buffer = loader.copy_files_to_device()
        return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}


class Runai(Peer):
    name = RUNAI
    packages = ("safetensors", "runai-model-streamer")
    folder, file_name = Safetensors.folder, Safetensors.file_name
    allocates = True

    def read(self, file: Path) -> dict[str, torch.Tensor]:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(file))
            return dict(streamer.get_tensors())


class RunaiInPlace(Runai):
    """Its reusable buffers, copied into the state dict: no fresh memory to fault in."""

    name = f"{RUNAI} in place"
    allocates = False

    def read(self, file: Path) -> dict[str, torch.Tensor]:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(file), owned=False)
            for name, tensor in streamer.get_tensors():
                self._target[name].copy_(tensor)
        return self._target


PEERS: tuple[type[Peer], ...] = (TorchSave, TorchMmap, Safetensors, Fastsafetensors, Runai, RunaiInPlace)


def missing_packages() -> list[str]:
    wanted = {package for peer in PEERS for package in peer.packages}
    return sorted(package for package in wanted if importlib.util.find_spec(package.replace("-", "_")) is None)


def peers(case: Case) -> list[Contestant]:
    absent = set(missing_packages())
    return [peer(case) for peer in PEERS if absent.isdisjoint(peer.packages)]
