"""What dcpring finds on this machine and in a directory, what that means, and the cure for what is not as it should be.

Whether something works is found by trying it (``_C.probe_*``, and small saves and loads); files of the kernel's are
only read to say why it does not. Everything happens in the caller's thread, in a directory that is removed at the end.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from dcpring import _C
from dcpring.base import shared_memory
from dcpring.errors import CheckpointError
from dcpring.options import Engine, IOOptions
from dcpring.plan.strategy import remote_storage
from dcpring.report import format_bytes
from dcpring.tools.machine.scratch import private_directory

Status = Literal["ok", "slow", "missing", "failed"]

_SLOW_SYNC_SECONDS = 0.05
_SLOW_CRC_BYTES_PER_SECOND = 2e9
_LITTLE_SPACE = 1 << 30
_LITTLE_MEMORY = 256 << 20
_TRIED_BYTES = (3 << 20) + 77
"""Of the small saves: some blocks, and an end that is not aligned."""

_CGROUP_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and usage, of cgroups version 2 and 1."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        status: "ok"; "slow" or "missing": dcpring works without it, less well; "failed": it does not work.
        found: in words.
        meaning: what that means for dcpring; "" where there is nothing to say.
        cure: what to do about it; "" where there is nothing to do.
        group: "machine", "directory" or "software".
    """

    name: str
    status: Status
    found: str
    meaning: str = ""
    cure: str = ""
    group: str = ""


@dataclass(frozen=True)
class Kernel:
    """The files in which the kernel says how it is set up; below ``root``, for tests."""

    root: Path = Path("/")

    def text(self, path: str) -> str:
        """What a file says, "" where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def field(self, path: str, name: str) -> str:
        """Of a file of "name: value" lines, a value; "" where there is none."""
        lines = (line.partition(":") for line in self.text(path).splitlines())
        return next((value.strip() for key, _, value in lines if key == name), "")


def examine(directory: Path, kernel: Kernel | None = None) -> Iterator[Check]:
    """All checks, as they are made: those that need torch, which takes seconds to import, come last.

    Raises:
        CheckpointError: there is no such directory.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {what}; name a directory that is there: one that checkpoints will go to")
    kernel = kernel or Kernel()
    ring = _ring(kernel)
    groups: dict[str, Iterable[Check]] = {
        "machine": [*ring, _crc(), _memory(kernel), _shared_memory()],
        "directory": _directory(directory.resolve(), kernel, has_ring=ring[0].status == "ok"),
        "software": _software(),
    }
    return (replace(check, group=group) for group, checks in groups.items() for check in checks)


def works(checks: Iterable[Check]) -> bool:
    """Whether checkpoints can be saved to, and loaded from, the directory."""
    return all(check.status != "failed" for check in checks)


# ---- the machine ----


def _ring(kernel: Kernel) -> list[Check]:
    """io_uring, and its registered buffers where there is one."""
    options = IOOptions()
    (error, _, _), registered = _C.probe_ring(options.queue_depth, options.block_size_bytes)
    release = f"Linux {platform.release()}"
    if error:
        reason, cure = _why_no_ring(error, kernel)
        found = f"{os.strerror(error)}, on {release}: {reason}"
        meaning = "dcpring falls back to threads, which take more CPU"
        return [Check("io_uring", "missing", found, meaning, cure)]
    return [Check("io_uring", "ok", release), _registered(registered, options)]


def _why_no_ring(error: int, kernel: Kernel) -> tuple[str, str]:
    """The likely reason, and the cure."""
    switch = kernel.text("proc/sys/kernel/io_uring_disabled")
    if switch in ("1", "2") and error == errno.EPERM:
        return (
            f"kernel.io_uring_disabled is {switch}",
            "as root on the host: sysctl -w kernel.io_uring_disabled=0 (and in /etc/sysctl.d, to keep it)",
        )
    if error in (errno.EPERM, errno.ENOSYS, errno.EACCES) and kernel.field("proc/self/status", "Seccomp") == "2":
        return (
            "a seccomp filter, as containers have it, refuses it",
            "start the container with a profile that allows io_uring_setup, io_uring_enter and io_uring_register: "
            "docker run --security-opt seccomp=PROFILE.json, or seccomp=unconfined where all in it is trusted "
            "(Kubernetes: securityContext.seccompProfile)",
        )
    reasons = {
        errno.ENOSYS: ("the kernel has none, or one without reads and writes", "Linux 5.6 or newer"),
        errno.ENOMEM: ("it may not lock so much memory", "ulimit -l unlimited (docker run --ulimit memlock=-1)"),
        errno.EMFILE: ("too many files are open", "ulimit -n 65536"),
        errno.EPERM: ("a security module (SELinux, AppArmor) may refuse it", "see the kernel log (dmesg, ausearch)"),
    }
    return reasons.get(error, ("the kernel gives no reason", "see the kernel log (dmesg)"))


