"""`python -m tests.operators.beside`: what torch's DTensor moves for the same ops and layouts.

On a fake process group, as rank 0 of it: what collectives return is not looked at, only how
many bytes they bring. Layouts are those that DTensor takes: every combination of `Replicate` and
`Shard(d)`, forward only.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from tests.bench.count import Received
from tests.operators.check import Checked, even, sharded
from tests.operators.layouts import combinations
from tests.operators.samples import Sample, entries, samples_of

__all__ = ["Theirs", "compared", "theirs"]


@attrs.frozen
class Theirs:
    """What DTensor does with a sample on some layouts."""

    kind: str
    """`right` where it runs, else `refused` or `error`."""
    moves: str = ""
    bytes: int = 0


def theirs(sample: Sample, layouts: tuple[Layout, ...], mesh: Any) -> Theirs:
    """What DTensor does; call it where a fake process group is up."""
    args = []
    for tensor, layout in zip(sample.tensors, layouts):
        type = TensorType(tuple(tensor.shape), tensor.dtype, layout)
        block = tensor
        for dim, index in enumerate(type.index(0)):
            block = block.index_select(dim, torch.tensor(list(index), dtype=torch.int64))
        placed = [
            TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate()
            for p in layout.placements
        ]
        shape, stride = tensor.shape, tensor.contiguous().stride()
        args.append(
            DTensor.from_local(block, mesh, placed, run_check=False, shape=shape, stride=stride)
        )
    try:
        with Received() as count:
            for out in flatten(sample.f(*args))[0]:
                if isinstance(out, DTensor):  # nor are ours pending
                    done = [TorchReplicate() if p.is_partial() else p for p in out.placements]
                    out.redistribute(placements=done)
    except NotImplementedError as error:
        return Theirs("refused" if "sharding strategy" in str(error) else "error")
    except Exception:
        return Theirs("error")
    names = " ".join(count.ops)
    gathers = "gather" in names
    moves = "gather" if gathers else "reduce" if count.ops else "none"
    return Theirs("right", moves, count.bytes)


def compared(
    name: str, mesh: Any, line: Mesh, samples: int, most: int
) -> list[tuple[bool, Any, Theirs]]:
    """For each sharded combination whether it is even, what we do and what DTensor does."""
    found = []
    for sample in samples_of(name, samples):
        try:
            checked = Checked(sample, derivatives=False)
        except Exception:  # the plain op does not run
            continue
        for layouts in combinations(sample.tensors, line, most, name):
            types = [
                TensorType(f.shape, f.dtype, layout) for f, layout in zip(checked.fulls, layouts)
            ]
            pending = any(isinstance(lay.placements[0], Partial) for lay in layouts)
            if pending or not sharded(types):
                continue
            ours = checked.result(layouts)
            if ours.kind == "random":
                return []
            found.append((all(map(even, types)), ours, theirs(sample, layouts, mesh)))
    return found


def main() -> int:
    """Prints both side by side."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators.beside", description=__doc__)
    parser.add_argument("ops", nargs="*", help="names or beginnings of names; default: all")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--most", type=int, default=24, help="layouts a sample (default 24)")
    parser.add_argument("--ranks", type=int, default=4, help="5 divides most sizes (default 4)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
    mesh, line = init_device_mesh("cpu", (given.ranks,)), Mesh(x=given.ranks)
    names = [n for n in entries() if not given.ops or any(n.startswith(o) for o in given.ops)]
    rows = []
    for name in track(names, "ops", console=Console(stderr=True)):
        rows += [(name, *row) for row in compared(name, mesh, line, given.samples, given.most)]
    dist.destroy_process_group()
    for title, some in (
        ("all sharded combinations", rows),
        ("those that divide evenly", [r for r in rows if r[1]]),
        ("those that do not", [r for r in rows if not r[1]]),
    ):
        print(f"{title}: {len(some)} of {len({r[0] for r in some})} ops")
        for who, at in (("fdtensor", 2), ("DTensor", 3)):
            kinds = Counter(r[at].kind for r in some)
            moves = Counter(r[at].moves or r[at].kind for r in some)
            moves["none"] += moves.pop("slice", 0)
            shares = {k: f"{100 * n / max(1, len(some)):.1f}%" for k, n in moves.most_common()}
            print(f"  {who:<9} runs {kinds['right']}, moves {shares}")
        both = [r for r in some if r[2].kind == r[3].kind == "right"]
        ours, their = sum(r[2].bytes for r in both), sum(r[3].bytes for r in both)
        more = Counter(r[0] for r in both if r[2].bytes > r[3].bytes)
        print(f"  bytes where both run: {ours} and {their}, {their / max(1, ours):.2f} times")
        print(f"  ours more on {sum(more.values())} combinations of:", *more)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
