"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe(directory: Path) -> dict[str, str | int]:
    """The machine in words; `directory` is where the checkpoints go."""
    device, file_system = _mount_of(directory)
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first_value("/proc/meminfo", "MemTotal").split()[0]) / 2**20),
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "file_system": file_system,
        "disk": "virtual" if Path(device).name.startswith("vd") else Path(device).name,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def file_system(directory: Path) -> str:
    return _mount_of(directory)[1]


def _mount_of(directory: Path) -> tuple[str, str]:
    """Device and file system type of the mount that holds `directory`."""
    path = directory.resolve()
    best = ("", "?", "?")
    with open("/proc/mounts") as mounts:
        for line in mounts:
            device, point, kind = line.split()[:3]
            if path.is_relative_to(point) and len(point) >= len(best[0]):
                best = (point, device, kind)
    return best[1], best[2]


def _first_value(path: str, field: str) -> str:
    with open(path) as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return "unknown"


def available_bytes() -> int:
    """Memory that processes can still have."""
    return int(_first_value("/proc/meminfo", "MemAvailable").split()[0]) * 1024
