"""How a cost grows with the number of ranks: what was measured, and a power law through it for what was not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression, median
from typing import Any

from _contestants import OURS, STOCK
from _planners import PlanSample

QUANTITIES: dict[str, Callable[[PlanSample], float | None]] = {
    "cpu_seconds": lambda sample: sample.cpu_seconds,
    "gathered_bytes": lambda sample: sample.gathered_bytes,
    "peak_bytes": lambda sample: sample.peak_bytes,
}


@dataclass(frozen=True)
class PowerLaw:
    """`factor * ranks ** exponent`; `worst` is the largest relative difference from a point it was fitted to."""

    factor: float
    exponent: float
    worst: float

    def __call__(self, ranks: int) -> float:
        return float(self.factor * ranks**self.exponent)

    @classmethod
    def through(cls, points: dict[int, float]) -> PowerLaw | None:
        if len(points) < 2:
            return None
        line = linear_regression([math.log(ranks) for ranks in points], [math.log(value) for value in points.values()])
        law = cls(math.exp(line.intercept), line.slope, 0.0)
        return cls(law.factor, law.exponent, max(abs(law(ranks) / value - 1) for ranks, value in points.items()))


class Growth:
    """One contestant's medians of one quantity by ranks, and the law through them."""

    def __init__(self, samples: Sequence[PlanSample], who: str, quantity: str) -> None:
        self.points: dict[int, float] = {}
        for ranks in sorted({sample.ranks for sample in samples if sample.who == who}):
            values = [QUANTITIES[quantity](sample) for sample in samples if (sample.who, sample.ranks) == (who, ranks)]
            known = [value for value in values if value is not None]
            if known:
                self.points[ranks] = median(known)
        self.law = PowerLaw.through(self.points)

    def at(self, ranks: int) -> tuple[float | None, bool]:
        """The value, and whether it is only fitted."""
        if ranks in self.points:
            return self.points[ranks], False
        return (None if self.law is None else self.law(ranks)), True


def growths(samples: Sequence[PlanSample]) -> dict[tuple[str, str], Growth]:
    return {(who, quantity): Growth(samples, who, quantity) for who in (STOCK, OURS) for quantity in QUANTITIES}


def laws_as_json(samples: Sequence[PlanSample]) -> dict[str, Any]:
    return {
        f"{who}, {quantity}": None if growth.law is None else asdict(growth.law)
        for (who, quantity), growth in growths(samples).items()
    }
