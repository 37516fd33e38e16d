"""dcpring doctor: what works is said to work, what fails is found, with its cure, and nothing stays behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _cli
import pytest
import torch
from fault._support import MIB, fault, mounted, mounted_on, need_root, run_python

from dcpring import _C
from dcpring.tools.machine import doctor as _doctor
from dcpring.tools.machine.doctor import Check, Kernel, Mount, examine, find_mount, works

DIRECTORY_CHECKS = (
    "file system",
    "space",
    "preallocation",
    "direct I/O",
    "sync",
    "commit",
    "save, uring",
    "save, threads",
)


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    checks = list(checks)
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    return found


def kernel(root: Path, **files: str) -> Kernel:
    """One that says what is given; "/" is written as "__"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Kernel(root)


# ---- where all is well ----


@pytest.mark.parametrize(
    ("flags", "status", "found"), [("", "ok", "by DCPRING_INSTALL=1: replaces"), ("-S", "missing", "not seen")]
)
def test_a_variable_that_nothing_reads_is_told(
    flags: str, status: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where dcpring lies in a folder of PYTHONPATH, whose .pth files Python does not read."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {flags} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("DCPRING_INSTALL", "1")
    check = by_name(list(_doctor._software()))["install()"]
    assert check.status == status and found in check.found


def test_all_is_well(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = _cli.run("doctor", tmp_path)
    assert result.status == 0 and not result.err
    assert f"checkpoints can be saved to {tmp_path}" in result.out
    assert "\n  ok       io_uring " in result.out and "\n  ok       direct I/O " in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "mine"


def test_json(tmp_path: Path) -> None:
    document = json.loads(_cli.run("doctor", tmp_path, "--json").out)
    assert document["works"] is True and document["directory"] == str(tmp_path)
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["registered buffers"]["status"] in ("ok", *(["slow"] if os.geteuid() else []))  # root has no limit
    for name in ("io_uring", "CRC-32", *DIRECTORY_CHECKS, "torch"):
        may_be_slow = name in ("sync", "commit", "CRC-32")  # on a machine that others use, too
        assert checks[name]["status"] in ("ok", *(["slow"] if may_be_slow else [])), checks[name]
        assert checks[name]["found"]
    assert checks["save, uring"]["found"].endswith("direct, through the page cache")


def test_the_current_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(_cli.run("doctor", "--json").out)["directory"] == str(tmp_path)


# ---- what does not work ----

NOTHING = "nothing can be saved here"
FAULTS: list[tuple[str, int, str, str, str, str]] = [
    # call, its errno, the check, what it says, a part of the meaning, a part of the cure
    ("uring_init", errno.EPERM, "io_uring", "missing", "falls back to threads", ""),
    ("uring_register", errno.ENOMEM, "registered buffers", "slow", "more CPU", "--ulimit memlock=-1"),
    ("fallocate", errno.EOPNOTSUPP, "preallocation", "slow", "full disk", "vers=4.2"),
    ("fallocate", errno.EIO, "preallocation", "failed", NOTHING, "dmesg"),
    ("set_direct", errno.EINVAL, "direct I/O", "slow", "page cache", "ext4"),
    ("mkdir", errno.EROFS, "files", "failed", NOTHING, "read-only"),
    ("open_below", errno.EDQUOT, "files", "failed", NOTHING, "quota"),
    ("fdatasync", errno.EIO, "sync", "failed", "durably", "dmesg"),
    ("rename", errno.EACCES, "commit", "failed", "durably", "permissions"),
    ("unlink", errno.EROFS, "removal", "failed", "removed", "read-only"),
    ("statfs", errno.EIO, "space", "missing", "cannot be told", "dmesg"),
    ("uring_wait", errno.EIO, "save, uring", "failed", "cannot be saved", "dmesg"),
    ("pwrite", errno.EIO, "save, threads", "missing", 'engine="threads"', "dmesg"),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case[0]}-{errno.errorcode[case[1]]}")
def test_each_fault_is_found(tmp_path: Path, case: tuple[str, int, str, str, str, str]) -> None:
    call, err, name, status, meaning, cure = case
    with fault(call, 1, err, sticky=True):
        result = _cli.run("doctor", tmp_path, "--json")
    document = json.loads(result.out)
    check = next(check for check in document["checks"] if check["name"] == name)
    assert check["status"] == status, check
    assert meaning in check["meaning"] and cure in check["cure"], check
    bad = [check["name"] for check in document["checks"] if check["status"] == "failed"]
    assert result.status == (1 if bad else 0) and document["works"] is not bool(bad)
    assert not list(tmp_path.iterdir())


def test_without_io_uring_threads_are_enough(tmp_path: Path) -> None:
    with fault("uring_init", 1, errno.EPERM, sticky=True):
        checks = by_name(examine(tmp_path))
    assert "save, uring" not in checks and checks["save, threads"].status == "ok"
    assert checks["io_uring"].cure and works(list(checks.values()))


def test_where_nothing_else_works_threads_must(tmp_path: Path) -> None:
    with fault("pwrite", 1, errno.EIO, sticky=True):
        checks = list(_doctor._round_trips(tmp_path, has_ring=False))
    assert [check.status for check in checks] == ["failed"]


def test_damage_between_write_and_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _C.load_bytes

    def flipped(*args: Any) -> Any:
        [data], stats = real(*args)
        return [bytes([data[0] ^ 1]) + data[1:]], stats

    monkeypatch.setattr(_C, "load_bytes", flipped)
    result = _cli.run("doctor", tmp_path)
    assert result.status == 1 and "other bytes were read than were written" in result.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "files", "found", "cure"),
    [
        (errno.EPERM, {"proc__sys__kernel__io_uring_disabled": "2"}, "io_uring_disabled is 2", "sysctl -w"),
        (errno.EPERM, {"proc__self__status": "Name:\tx\nSeccomp:\t2"}, "seccomp filter", "--security-opt"),
        (errno.ENOSYS, {"proc__self__status": "Seccomp:\t2"}, "seccomp filter", "--security-opt"),
        (errno.ENOSYS, {"proc__self__status": "Seccomp:\t0"}, "the kernel has none", "Linux 5.6"),
        (errno.EPERM, {}, "security module", "dmesg"),
        (errno.ENOMEM, {}, "lock", "ulimit -l"),
        (errno.EMFILE, {}, "open", "ulimit -n"),
    ],
)
def test_why_there_is_no_io_uring(tmp_path: Path, error: int, files: dict[str, str], found: str, cure: str) -> None:
    with fault("uring_init", 1, error, sticky=True):
        [check] = _doctor._ring(kernel(tmp_path, **files))
    assert check.status == "missing" and os.strerror(error) in check.found
    assert found in check.found and cure in check.cure


