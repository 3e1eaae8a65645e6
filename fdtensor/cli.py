"""The command line: `demo`, `train`, `plan` and `replay`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

from fdtensor import __version__
from fdtensor.layouts.dtypes import parse_dtype
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import parse_placement
from fdtensor.layouts.progress import working
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["main"]

ABOUT = """\
fdtensor: distributed tensors as plain values.

  python -m fdtensor demo                       move real numbers between 4 processes, check all
  python -m fdtensor demo --simulate dp=2,tp=4  the same with every rank in this process
  torchrun --nproc-per-node 4 -m fdtensor demo  the same on the processes that torchrun started
  python -m fdtensor train --mesh dp=2,tp=2     train a GPT on Python's own sources
  python -m fdtensor plan --mesh dp=2,tp=4 --shape 8192,8192 --src "S(0),P(sum)" --dst "R,S(1)"
                                                how a tensor gets from one layout to another
  python -m fdtensor replay FOLDER              where ranks part, by the calls that they have kept

Each of them takes --help. In a script or a notebook, after "import fdtensor as fd":

  fd.plan(src, dst)             how a tensor gets from one layout to another, and what it costs
  fd.distribute, fd.spmd        tensors in layouts, and plain torch functions of them
  fd.trace(f, *types)           the program of a function: read it, price it, run it
  fd.show(x), fd.explain(x)     pictures of types, plans and programs; why they are what they are
  fd.local_cluster(4)           real ranks, kept alive from cell to cell
  help(fd), notebooks/          all of it"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence and exit status 2."""
        sys.exit(_fail(f"{message}. Try: {self.prog} --help"))


def _fail(message: str, status: int = 2) -> int:
    print(f"fdtensor: {message}", file=sys.stderr)
    return status


