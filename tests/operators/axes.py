"""`python -m tests.operators.axes`: what moves nothing on one axis moves nothing on two.

Each op of torch's database is given each operand cut in each dim, over a mesh of 4 and over one of
2x2 whose axes cut the same dim. Where the first takes no collective and cuts all values alike, as
every op does that is independent along the dim, the second takes none either.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator

import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.programs.program import Program
from tests.operators.check import Checked
from tests.operators.layouts import LINE, SQUARE
from tests.operators.progress import bar
from tests.operators.samples import entries, samples_of

__all__ = ["Cuts", "cuts_of"]

Cuts = tuple[str, Program, Program]
"""A sample with the operand and the dim that is cut; its programs on one axis and on two."""


def cuts_of(name: str, samples: int) -> Iterator[Cuts]:
    """The cuts of an op's operands that move nothing on one axis."""
    for sample in samples_of(name, samples):
        try:
            checked = Checked(sample, False)
            checked.graph(False)
        except Exception:  # the plain op fails, or it is no function of types: others tell of it
            continue
        for i, full in enumerate(checked.fulls):
            for d, n in enumerate(full.shape):
                if n == 0 or n % 4:  # blocks of uneven cuts differ by mesh
                    continue
                try:
                    line = _program(checked, i, d, LINE)
                    if not line.received_bytes and _evenly(line):
                        yield f"{sample.text}: {i}, {d}", line, _program(checked, i, d, SQUARE)
                except FdtensorError:  # random numbers without a key
                    break


def _program(checked: Checked, operand: int, dim: int, mesh: Mesh) -> Program:
    layouts = [mesh.layout() for _ in checked.fulls]
    layouts[operand] = Layout(mesh, [Shard(dim)] * mesh.ndim)
    pairs = zip(checked.fulls, layouts)
    return checked.program(False, [TensorType(f.shape, f.dtype, layout) for f, layout in pairs])


def _evenly(program: Program) -> bool:
    """Whether all cuts are plain ones, into blocks of one size that two axes can make."""
    return all(
        isinstance(p, Shard) and t.shape[p.dim] % 4 == 0
        for t in program.types
        for p in t.layout.placements
        if isinstance(p, Cut)
    )


def main() -> int:
    """Prints what moves more on two axes; 1 where anything does."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators.axes", description=__doc__)
    parser.add_argument("ops", nargs="*", help="names or beginnings of names; default: all")
    parser.add_argument("--samples", type=int, default=6, help="samples an op (default 6)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = [n for n in entries() if not given.ops or any(n.startswith(o) for o in given.ops)]
    count, bad = 0, 0
    with bar() as progress:
        for name in progress.track(names):
            for text, _, square in cuts_of(name, given.samples):
                count += 1
                if square.received_bytes:
                    bad += 1
                    progress.print(f"{name} {text}: {square.received_bytes} B", markup=False)
    print(f"{count} cuts of {len(names)} ops that move nothing on one axis; {bad} do on two")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
