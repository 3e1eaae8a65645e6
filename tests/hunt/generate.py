"""`generated`: the program of a seed and a number."""

from __future__ import annotations

import contextlib
import warnings
from random import Random

import attrs
import torch

from fdtensor.layouts.layout import Layout
from tests.hunt.draw import Draw, Op, Unfit
from tests.hunt.layouts import drawn_layout, drawn_mesh
from tests.hunt.ops import FAMILIES, MISTAKES, RANDOM
from tests.hunt.plain import reference
from tests.hunt.records import Program, Setting, names_in
from tests.hunt.values import kind_of

__all__ = ["Extent", "generated"]

MAIN = (
    *[torch.float64] * 8,
    *[torch.float32] * 3,
    torch.float16,
    torch.bfloat16,
    *[torch.int64] * 2,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.complex128,
    torch.complex64,
    torch.bool,
)
MOMENTS = ("plain", "no_grad", "inference", "autocast", "float64", "deterministic", "tracked")
CHANGES = ("other_values", "other_forms", "other_layouts", "thread")


@attrs.frozen
class Extent:
    """How large programs are."""

    least: int = 10
    most: int = 40
    """Lines of a program."""
    ranks: int = 12
    """The most ranks of a mesh."""
    gloo: bool = False
    """Whether programs of at most 4 ranks run on real ones."""
    formats: bool = True
    """Whether blocks are stored in all kinds of memory formats."""
    without: tuple[str, ...] = ()
    """Ops and moments that are not drawn: those whose failures are known."""


def generated(seed: int, number: int, extent: Extent = Extent()) -> Program:
    """The program of this number: always the same one."""
    random = Random(f"{seed}/{number}")
    for _ in range(20):
        mesh = drawn_mesh(random, extent.ranks)
        special = random.random() < 0.05
        draw = Draw(random, mesh, random.choice(MAIN), special, extent.formats)
        with warnings.catch_warnings(), contextlib.suppress(Unfit):
            warnings.simplefilter("ignore")
            return _grown(draw, extent)
    raise AssertionError("no program can be drawn")


def _grown(draw: Draw, extent: Extent) -> Program:
    random = draw.random
    for _ in range(random.choice((1, 2, 2, 3))):
        draw.fresh(_shape(random))
    wanted = random.randint(extent.least, extent.most)
    shy = random.random() < 0.7  # what depends on data makes all else run on replicas
    pure = random.random() < 0.4  # torch has no gradient of much that is written in place
    tries = 0
    while len(draw.lines) < wanted and tries < 20 * wanted:
        tries += 1
        op = _drawn(random)
        if draw.keyed and random.random() < 0.2:
            op = _weighted(random, RANDOM)
        left_out = (op.data and (shy or draw.keyed)) or (op.writes and pure)
        if not left_out and op.name not in extent.without:
            draw.attempt(op)
    if random.random() < 0.15 and not draw.keyed:
        for _ in range(40):
            op = _weighted(random, MISTAKES)
            if op.name not in extent.without and draw.attempt(op):
                break
    if not draw.lines:
        raise Unfit
    return _finished(draw, extent)


def _drawn(random: Random) -> Op:
    names = list(FAMILIES)
    family = random.choices(names, [FAMILIES[n][1] for n in names])[0]
    return _weighted(random, FAMILIES[family][0])


def _weighted(random: Random, ops: tuple[Op, ...]) -> Op:
    return random.choices(ops, [op.weight for op in ops])[0]


def _shape(random: Random) -> tuple[int, ...]:
    ndim = random.choice((0, 1, 1, 2, 2, 2, 2, 3, 3, 4))
    sizes = (1, 2, 3, 4, 5, 6, 7, 8) if ndim < 3 else (1, 2, 3, 4)
    return tuple(0 if random.random() < 0.03 else random.choice(sizes) for _ in range(ndim))


def _finished(draw: Draw, extent: Extent) -> Program:
    """The program with its results, only with inputs that it names, in a setting."""
    random = draw.random
    named = {n for line in draw.lines for n in names_in(line.text)}
    names = [n for n in draw.values if n in named]
    written = [n for line in draw.lines for n in line.writes]
    reads = {n for line in draw.lines for n in line.reads}
    ends = [n for n in names if n not in reads]
    outs = [names[-1], *random.sample(names, min(len(names), random.randint(0, 2)))]
    outs += random.sample(ends, random.randint(len(ends) // 4, len(ends)))
    outs += random.sample(written, min(len(written), 1))
    outs += [n for line in draw.lines if line.fails for n in line.binds]
    outs = list(dict.fromkeys(outs))
    inputs = tuple(i for i in draw.inputs if i.name in named)
    program = Program(draw.mesh, inputs, tuple(draw.lines), tuple(outs))
    return attrs.evolve(program, setting=_setting(draw, program, extent))


def _setting(draw: Draw, program: Program, extent: Extent) -> Setting:
    random = draw.random
    smooth = any(kind_of(i.dtype) in "fc" for i in program.inputs)
    ways = ["spmd"] * 4 + ["call"] * 2 + ["run", "vmap", "fx"]
    if smooth and not program.fails:  # what no derivative needs is not computed
        ways += ["grad"] * 4 + ["backward", "call_backward", "jvp", "hessian"] * 2
    if draw.keyed:
        ways = ["keyed"]
    elif extent.gloo and program.mesh.size <= 4:
        ways = ["gloo"]
    way = next(w for w in (*random.sample(ways, len(ways)), "spmd") if _runs(program, w))
    moments = ["plain"]
    if way != "gloo" and random.random() < 0.35:
        some = MOMENTS if way in ("spmd", "call") else ("plain", "float64", "deterministic")
        some = [m for m in (*some, *CHANGES) if m not in extent.without]
        moments = random.choices(some, k=random.randint(2, 4))
    wanted = None
    if (
        way in ("spmd", "run", "fx", "gloo", "keyed")
        and not program.fails
        and random.random() < 0.3
    ):
        wanted = tuple(_wanted(draw, name) for name in program.outs)
    missing = "error" if random.random() < 0.05 else "replicate"
    pins = _pins(draw, program) if random.random() < 0.4 else ()
    return Setting(way, tuple(moments), wanted, missing, pins)


def _runs(program: Program, way: str) -> bool:
    """Whether torch has it: not every op has derivatives or can be batched."""
    if program.fails or way in ("spmd", "keyed"):
        return True
    return reference(attrs.evolve(program, setting=Setting(way)), "plain").error is None


def _pins(draw: Draw, program: Program) -> tuple[tuple[str, Layout], ...]:
    """Layouts for some values that nothing writes into."""
    written = {n for line in program.lines for w in line.writes for n in draw.aliases(w)}
    names = [n for line in program.lines if not line.fails for n in line.binds]
    some = [n for n in names if n not in written and draw.chance(0.25)]
    return tuple((n, _layout(draw, n)) for n in some)


def _layout(draw: Draw, name: str) -> Layout:
    t = draw[name]
    return drawn_layout(draw.random, draw.mesh, tuple(t.shape), t.dtype, draw.exact[name])


def _wanted(draw: Draw, name: str) -> Layout | None:
    return None if draw.chance(0.3) else _layout(draw, name)