_INTERRUPTED = 130
"""The exit status that shells give a command that Ctrl-C has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 1 for wrong results, 2 for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(ABOUT)
        return 0
    options = _parser().parse_args(arguments)
    try:
        if options.command == "demo":
            return _demo(options)
        if options.command == "train":
            from fdtensor.train.command import train

            return train(parse_mesh(_filled(options.mesh)), options)
        if options.command == "replay":
            from fdtensor.inspect.replay import replayed

            print(replayed(options.folder))
            return 0
        return _plan(options)
    except FdtensorError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        folder = getattr(options, "checkpoint", None)
        after = f" The same command goes on from the last checkpoint in {folder!r}."
        return _fail(f"interrupted.{after if folder else ''}", _INTERRUPTED)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> _Parser:
    from fdtensor.train.command import add_arguments

    parser = _Parser(
        prog="python -m fdtensor", description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fdtensor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{demo,train,plan,replay}")
    demo = commands.add_parser("demo", help="walk real numbers through many layouts and check")
    demo.add_argument("--simulate", metavar="MESH", help="all ranks in this process: dp=2,tp=4")
    demo.add_argument("--mesh", metavar="MESH", help="the mesh of processes (default dp=2,tp=2)")
    demo.add_argument("-v", "--verbose", action="store_true", help="print every plan")
    add_arguments(commands.add_parser("train", help="train a GPT on a mesh and watch its loss"))
    replay = commands.add_parser("replay", help="where ranks part, by the calls that they kept")
    replay.add_argument("folder", help="with the files of fd.io.dump_calls, one for each rank")
    plan = commands.add_parser(
        "plan",
        help="print the plan between two layouts",
        description="A layout has one placement an axis, as R, S(0), S(0, f=2), S(0, [3,5]) or "
        "P(sum), or is written per dim: [dp,-,(tp,pp)]{sum:x}.",
    )
    plan.add_argument("--mesh", required=True, help="axes and sizes: dp=2,tp=4")
    plan.add_argument("--shape", required=True, help="the full shape: 8192,8192")
    plan.add_argument("--dtype", default="f32", help="f32, bf16, i64, ... (default f32)")
    plan.add_argument("--src", required=True, help="the layout now: 'S(0),P(sum)'")
    plan.add_argument("--dst", required=True, help="the layout wanted: 'R,S(1)'")
    plan.add_argument("--dst-mesh", help="another mesh for the destination, on ranks 0, 1, ...")
    plan.add_argument("--max-bytes", type=int, help="what any rank may hold at once")
    models = ["nccl", "h100", "h200", "a100", "tpu_v5p", "gloo"]
    plan.add_argument("--cost", choices=models, default="nccl", help="the cost model")
    plan.add_argument("--exact", action="store_true", help="print bytes to the last one")
    plan.add_argument("--json", action="store_true", help="print JSON")
    return parser


# --- demo ------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    from fdtensor import demo

    if options.simulate:
        if options.mesh:
            raise FdtensorError(
                "--simulate has a mesh, and so has --mesh.", hint="Give one of the two."
            )
        mesh = parse_mesh(options.simulate)
        with working(f"simulating {mesh.size} ranks"):
            walks = demo.simulated(mesh)
        return 0 if demo.report(walks, print, options.verbose) else 1
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _demo_under_torchrun(options)
    mesh = parse_mesh(options.mesh or "dp=2,tp=2")
    with working(f"starting {mesh.size} gloo processes"):
        walks = demo.on_processes(mesh)
    return 0 if demo.report(walks, print, options.verbose) else 1


def _demo_under_torchrun(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from fdtensor import demo
    from fdtensor.runtime.process_groups import up

    up()
    world = dist.get_world_size()
    default = f"dp=2,tp={world // 2}" if world % 2 == 0 and world > 2 else f"dp={world}"
    mesh = parse_mesh(options.mesh or default)
    try:
        walked = demo.on_this_rank(mesh)
        stops_of_ranks: list[list[demo.Stop]] = [[]] * world
        dist.all_gather_object(stops_of_ranks, walked)
        quiet = dist.get_rank() != 0
        write = (lambda _: None) if quiet else print
        right = demo.report(stops_of_ranks, write, options.verbose)
    finally:
        dist.destroy_process_group()
    return 0 if right else 1


# --- plan ------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    from fdtensor.plans import cost as costs
    from fdtensor.plans.planner import plan
    from fdtensor.plans.text import bytes_text, exact_bytes

    mesh = parse_mesh(options.mesh)
    shape, dtype = parse_shape(options.shape), parse_dtype(options.dtype)
    dst_mesh = parse_mesh(options.dst_mesh) if options.dst_mesh else mesh
    src = TensorType(shape, dtype, parse_layout(mesh, options.src))
    dst = TensorType(shape, dtype, parse_layout(dst_mesh, options.dst))
    cost: costs.CostModel = getattr(costs, options.cost.upper())
    p = plan(src, dst, cost=cost, max_bytes=options.max_bytes)
    facts = {
        "received_bytes": p.received_bytes,
        "sent_bytes": p.sent_bytes,
        "lower_bound_bytes": p.lower_bound_bytes,
        "peak_bytes": p.peak_bytes,
        "seconds": p.seconds,
    }
    if options.json:
        print(json.dumps({**facts, "digest": p.digest, "plan": json.loads(p.to_json())}))
        return 0
    with exact_bytes() if options.exact else nullcontext():
        print(p)
        print(f"  bound    {bytes_text(p.lower_bound_bytes)}")
        print(f"  peak     {bytes_text(p.peak_bytes)}")
    print(f"  seconds  {facts['seconds']:.3g} by the cost model {cost.name!r}")
    return 0


def _filled(text: str) -> str:
    """The text of a mesh, with the ranks that torchrun has started in the place of `*`."""
    if "*" not in text:
        return text
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    others = parse_mesh(text.replace("*", "1")).size
    if not ranks or ranks % others or text.count("*") > 1:
        raise FdtensorError(
            f"{ranks} ranks do not fill the mesh {text!r}.",
            hint="One axis may have * as its size: as many ranks as torchrun has started, divided "
            "by the sizes of the others.",
        )
    return text.replace("*", str(ranks // others))


def parse_mesh(text: str) -> Mesh:
    """The mesh written as `dp=2,tp=4`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        pair = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]{1,20})\s*", part)
        if pair is None:
            raise FdtensorError(f"{text!r} is not a mesh: write dp=2,tp=4.")
        if pair[1] in sizes:
            raise FdtensorError(f"{text!r} is not a mesh: axis {pair[1]!r} is given twice.")
        sizes[pair[1]] = int(pair[2])
    return Mesh(**sizes)


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape written as `8192,8192`; an empty text is a 0-d tensor's."""
    parts = [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
    if not all(re.fullmatch("[0-9]{1,20}", part) for part in parts):
        raise FdtensorError(f"{text!r} is not a shape: write 8192,8192.")
    return tuple(map(int, parts))


def parse_layout(mesh: Mesh, text: str) -> Layout:
    """The layout written per axis, `S(0),P(sum)`, or per dim, `[dp,-,(tp,pp)]{sum:x}`."""
    per_dim = re.fullmatch(r"\s*\[(.*)\]\s*(?:\{(.*)\})?\s*", text)
    if per_dim is None:
        return Layout(mesh, [parse_placement(part) for part in _split(text)])
    dims = []
    for part in _split(per_dim[1]):
        axes = [axis.strip() for axis in part.strip(" ()").split(",")]
        dims.append(None if axes in (["-"], [""], ["None"]) else tuple(axes))
    pending = {}
    for part in _split(per_dim[2] or ""):
        reduce_op, _, axis = part.partition(":")
        pending[axis.strip()] = reduce_op.strip()
    return mesh.layout(*dims, partial=pending)


def _split(text: str) -> list[str]:
    """The parts between commas that are not in brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