def _registered(registered: int, options: IOOptions) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    may_lock = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    found = f"{registered} of {options.queue_depth} of {format_bytes(options.block_size_bytes)} (ulimit -l: {may_lock})"
    if registered == options.queue_depth:
        return Check("registered buffers", "ok", found)
    return Check(
        "registered buffers",
        "slow",
        found,
        "the kernel looks up the memory of the other buffers for each transfer: a little more CPU",
        "ulimit -l unlimited (docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
    )


def _crc() -> Check:
    size = 256 << 20
    rate = size / max(1, _C.probe_crc(size)) * 1e9
    found = f"{rate / 1e9:.1f} GB/s on one processor"
    if rate >= _SLOW_CRC_BYTES_PER_SECOND:
        return Check("CRC-32", "ok", found)
    meaning = "checksums may take longer than a fast disk"
    cure = "more workers (workers=4), or checksum=False where another layer checks the bytes"
    return Check("CRC-32", "slow", found, meaning, cure)


def _memory(kernel: Kernel) -> Check:
    """What may still be taken, by the machine's and by the container's limit."""
    numbers = kernel.field("proc/meminfo", "MemAvailable").split()
    free = int(numbers[0]) * 1024 if numbers and numbers[0].isdigit() else None
    for names in _CGROUP_MEMORY:
        most, used = (kernel.text(f"sys/fs/cgroup/{name}") for name in names)
        if most.isdigit() and used.isdigit():
            left = int(most) - int(used)
            free = left if free is None else min(free, left)
    if free is None:
        return Check("memory", "ok", "the kernel does not say how much is available")
    found = f"{format_bytes(free)} available"
    if free >= _LITTLE_MEMORY:
        return Check("memory", "ok", found)
    need = format_bytes(IOOptions().queue_depth * IOOptions().block_size_bytes)
    meaning = f"each rank takes {need} for its buffers, and ranks that share what they read 128 MiB more for each host"
    return Check("memory", "slow", found, meaning, "a higher limit, or a lower queue_depth")


def _shared_memory() -> Check:
    """As ranks of a host share what one of them has read."""
    try:
        descriptor, word = shared_memory.create(mmap.PAGESIZE)
        try:
            shared_memory.open_word(word)[0] = 1
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        meaning = "on shared storage every rank reads for itself what several of them need"
        cure = "let the container use memfd_create, and mount /proc in it"
        return Check("shared memory", "missing", str(error), meaning, cure)
    return Check("shared memory", "ok", "memfd, reachable through /proc")


# ---- the directory ----


