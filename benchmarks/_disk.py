"""The disk's own limit, and the state of the page cache.

The limit is the time for the same number of bytes in one fresh file: 4 MiB blocks, O_DIRECT, 16 in flight, one
fsync at the end; by fio with io_uring, or where fio is not installed by threads that call pwrite and preadv.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _measure import Reading, Span

BLOCK_BYTES = 4 << 20
DEPTH = 16
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def limit_tool() -> str:
    return "fio (io_uring)" if shutil.which("fio") else f"{DEPTH} threads of pwrite/preadv"


def write_limit(file: Path, size_bytes: int) -> Reading:
    return _fio(file, size_bytes, "write") if shutil.which("fio") else _threads(file, size_bytes, _write_blocks)


def read_limit(file: Path, size_bytes: int) -> Reading:
    return _fio(file, size_bytes, "read") if shutil.which("fio") else _threads(file, size_bytes, _read_blocks)


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


def _scaled(seconds: float, cpu_seconds: float, size_bytes: int) -> Reading:
    """Whole blocks were timed; this is the share of `size_bytes`."""
    share = size_bytes / (_blocks(size_bytes) * BLOCK_BYTES)
    span = Span(begin=0.0, end=seconds * share, cpu_seconds=cpu_seconds * share)
    return Reading(span, span)


def _fio(file: Path, size_bytes: int, direction: str) -> Reading:
    command = [
        "fio", "--name=limit", f"--filename={file}", f"--rw={direction}", "--ioengine=io_uring", "--direct=1",
        f"--bs={BLOCK_BYTES}", f"--iodepth={DEPTH}", f"--size={_blocks(size_bytes) * BLOCK_BYTES}", "--end_fsync=1",
        "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"fio failed on {file}: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    seconds = job[direction]["runtime"] / 1000
    return _scaled(seconds, seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100, size_bytes)


def _threads(file: Path, size_bytes: int, work: Callable[[int, Iterable[int]], None]) -> Reading:
    blocks = _blocks(size_bytes)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        begin, cpu = time.monotonic(), time.process_time()
        if work is _write_blocks:
            os.posix_fallocate(fd, 0, blocks * BLOCK_BYTES)
        with ThreadPoolExecutor(DEPTH) as pool:
            list(pool.map(lambda first: work(fd, range(first, blocks, DEPTH)), range(DEPTH)))
        os.fsync(fd)
        return _scaled(time.monotonic() - begin, time.process_time() - cpu, size_bytes)
    finally:
        os.close(fd)


def _write_blocks(fd: int, blocks: Iterable[int]) -> None:
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        buffer.write(os.urandom(4096) * (BLOCK_BYTES // 4096))
        for block in blocks:
            _expect_whole(os.pwrite(fd, buffer, block * BLOCK_BYTES))


def _read_blocks(fd: int, blocks: Iterable[int]) -> None:
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        for block in blocks:
            _expect_whole(os.preadv(fd, [buffer], block * BLOCK_BYTES))


def _expect_whole(moved_bytes: int) -> None:
    if moved_bytes != BLOCK_BYTES:
        raise OSError(f"short transfer: {moved_bytes} of {BLOCK_BYTES} bytes")


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def cache_drop_method() -> str:
    """How `make_cold` empties the page cache: of everything (root), or of the checkpoint's own files."""
    return "drop_caches" if os.access(DROP_CACHES, os.W_OK) else "posix_fadvise(DONTNEED) on each file"


def make_cold(folder: Path) -> None:
    os.sync()
    if os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("3")
        return
    for path in files_under(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def make_warm(folder: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    for path in files_under(folder):
        with open(path, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
