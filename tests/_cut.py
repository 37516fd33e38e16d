"""Two ranks on two hosts, each a network and a host name of its own, whose network is cut: what each raises.

The first host is this process's new namespaces; the second is a child's. A pair of virtual interfaces joins them.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

NEW_MOUNTS, NEW_NAMES, NEW_NETWORK = 0x20000, 0x4000000, 0x40000000
BIND, PRIVATE_ALL_BELOW = 0x1000, 0x44000
LIBC = ctypes.CDLL(None, use_errno=True)
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29511


def enter_host(name: str) -> None:
    """OSError where that is not allowed."""
    if LIBC.unshare(NEW_MOUNTS | NEW_NAMES | NEW_NETWORK) or LIBC.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), "unshare")


def ask_no_name_server(folder: Path) -> None:
    """There is none to be reached, and c10d looks up the names of all peers."""
    names = folder / "nsswitch.conf"
    names.write_text("hosts: files\n")
    if LIBC.mount(None, b"/", None, PRIVATE_ALL_BELOW, None) == 0:
        LIBC.mount(bytes(names), b"/etc/nsswitch.conf", None, BIND, None)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdout=subprocess.DEVNULL)


def bring_up(rank: int) -> None:
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{ADDRESSES[rank]}/24", "dev", f"v{rank}")
    ip("link", "set", f"v{rank}", "up")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def rank(number: int, folder: Path) -> tuple[str, float]:
    """What a save raises that is under way when the network is cut, and after how long."""
    import torch.distributed as dist

    from dcpring import Checkpointer, CheckpointError, Replicated, RingWriter

    os.environ["GLOO_SOCKET_IFNAME"] = f"v{number}"
    where = f"tcp://{ADDRESSES[0]}:{PORT}"
    dist.init_process_group("gloo", where, timeout=timedelta(seconds=120), world_size=2, rank=number)

    class Step:
        def state_dict(self) -> dict[str, int]:
            return {"step": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    write_data = RingWriter.write_data

    def cut(self: RingWriter, *args: object) -> object:
        if number == 0:
            ip("link", "set", "v0", "down")
            (folder / "cut").touch()
        wait_for(folder / "cut")
        return write_data(self, *args)  # type: ignore[arg-type]

    checkpointer = Checkpointer(folder / "checkpoints", {"step": Replicated(Step())}, timeout=20)
    checkpointer.save(1)
    checkpointer._ranks.set_timeout(timedelta(seconds=5))
    RingWriter.write_data = cut  # type: ignore[method-assign, assignment]
    began = time.monotonic()
    try:
        checkpointer.save(2)
    except CheckpointError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def main(folder: Path) -> None:
    try:
        enter_host("node0")
        ask_no_name_server(folder)
        ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
    except (OSError, subprocess.CalledProcessError) as error:
        print(json.dumps({"skip": f"no namespaces can be made: {error}"}))
        return
    child = os.fork()
    number = 0 if child else 1
    if child:
        wait_for(folder / "entered")
        ip("link", "set", "v1", "netns", str(child))
        (folder / "moved").touch()
    else:
        enter_host("node1")
        (folder / "entered").touch()
        wait_for(folder / "moved")
    bring_up(number)
    (folder / f"result-{number}.tmp").write_text(json.dumps(rank(number, folder)))
    (folder / f"result-{number}.tmp").rename(folder / f"result-{number}")
    if child:
        wait_for(folder / "result-1")
        print(json.dumps([json.loads((folder / f"result-{each}").read_text()) for each in (0, 1)]))
        sys.stdout.flush()
    os._exit(0)  # no group can be destroyed


main(Path(sys.argv[1]))
