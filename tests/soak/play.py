"""Random rounds of saves, loads, conversions and resumes in which things go wrong, for as long as one likes.

    python tests/soak/play.py [--minutes N] [--seed N]

Each round has a seed, which is printed first: with it the round is played again. After each round, what loads is what
was committed; nothing hangs; nothing is left behind.
"""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(TESTS)

from soak import conversions, resumes, saves  # noqa: E402
from soak.story import Story  # noqa: E402

KINDS = {"saves": saves.play, "resumes": resumes.play, "conversions": conversions.play}
MOST_FAILURES = 20


def kind_of(seed: int) -> str:
    return random.Random(f"kind {seed}").choice(sorted(KINDS))


def play(seed: int, base: Path, kind: str | None = None) -> Story:
    """Plays one round; returns what happened in it. Raises what it finds, with the story on it as a note."""
    story = Story()
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-", dir=base))
    try:
        KINDS[kind or kind_of(seed)](random.Random(seed), folder, story)
    except BaseException as error:
        error.add_note(f"this happened:\n{story}")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return story


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None, help="play this round only")
    parser.add_argument("--kind", choices=sorted(KINDS), default=None, help="rounds of this kind only")
    parser.add_argument("--verbose", action="store_true", help="tell what happens in each round")
    parser.add_argument("--folder", type=Path, default=TESTS.parent / "build", help="where to work")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # a disk that is mounted is given back
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    seeds = iter(lambda: secrets.randbelow(1 << 32), None) if arguments.seed is None else iter([arguments.seed])
    played: Counter[str] = Counter()
    failed: list[int] = []
    for seed in seeds:
        kind = arguments.kind or kind_of(seed)
        print(f"round {sum(played.values()) + 1}: seed {seed}, {kind}", end="", flush=True)
        started = time.monotonic()
        try:
            story = play(seed, arguments.folder, kind)
            print(f", {time.monotonic() - started:.1f} s", flush=True)
            if arguments.verbose:
                print(story, flush=True)
        except Exception:
            failed.append(seed)
            print(f", FAILED\n{traceback.format_exc()}", flush=True)
        played[kind] += 1
        if time.monotonic() > end or len(failed) >= MOST_FAILURES:
            break
    print(f"{dict(played)}; {len(failed)} failed: {failed}" if failed else f"{dict(played)}: all good")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