IN_A_CONTAINER = """
import ctypes, struct, sys
from dcpring.cli import main

# What Docker's default profile does: io_uring_setup (425) ends with EPERM, all else is allowed.
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
sys.exit(main(["doctor", sys.argv[1]]))
"""


def test_a_seccomp_filter_refuses_io_uring(tmp_path: Path) -> None:
    out = run_python(IN_A_CONTAINER, str(tmp_path))
    assert "missing  io_uring" in out and "a seccomp filter" in out and "--security-opt seccomp" in out
    assert "save, uring" not in out and "  ok       save, threads" in out


SMALL_LIMIT = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
from dcpring.tools.machine.doctor import examine
check = next(c for c in examine(Path(sys.argv[1])) if c.name == "registered buffers")
print(check.status, "ulimit -l unlimited" in check.cure, check.found)
"""


def test_small_memlock_limit(tmp_path: Path) -> None:
    need_root("what other processes of an ordinary user have locked counts, too")
    out = run_python(SMALL_LIMIT, str(tmp_path), without=("ipc_lock",))
    assert out.startswith("slow True 0 of 8 ") and "ulimit -l: 64.0 KiB" in out


@pytest.mark.parametrize(
    ("check", "files", "status", "found"),
    [
        (_doctor._memory, {"proc__meminfo": "MemTotal: 9 kB\nMemAvailable:  1048576 kB"}, "ok", "1.0 GiB"),
        (_doctor._memory, {"proc__meminfo": "MemAvailable: 65536 kB"}, "slow", "64.0 MiB"),
        (
            _doctor._memory,
            {
                "proc__meminfo": "MemAvailable: 1048576 kB",
                "sys__fs__cgroup__memory.max": str(300 * MIB),
                "sys__fs__cgroup__memory.current": str(200 * MIB),
            },
            "slow",
            "100.0 MiB",
        ),
        (_doctor._memory, {}, "ok", "does not say"),
    ],
)
def test_what_the_kernel_says(
    tmp_path: Path, check: Callable[[Kernel], Check], files: dict[str, str], status: str, found: str
) -> None:
    result = check(kernel(tmp_path, **files))
    assert result.status == status and found in result.found
    assert status == "ok" or result.meaning


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", refuse)
    check = _doctor._shared_memory()
    assert check.status == "missing" and "memfd_create" in check.cure


def test_slow_things(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _doctor._timed("sync", "a sync", 0, "", 80_000_000).status == "slow"
    monkeypatch.setattr(_C, "probe_crc", lambda size: size)  # 1 GB/s
    assert _doctor._crc().status == "slow"


def test_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    checks = by_name(list(_doctor._software()))
    assert checks["torch"].status == "missing" and "torch>=2.9,<3" in checks["torch"].cure


# ---- file systems ----


def test_mounts() -> None:
    lines = (
        "22 27 0:21 / /proc rw - proc proc rw\n27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "40 27 0:50 / /data\\040disk rw shared:1 - fuse.sshfs me@host:/x rw\n"
        "41 27 0:51 / /data rw - nfs4 server:/data rw\n42 27 0:52 / /data rw - xfs /dev/sdb rw\ngarbage\n"
    )
    assert find_mount(Path("/home/me"), lines) == Mount("/", "ext4", "/dev/vda")
    assert find_mount(Path("/data disk/ckpt"), lines) == Mount("/data disk", "fuse.sshfs", "me@host:/x")
    assert find_mount(Path("/data/ckpt"), lines) == Mount("/data", "xfs", "/dev/sdb")
    assert find_mount(Path("/database"), lines).point == "/"
    assert find_mount(Path("/"), "") == Mount()


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "lustre", "overlay", "btrfs", "zfs"])
def test_what_is_known_of_file_systems(tmp_path: Path, kind: str) -> None:
    check = _doctor._file_system(tmp_path, Mount("/", kind, "source"))
    assert kind in check.found and check.meaning and check.cure


def test_tmpfs_and_ramfs(tmp_path: Path) -> None:
    with mounted_on(tmp_path / "t", "-t", "tmpfs", "tmpfs") as memory:
        checks = by_name(examine(memory))
        assert "gone after a restart" in checks["file system"].meaning and works(list(checks.values()))
    with mounted_on(tmp_path / "r", "-t", "ramfs", "ramfs") as memory:
        checks = by_name(examine(memory))
        assert checks["direct I/O"].status == "slow" and "page cache" in checks["direct I/O"].meaning
        assert checks["save, uring"].found.endswith("through the page cache, through the page cache")
        assert works(list(checks.values())) and not list(memory.iterdir())


def test_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ext4", 16 * MIB, "-q") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        result = _cli.run("doctor", disk)
    assert result.status == 1
    assert "Read-only file system" in result.out and f"checkpoints cannot be saved to {disk}: files" in result.out


def test_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ext4", 16 * MIB, "-q", "-m", "0") as disk:
        status = os.statvfs(disk)
        with open(disk / "filler", "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, (status.f_bavail - 8) * status.f_frsize)
        result = _cli.run("doctor", disk)
        assert {path.name for path in disk.iterdir()} == {"filler", "lost+found"}
    assert result.status == 1 and "No space left on device" in result.out and "free space" in result.out


UNWRITABLE = """
import sys
from dcpring.cli import main
sys.exit(0 if main(["doctor", sys.argv[1]]) == 1 else 1)
"""


def test_unwritable(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    out = run_python(UNWRITABLE, str(tmp_path), without=("dac_override",))
    tmp_path.chmod(0o755)
    assert "Permission denied" in out and "check the permissions" in out


@pytest.mark.parametrize(("name", "problem"), [("nothing", "does not exist"), ("file", "is a file")])
def test_no_directory(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "file").write_text("")
    result = _cli.run("doctor", tmp_path / name)
    assert result.status == 2 and problem in result.err and not result.out


# ---- interrupted, in pipes and terminals ----


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it works, and once more while it tidies up."""
    real_load, real_remove = _C.load_bytes, shutil.rmtree
    pressed: list[str] = []

    def press(when: str) -> None:
        pressed.append(when)
        os.kill(os.getpid(), signal.SIGINT)

    def load(*args: Any) -> Any:
        press("work")
        return real_load(*args)

    def remove(path: Path) -> None:
        press("tidy")
        real_remove(path)

    monkeypatch.setattr(_C, "load_bytes", load)
    monkeypatch.setattr(shutil, "rmtree", remove)
    result = _cli.run("doctor", tmp_path)
    assert result.status == 130 and pressed == ["work", "tidy"]
    assert not list(tmp_path.iterdir())


def test_in_a_pipe(tmp_path: Path) -> None:
    result = _cli.run_apart("doctor", tmp_path, FORCE_COLOR="1")
    assert result.status == 0 and "\x1b" not in result.out and not result.err


def test_in_a_terminal(tmp_path: Path) -> None:
    result = _cli.run_in_terminal("doctor", tmp_path)
    assert result.status == 0 and "\x1b[32m" in result.out
    assert "  ok       io_uring" in result.plain
