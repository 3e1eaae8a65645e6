"""`python -m tests.workloads [words...]`: what plain functions cost beside programs by hand.

Bytes are those that the busiest rank receives; seconds are those of the default cost model. With
words it shows the workloads that have one of them in their names, and prints both programs.
"""

from __future__ import annotations

import sys

from tests.workloads.every import EVERY
from tests.workloads.workload import Measured, measured

HEAD = f"{'workload':<53}{'MB received':>18}{'ratio':>6}{'ms':>16}{'ratio':>6}{'GB at most':>15}"


def line(m: Measured) -> str:
    """A workload and its costs: automatic / by hand."""
    a, b = m.automatic, m.by_hand
    return (
        f"{m.workload.name:<53}"
        f"{f'{a.received / 1e6:.2f} / {b.received / 1e6:.2f}':>18}{m.of_bytes:>6.2f}"
        f"{f'{a.seconds * 1e3:.2f} / {b.seconds * 1e3:.2f}':>16}{m.of_seconds:>6.2f}"
        f"{f'{a.peak / 1e9:.2f} / {b.peak / 1e9:.2f}':>15}"
    )


def main(words: list[str]) -> int:
    chosen = [w for w in EVERY.values() if not words or any(word in w.name for word in words)]
    if not chosen:
        print(f"No workload has one of these words in its name: {', '.join(words)}.")
        return 2
    print(HEAD)
    for workload in chosen:
        print(line(measured(workload)), flush=True)
        if workload.why:
            print(f"    {workload.why}")
    for workload in chosen if words else ():
        print("", workload.program(workload.real, workload.mesh), sep="\n")
        print("", workload.program_by_hand(workload.real, workload.mesh), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
