"""`python -m tests.operators`: the whole measure, with a progress bar; goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from tests.operators.progress import bar
from tests.operators.samples import entries
from tests.operators.sweep import Extent, known, sweep

BAD = ("wrong", "error", "crash", "hang")


def main() -> int:
    """Checks the ops that are named, or all; 1 where one is not right."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators", description=__doc__)
    parser.add_argument("ops", nargs="*", help="names or beginnings of names; default: all")
    parser.add_argument("--samples", type=int, default=6, help="samples an op (default 6)")
    parser.add_argument("--line", type=int, default=24, help="layouts on a mesh of 4 (default 24)")
    parser.add_argument("--square", type=int, default=12, help="layouts on 2x2 (default 12)")
    parser.add_argument("--dtype", default="float32", help="bool, int64, bfloat16, complex64, ...")
    parser.add_argument("--seed", type=int, default=0, help="another choice of layouts")
    parser.add_argument("--parts", action="store_true", help="some outputs of those with several")
    parser.add_argument("--form", default="contiguous", help="memory format of blocks, or `any`")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=600, help="when an op counts as a hang")
    parser.add_argument("--results", type=Path, default=Path("build/operators.jsonl"))
    parser.add_argument("--again", action="store_true", help="check also what is in the results")
    given = parser.parse_args()
    extent = Extent(
        *(given.samples, given.line, given.square, given.seed, given.dtype, given.seconds),
        parts=given.parts,
        form=given.form,
    )
    every = entries(getattr(torch, given.dtype))
    names = [n for n in every if not given.ops or any(n.startswith(o) for o in given.ops)]
    return report(measured(names, extent, given.results, given.workers, given.again))


def measured(
    names: Sequence[str], extent: Extent, path: Path, workers: int, again: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """The results of these ops, from the file at `path` where it has them; what is bad is printed.

    New ones are added to the file.
    """
    found = {} if again else known(path, extent)
    rest = [n for n in names if n not in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    with bar() as progress, path.open("a") as file:
        task = progress.add_task("ops", total=len(names), completed=len(names) - len(rest))
        for name, results in sweep(rest, extent, workers):
            found[name] = results
            line = {"op": name, "extent": attrs.asdict(extent), "results": results}
            file.write(json.dumps(line) + "\n")
            file.flush()
            progress.update(task, advance=1, description=name[:32])
            for kind in BAD:
                bad = [r for r in results if r["kind"] == kind]
                if bad:
                    r = bad[0]
                    progress.print(f"{kind} {name} ({len(bad)} of {len(results)}): {r['sample']}")
                    progress.print(f"    {r['layouts']}: {r['text']}", markup=False)
    return {n: found[n] for n in names if n in found}


def report(found: dict[str, list[dict[str, Any]]]) -> int:
    """Prints the totals."""
    rows = [r for results in found.values() for r in results]
    print(f"{len(found)} ops, {len(rows)} combinations:", dict(Counter(r["kind"] for r in rows)))
    tested = {n: r for n, r in found.items() if any(x["kind"] not in ("none", "random") for x in r)}
    clean = [n for n, r in tested.items() if all(x["kind"] in ("right", "none") for x in r)]
    print(f"{len(clean)} of {len(tested)} testable ops are right on every combination")
    for kind in BAD:
        names = [n for n, r in tested.items() if any(x["kind"] == kind for x in r)]
        print(f"{kind}: {len(names)} ops", *names[:40])
    for what, some in (("sharded", rows), ("sharded, even", [r for r in rows if r["even"]])):
        some = [r for r in some if r["kind"] == "right" and r["sharded"]]
        counts = Counter(r["moves"] for r in some)
        shares = {k: f"{100 * n / max(1, len(some)):.0f}%" for k, n in counts.most_common()}
        fallback = sum(bool(r["fallback"]) for r in some) / max(1, len(some))
        peak = sum(r["peak"] for r in some) / max(1, len(some))
        print(f"{what}: {len(some)}; {shares}; fallback {100 * fallback:.1f}%; peak {peak:.2f}")
    return int(any(r["kind"] in BAD for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
