"""`shrunk`: the smallest program that was tried and fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from tests.hunt.records import Input, Line, Program, Setting, names_in, reachable
from tests.hunt.values import kind_of

__all__ = ["shrunk", "tidy"]

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, attempts: int = 300, seconds: float = 60.0) -> Program:
    """A program that fails as well, from which nothing can be taken away."""
    end, left, before = time.monotonic() + seconds, attempts, None
    while before != program:
        before = program
        for way in (_outs, _halves, _settings, _lines, _meshes, _inputs, _layouts, _sizes):
            again = True
            while again:
                again = False
                for smaller in way(program):
                    if left <= 0 or time.monotonic() > end:
                        return program
                    left -= 1
                    if smaller != program and fails(smaller):
                        program, again = smaller, True
                        break
    return program


def tidy(program: Program, lines: Sequence[Line], outs: Sequence[str]) -> Program | None:
    """The program of some of its lines and results, without inputs that nobody names.

    Where no result is left, what the last line makes is one.
    """
    lines = reachable(lines, program.names)
    bound = {*program.names, *(n for line in lines for n in line.binds)}
    kept = tuple(n for n in outs if n in bound)
    kept = kept or tuple(n for line in lines[-1:] for n in (*line.binds, *line.writes))
    named = {*kept, *(n for line in lines for n in names_in(line.text))}
    inputs = tuple(i for i in program.inputs if i.name in named)
    if not inputs or not kept:
        return None
    setting = program.setting
    pins = tuple((n, layout) for n, layout in setting.pins if n in bound)
    setting = attrs.evolve(setting, pins=pins)
    if setting.out_layouts is not None and setting.way in ("spmd", "run", "gloo"):
        wanted = dict(zip(program.outs, setting.out_layouts))
        setting = attrs.evolve(setting, out_layouts=tuple(wanted.get(n) for n in kept))
    return Program(program.mesh, inputs, lines, kept, setting)


def _some(found: Program | None) -> Iterator[Program]:
    if found is not None:
        yield found


def _outs(program: Program) -> Iterator[Program]:
    """One result, then one less; or that of the last line."""
    last = [n for line in program.lines[-1:] for n in (*line.binds, *line.writes)]
    if not set(program.outs) <= set(last) and program.setting.out_layouts is None:
        yield from _some(tidy(program, program.lines, last))
    for name in program.outs if len(program.outs) > 1 else ():
        yield from _some(tidy(program, _needed(program, [name]), [name]))
    for name in program.outs if len(program.outs) > 2 else ():
        rest = [n for n in program.outs if n != name]
        yield from _some(tidy(program, _needed(program, rest), rest))


def _needed(program: Program, outs: Sequence[str]) -> tuple[Line, ...]:
    """The lines that some results may depend on, and those that fail."""
    last = [i for i, line in enumerate(program.lines) if set(line.binds) & set(outs)]
    end = max(last, default=-1) + 1
    return tuple(
        line for i, line in enumerate(program.lines) if i < end or line.fails or line.writes
    )


def _halves(program: Program) -> Iterator[Program]:
    """Without a stretch of lines, the longest first."""
    count = len(program.lines)
    size = count // 2
    while size > 1:
        for start in range(count - size, -1, -size):
            rest = program.lines[:start] + program.lines[start + size :]
            yield from _some(tidy(program, rest, program.outs))
        size //= 2


def _lines(program: Program) -> Iterator[Program]:
    """Without a line, or with an input in the place of what it binds."""
    for i in reversed(range(len(program.lines))):
        rest = program.lines[:i] + program.lines[i + 1 :]
        yield from _some(tidy(program, rest, program.outs))
    for i in reversed(range(len(program.lines))):
        yield from _started(program, i)


def _started(program: Program, i: int) -> Iterator[Program]:
    """With inputs for the results of line `i`, each cut in some way or whole."""
    from tests.hunt.plain import values_after

    line = program.lines[i]
    values = values_after(program, i + 1) if line.binds else None
    if values is None:
        return
    rest = program.lines[:i] + program.lines[i + 1 :]
    for dim in (0, 1, None):
        made = []
        for name in line.binds:
            t = values[name]
            placed: Placement = Replicate() if dim is None or dim >= t.ndim else Shard(dim)
            layout = Layout(program.mesh, [placed, *[Replicate()] * (program.mesh.ndim - 1)])
            made.append(Input(name, tuple(t.shape), t.dtype, "small", i, "contiguous", layout))
        larger = attrs.evolve(program, inputs=(*program.inputs, *made))
        yield from _some(tidy(larger, rest, program.outs))


def _settings(program: Program) -> Iterator[Program]:
    """Fewer moments, no layouts for the results, a simpler way."""
    setting, others = program.setting, []
    plain = Setting(setting.way)
    for i in range(len(setting.pins)):
        others.append(attrs.evolve(setting, pins=setting.pins[:i] + setting.pins[i + 1 :]))
    simple = ("spmd", "call", "grad")
    others = [plain, *others]
    others += [attrs.evolve(setting, moments=(m,)) for m in setting.moments]
    if len(setting.moments) > 2:
        for i in range(len(setting.moments)):
            left = setting.moments[:i] + setting.moments[i + 1 :]
            others.append(attrs.evolve(setting, moments=left))
    others.append(attrs.evolve(setting, out_layouts=None))
    others.append(attrs.evolve(setting, on_missing_rule="replicate"))
    rank = simple.index(setting.way) if setting.way in simple else len(simple)
    for way in simple[:rank]:
        fewer = None if way != "spmd" else setting.out_layouts
        others.append(attrs.evolve(setting, way=way, out_layouts=fewer))
    if setting.out_layouts is not None:
        for i, layout in enumerate(setting.out_layouts):
            for simpler in _simpler_layouts(layout) if layout is not None else ():
                wanted = list(setting.out_layouts)
                wanted[i] = simpler
                others.append(attrs.evolve(setting, out_layouts=tuple(wanted)))
    for other in others:
        if other != setting:
            yield attrs.evolve(program, setting=other)


def _meshes(program: Program) -> Iterator[Program]:
    """An axis less, an axis that is shorter, ranks in order."""
    mesh = program.mesh
    for k in range(mesh.ndim if mesh.ndim > 1 else 0):
        axes = [a for i, a in enumerate(mesh.axes) if i != k]
        sizes = [n for i, n in enumerate(mesh.sizes) if i != k]
        yield from _some(_on(program, Mesh(**dict(zip(axes, sizes)))))
    for k, n in enumerate(mesh.sizes):
        for less in range(1 if n > 1 else n, n):
            sizes = [less if i == k else m for i, m in enumerate(mesh.sizes)]
            yield from _some(_on(program, Mesh(**dict(zip(mesh.axes, sizes)))))
    yield from _some(_on(program, Mesh(**dict(zip(mesh.axes, mesh.sizes)))))


def _on(program: Program, mesh: Mesh) -> Program | None:
    """The program on another mesh, its axes placed as far as they are there."""
    try:
        inputs = tuple(attrs.evolve(i, layout=_moved(i.layout, mesh)) for i in program.inputs)
        wanted = program.setting.out_layouts
        if wanted is not None:
            wanted = tuple(None if w is None else _moved(w, mesh) for w in wanted)
        pins = tuple((n, _moved(w, mesh)) for n, w in program.setting.pins)
    except FdtensorError:
        return None
    setting = attrs.evolve(program.setting, out_layouts=wanted, pins=pins)
    return attrs.evolve(program, mesh=mesh, inputs=inputs, setting=setting)


def _moved(layout: Layout, mesh: Mesh) -> Layout:
    placed = []
    for axis, size in zip(mesh.axes, mesh.sizes):
        p = layout[axis]
        if isinstance(p, Ragged) and len(p.sizes) != size:
            kept = p.sizes[:size]
            p = Ragged(p.dim, (*kept[:-1], kept[-1] + sum(p.sizes[size:])))
        placed.append(p)
    order = tuple((dim, tuple(a for a in axes if a in mesh.axes)) for dim, axes in layout.order)
    return Layout(mesh, placed, tuple((d, axes) for d, axes in order if len(axes) > 1) or None)


def _layouts(program: Program) -> Iterator[Program]:
    """Simpler layouts of the inputs."""
    for k, given in enumerate(program.inputs):
        for layout in _simpler_layouts(given.layout):
            yield _with(program, k, attrs.evolve(given, layout=layout))


def _simpler_layouts(layout: Layout) -> Iterator[Layout]:
    mesh = layout.mesh
    if layout.placements != (Replicate(),) * mesh.ndim:
        yield Layout(mesh, [Replicate()] * mesh.ndim)
    for k, p in enumerate(layout.placements):
        simpler: list[Placement] = [] if p == Replicate() else [Replicate()]
        if isinstance(p, (StridedShard, Ragged)):
            simpler.append(Shard(p.dim))
        if isinstance(p, Partial) and p.reduce_op != "sum":
            simpler.append(Partial("sum"))
        for other in simpler:
            placed = [other if i == k else q for i, q in enumerate(layout.placements)]
            try:
                yield Layout(mesh, placed)
            except FdtensorError:
                continue


def _inputs(program: Program) -> Iterator[Program]:
    """Plain storage, plain values, plain dtypes."""
    for k, given in enumerate(program.inputs):
        if given.form != "contiguous":
            yield _with(program, k, attrs.evolve(given, form="contiguous"))
        if given.fill not in ("small", "positive") and "index" not in given.fill:
            yield _with(program, k, attrs.evolve(given, fill="small"))
    wide = {"f": torch.float64, "i": torch.int64, "c": torch.complex128, "b": torch.bool}
    for kinds in ("fi", "fic"):  # as wide as can be; then floats alone
        inputs = []
        for given in program.inputs:
            kind = kind_of(given.dtype)
            plain = kinds == "fi" or "index" in given.fill or kind == "b"
            inputs.append(attrs.evolve(given, dtype=wide[kind] if plain else torch.float64))
        yield attrs.evolve(program, inputs=tuple(inputs))


def _with(program: Program, k: int, given: Input) -> Program:
    inputs = (*program.inputs[:k], given, *program.inputs[k + 1 :])
    return attrs.evolve(program, inputs=inputs)


def _sizes(program: Program) -> Iterator[Program]:
    """Every dim of a size made smaller; then one dim of an input."""
    sizes = sorted({n for i in program.inputs for n in i.shape if n > 1}, reverse=True)
    for n in sizes:
        for less in range(1, n):
            yield from _resized(program, lambda k, d, size: less if size == n else size)  # noqa: B023
    for k, given in enumerate(program.inputs):
        for d, n in enumerate(given.shape):
            for less in sorted({1, 2, n - 1}):
                if 0 < less < n:
                    at = (k, d)
                    yield from _resized(
                        program,
                        lambda i, j, size: less if (i, j) == at else size,  # noqa: B023
                    )


def _resized(program: Program, size_of: Callable[[int, int, int], int]) -> Iterator[Program]:
    inputs = []
    for k, given in enumerate(program.inputs):
        shape = tuple(size_of(k, d, n) for d, n in enumerate(given.shape))
        layout = given.layout
        placed = [
            _cut_to(p, shape[p.dim]) if isinstance(p, Ragged) else p for p in layout.placements
        ]
        try:
            layout = Layout(layout.mesh, placed, layout.order)
            TensorType(shape, given.dtype, layout)
        except FdtensorError:
            return
        inputs.append(attrs.evolve(given, shape=shape, layout=layout))
    yield attrs.evolve(program, inputs=tuple(inputs))


def _cut_to(p: Ragged, size: int) -> Ragged:
    left, sizes = size, []
    for n in p.sizes:
        sizes.append(min(n, left))
        left -= sizes[-1]
    return Ragged(p.dim, (*sizes[:-1], sizes[-1] + left))