def _directory(directory: Path, kernel: Kernel, has_ring: bool) -> Iterator[Check]:
    mount = find_mount(directory, kernel.text("proc/self/mountinfo"))
    yield _file_system(directory, mount)
    yield from _space(directory)
    try:
        with private_directory(directory, "doctor") as scratch:
            answers = _C.probe_directory(str(scratch))
            yield from _answers(answers, mount)
            if not answers["create"][0]:
                yield from _round_trips(scratch, has_ring)
    except OSError as error:
        found, _, cure = (error.strerror or str(error)).partition("; ")
        yield Check("files", "failed", f"{found}: {error.filename}", "nothing can be saved here", cure)


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo."""

    point: str = ""
    kind: str = ""
    source: str = ""


def find_mount(directory: Path, mountinfo: str) -> Mount:
    """The mount that a directory lies on; the later of two at the same place hides the other."""
    found = Mount()
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = fields[4].encode("latin-1", "replace").decode("unicode_escape")  # \040 is a blank
        inside = point == "/" or str(directory) == point or str(directory).startswith(f"{point}/")
        if inside and len(point) >= len(found.point):
            found = Mount(point, rest[0], rest[1])
    return found


class FileSystem(NamedTuple):
    """What is known of a kind of file system.

    Attributes:
        meaning: for checkpoints.
        cure: what may be done.
        direct: what may be done where it has no direct I/O.
    """

    meaning: str
    cure: str
    direct: str = "a file system with O_DIRECT (ext4, XFS, NFS, Lustre and others have it)"


_MEMORY = FileSystem(
    "it is memory: what is saved here counts against it, and is gone after a restart",
    "name a directory on a disk",
    "none is needed: it is memory",
)
_NFS = FileSystem("every sync waits for the server", "mount with rsize=1048576,wsize=1048576,nconnect=8")
_FILE_SYSTEMS: dict[str, FileSystem] = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": FileSystem(
        "it is the container's own layer, which is gone with the container",
        "mount a volume (docker run -v /disk:/checkpoints) and save there",
        "save to a volume (docker run -v /disk:/checkpoints)",
    ),
    "nfs": _NFS,
    "nfs4": _NFS,
    "fuse": FileSystem(
        "every request passes through a program, which sets the limits on speed and direct I/O",
        "where the storage has a client in the kernel, mount it with that",
    ),
    "lustre": FileSystem(
        "a file lies on as many servers as its striping says",
        "lfs setstripe -c -1 -S 4M DIR, before anything is saved in it",
    ),
    "btrfs": FileSystem("it checksums and copies on write, once more", "chattr +C DIR, before anything is saved in it"),
    "zfs": FileSystem(
        "direct I/O needs OpenZFS 2.3",
        "zfs set direct=standard recordsize=1M DATASET",
        "OpenZFS 2.3, and zfs set direct=standard",
    ),
}
"""By the first part of their type."""


def _known(mount: Mount) -> FileSystem:
    return _FILE_SYSTEMS.get(mount.kind.partition(".")[0], FileSystem("", ""))


def _file_system(directory: Path, mount: Mount) -> Check:
    meaning, cure, _ = _known(mount)
    try:
        if remote_storage(directory):
            meaning = "; ".join(filter(None, [meaning, 'it is shared: writers="auto" has few ranks write']))
    except OSError as error:
        return Check("file system", "missing", str(error))
    found = f"{mount.kind} ({mount.source} on {mount.point})" if mount.kind else "the kernel does not say which"
    return Check("file system", "ok", found, meaning, cure.replace("DIR", str(directory)))


def _space(directory: Path) -> Iterator[Check]:
    (error, cure, _), _, size, free, *_ = _C.probe_space(str(directory))
    if error:
        yield Check("space", "missing", os.strerror(error), "how much is free cannot be told", cure)
        return
    found = f"{format_bytes(free)} of {format_bytes(size)} free"
    if free >= _LITTLE_SPACE or not size:
        yield Check("space", "ok", found)
    else:
        meaning = "a new checkpoint must fit in beside the one before it"
        cure = "free space, keep fewer checkpoints (keep_last), or save elsewhere"
        yield Check("space", "missing", found, meaning, cure)


def _answers(answers: _C._DirectoryAnswers, mount: Mount) -> Iterator[Check]:
    """What the core found in a directory of its own."""
    error, cure, _ = answers["create"]
    if error:
        yield Check("files", "failed", f"open: {os.strerror(error)}", "nothing can be saved here", cure)
    if (allocate := answers["allocate"]) is not None:
        yield _allocate(*allocate)
    if (direct := answers["direct"]) is not None:
        yield _direct(*direct, alignment=answers["alignment"], mount=mount)
    if (sync := answers["sync"]) is not None:
        yield _timed("sync", "a sync of 4 KiB", *sync)
    if (commit := answers["commit"]) is not None:
        yield _timed("commit", "a rename, made durable", *commit)
    if (remove := answers["remove"]) is not None and remove[0]:
        found = os.strerror(remove[0])
        yield Check("removal", "failed", found, "old checkpoints cannot be removed", remove[1])


def _allocate(error: int, cure: str, _: int) -> Check:
    if not error:
        return Check("preallocation", "ok", "fallocate")
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):
        meaning = "a full disk is noticed only when it is full, and files may lie in pieces"
        cure = "nothing has to be done; NFS has it from version 4.2 on (mount -o vers=4.2)"
        return Check("preallocation", "slow", "no fallocate", meaning, cure)
    return Check("preallocation", "failed", os.strerror(error), "nothing can be saved here", cure)


def _direct(error: int, cure: str, _: int, *, alignment: int, mount: Mount) -> Check:
    if not error:
        return Check("direct I/O", "ok", f"aligned to {alignment} bytes" if alignment else "O_DIRECT")
    found = os.strerror(error)
    if alignment > _C.ALIGNMENT_BYTES:
        found = f"it needs an alignment of {alignment} bytes; dcpring's is {_C.ALIGNMENT_BYTES}"
    meaning = "saves and loads go through the page cache: more CPU, and memory that training may need"
    return Check("direct I/O", "slow", found, meaning, _known(mount).direct)


def _timed(name: str, what: str, error: int, cure: str, ns: int) -> Check:
    if error:
        return Check(name, "failed", os.strerror(error), "nothing can be saved here durably", cure)
    found = f"{what}: {ns / 1e6:.2f} ms"
    if ns < _SLOW_SYNC_SECONDS * 1e9:
        return Check(name, "ok", found)
    meaning = "a save waits for three or more of these, however small it is"
    cure = "save in the background (Checkpointer.save(blocking=False)); disks with power-loss protection are fast here"
    return Check(name, "slow", found, meaning, cure)


def _round_trips(scratch: Path, has_ring: bool) -> Iterator[Check]:
    """A small save and load with each engine, direct and not; what "auto" does must work."""
    engines: tuple[Engine, ...] = ("uring", "threads") if has_ring else ("threads",)
    for engine in engines:
        try:
            ways = IOOptions(engine=engine), IOOptions(engine=engine, direct=False)
            done = [_round_trip(scratch, options) for options in ways]
        except (OSError, CheckpointError) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            found, _, cure = problem.partition("; ")
            needed = engine == "uring" or not has_ring
            meaning = "checkpoints cannot be saved here" if needed else 'engine="threads" does not work here'
            cure = cure or ('pass engine="threads"' if engine == "uring" else "see the kernel log (dmesg)")
            yield Check(f"save, {engine}", "failed" if needed else "missing", found, meaning, cure)
        else:
            yield Check(f"save, {engine}", "ok", f"written, synced, read and compared: {', '.join(done)}")


def _round_trip(scratch: Path, options: IOOptions) -> str:
    """Saves and loads random bytes; what kind of I/O that was."""
    options = replace(options, queue_depth=2, block_size_bytes=1 << 20)
    data = os.urandom(_TRIED_BYTES)
    name = f"{options.engine}-{options.direct}"
    placed = _C.StorageIndex(1)
    writer = _C.FileWriter(str(scratch), name, len(data), options.for_core(True))
    try:
        writer.write_bytes([data], placed)
        writer.finish()
        _, _, direct = writer.stats()
    finally:
        writer.close()
    place = placed.get(0)
    assert place is not None
    offset, size, crcs = place[4:]
    with contextlib.closing(_C.Input(str(scratch), [name])) as inputs:
        [back], _ = _C.load_bytes(inputs, [(0, offset, size, crcs)], options.for_core(False))
    if back != data:
        raise CheckpointError("other bytes were read than were written; look for a failing disk or memory")
    return "direct" if direct else "through the page cache"


# ---- the software ----


def _software() -> Iterator[Check]:
    yield Check("Python", "ok", platform.python_version())
    yield _installed()
    yield _torch()


def _installed() -> Check:
    """Whether programs get dcpring without a change of theirs; what that would replace is tried out."""
    from dcpring.integrations import install

    by = f"{install.VARIABLE}={os.environ[install.VARIABLE]}" if install.is_asked_for() else ""
    try:
        with install.install():
            names = ", ".join(name for name, is_ours in install.tried_out().items() if is_ours)
    except Exception as error:
        meaning = "dcpring.install() does not work with this torch; RingWriter(...) and its kin do where they are given"
        return Check("install()", "missing", str(error), meaning)
    if by and subprocess.run([sys.executable, "-c", "import sys; sys.exit('dcpring' not in sys.modules)"]).returncode:
        meaning = "programs that do not import dcpring by themselves go on with torch's storage"
        cure = "install dcpring with pip (a path in PYTHONPATH is not enough), or start them by: python -m dcpring run"
        return Check("install()", "missing", f"{by} is not seen when Python starts", meaning, cure)
    if not by and install.current() is None:
        return Check("install()", "ok", f"not in use; would replace {names}")
    return Check("install()", "ok", f"in use{f', by {by}' if by else ''}: replaces {names}")


def _torch() -> Check:
    """Its version, and whether the extension has found all that it calls in it."""
    cure = "pip install 'torch>=2.9,<3'"
    try:
        import torch

        from dcpring.torchside import versions

        importlib.import_module("dcpring.torchside.shim")
    except (ImportError, OSError, ValueError) as error:
        return Check("torch", "failed", str(error), "dcpring cannot see tensors", cure)
    if versions.is_tested(torch.__version__):
        return Check("torch", "ok", f"{torch.__version__}, its C shim is bound")
    effect = "dcpring has not been tested with it, and plans by torch's own functions, which is slower"
    return Check("torch", "missing", torch.__version__, effect, cure)
