"""`python -m tests.hunt ops`: torch's database of ops in every dtype and memory format."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.hunt.values import forms_of
from tests.operators.__main__ import BAD, measured
from tests.operators.samples import entries
from tests.operators.sweep import Extent

__all__ = ["DTYPES", "FORMS", "main"]

DTYPES = [
    "float64",
    "float16",
    "bfloat16",
    "complex128",
    "complex64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float32",
]
FORMS = ("contiguous", "any", "reversed", "stepped", "channels_last", "conjugated", "negated")


def main(argv: Sequence[str]) -> int:
    """Checks every op in every dtype; 1 where one is not right."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt ops", description=__doc__)
    parser.add_argument("ops", nargs="*", help="names or beginnings of names; default: all")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--forms", nargs="+", default=["contiguous"], choices=FORMS)
    parser.add_argument("--samples", type=int, default=2, help="samples an op (default 2)")
    parser.add_argument("--line", type=int, default=6, help="layouts on a mesh of 4 (default 6)")
    parser.add_argument("--square", type=int, default=3, help="layouts on 2x2 (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="another choice of layouts")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds: an op that hangs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--resume", type=Path, default=Path("build/hunt_ops.jsonl"))
    given = parser.parse_args(argv)
    end, bad = time.monotonic() + given.seconds, 0
    for form in given.forms:
        for dtype in given.dtypes:
            if form not in (
                "contiguous",
                "any",
                *forms_of((2, 2, 2, 2), getattr(torch, dtype), True),
            ):
                continue
            if time.monotonic() > end:
                print("stopped: run it again to go on")
                return 1
            extent = Extent(
                given.samples, given.line, given.square, given.seed, dtype, given.limit, form
            )
            every = entries(getattr(torch, dtype))
            names = [n for n in every if not given.ops or any(map(n.startswith, given.ops))]
            found = measured(names, extent, given.resume, given.workers)
            kinds = Counter(r["kind"] for results in found.values() for r in results)
            print(f"{dtype} {form}: {len(found)} ops, {dict(kinds)}")
            bad += sum(kinds[kind] for kind in BAD)
    return int(bad > 0)
