"""``import dcpring`` is quick and does not import torch; what needs it does so when it is asked for."""

from __future__ import annotations

import re
import subprocess
import sys

MOST_MODULES = 60
"""Of the standard library too; the time of an import depends on the machine, the number of modules does not."""


def _times() -> tuple[dict[str, float], str]:
    code = "import sys, dcpring; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')])"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, timeout=300)
    rows = re.findall(r"import time: +(\d+) \| +(\d+) \| ( *)(\S+)", done.stderr)
    names = [name for _, _, _, name in rows]
    begin = next(index for index, name in enumerate(names) if name == "site") + 1
    return {name: int(own) / 1000 for own, _, _, name in rows[begin:]}, done.stdout.strip()


def test_import_is_quick_and_without_torch() -> None:
    best: dict[str, float] = {}
    for _ in range(5):
        times, torch = _times()
        assert torch == "[]"
        assert len(times) < MOST_MODULES, sorted(times)
        best = {name: min(took, best.get(name, took)) for name, took in times.items()}
        if sum(best.values()) < 100:
            return
    raise AssertionError(f"{sum(best.values()):.0f} ms: {best}")
