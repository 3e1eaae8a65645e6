"""What `show` draws of types, DTensors, meshes, plans and programs, as text and as HTML."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from functools import reduce
from itertools import pairwise, product
from math import prod
from random import Random
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fdtensor import (
    GLOO,
    DTensor,
    Layout,
    Mesh,
    Ragged,
    Replicate,
    SimulatedComm,
    StridedShard,
    TensorType,
    constrain,
    distribute,
    plan,
    trace,
)
from fdtensor.inspect.pictures import Picture, show
from fdtensor.inspect.pictures.canvas import spread
from fdtensor.inspect.pictures.facts import Blocks, Facts, Move, Note, Table, Timeline, owners
from fdtensor.inspect.pictures.folds import Fold, folds
from fdtensor.inspect.pictures.holders import empty_ranks, ranks_text
from fdtensor.inspect.pictures.palette import _luminance, _rgb, color, ink
from fdtensor.inspect.pictures.plans import _rounds
from fdtensor.layouts.errors import FdtensorError, ValueTreeError
from fdtensor.layouts.placement import Spans
from fdtensor.plans.collectives import Exchange
from fdtensor.plans.text import bytes_text
from fdtensor.programs.seconds import line_seconds
from fdtensor.programs.timeline import timeline
from fdtensor.testing.strategies import DTYPES, meshes, redistributions, types
from fdtensor.testing.values import full_tensor, scatter

MESH = Mesh(dp=2, tp=4)
HUGE = Mesh(dp=32, tp=8, pp=64)


def typed(shape, *dims, mesh=MESH, dtype=torch.float32, **partial):
    return TensorType(shape, dtype, mesh.layout(*dims, partial=partial))


def mlp(x, up, down):
    return torch.relu(x @ up) @ down


def program_of_mlp():
    x, up, down = typed((8, 16), "dp"), typed((16, 64), None, "tp"), typed((64, 16), "tp")
    return trace(mlp, x, up, down, out_layouts=MESH.layout("dp"))


def sections(picture, kind):
    return [s for s in picture.description.sections if isinstance(s, kind)]


def panels(blocks):
    return [panel for row in blocks.panels for panel in row if panel.cells]


def cells(blocks):
    return [c for panel in panels(blocks) for row in panel.cells for c in row if c is not None]


def is_whole(blocks):
    """Whether nothing is left out."""
    drawn = [panel for row in blocks.panels for panel in row]
    return all(
        panel.cells and not any(band.left_out for band in (*panel.rows, *panel.cols))
        for panel in drawn
    )


def elements(blocks, shape):
    """Each element that is drawn, with its cell and its place in there."""
    for panel in panels(blocks):
        parts = re.fullmatch(r"\[(.*), :, :\]", panel.label)
        lead = [ranged(text) for text in parts[1].split(", ")] if parts else []
        for row, line in zip(panel.rows, panel.cells, strict=True):
            for col, cell in zip(panel.cols, line, strict=True):
                if row.left_out or col.left_out:
                    continue
                inside = range(row.start, row.stop), range(col.start, col.stop)
                for i, j in product(*inside):
                    for at in product(*lead):
                        place = (*at, i, j)[len(at) + 2 - len(shape) :] if shape else ()
                        yield place, cell, (i - row.start, j - col.start)


def ranged(text):
    start, _, stop = text.partition(":")
    return range(int(start), int(stop or int(start) + 1))


def html_texts(html):
    """The texts of HTML, without style sheets and what only shows on a pointer."""
    root = ElementTree.fromstring(html)
    found = []

    def walk(node):
        if node.tag.rpartition("}")[2] in ("style", "title"):
            return
        found.append(node.text or "")
        for child in node:
            walk(child)
            found.append(child.tail or "")

    walk(root)
    return [text for text in found if text.strip()]


def facts_of(picture):
    """Every text that both renderings must have."""
    yield picture.description.title
    for section in picture.description.sections:
        match section:
            case Facts(rows):
                yield from (text for row in rows for text in row)
            case Blocks(title, _, empty, notes):
                yield from filter(None, [title, empty, *notes])
                for panel in panels(section):
                    yield from filter(None, [panel.label, panel.name])
                    if panel.cols_of:
                        yield str(panel.cols[0].start)
                    if panel.rows_of:
                        yield from (str(band.stop) for band in panel.rows)
                yield from (cell.label for cell in cells(section))
                yield from (v for c in cells(section) for line in c.values for v in line)
            case Move(title, detail):
                yield from (title, detail)
            case Table(head, rows):
                yield from filter(None, [*head, *(cell for row in rows for cell in row.cells)])
            case Timeline(lanes, _, ends):
                yield from (*(lane.name for lane in lanes), ends)
            case Note(text):
                yield text


# --- who holds what --------------------------------------------------------------------------


@given(types(dtype=None))
def test_each_element_is_drawn_where_index_says(type):
    """Every element is in one cell, whose ranks are those that hold it; if none is left out."""
    (blocks,) = sections(show(type), Blocks)
    held = {}
    for rank in type.mesh.ranks:
        for place in product(*type.index(rank)):
            held.setdefault(place, set()).add(rank)
    drawn = {}
    for place, cell, _ in elements(blocks, type.shape):
        assert place not in drawn
        drawn[place] = set(cell.ranks)
        assert cell.pending == bool(type.layout.partial)
        assert cell.label.removeprefix("+") in (
            ranks_text(cell.ranks),
            f"{cell.owner} (x{len(cell.ranks)})",
        )
    assert drawn == {place: held[place] for place in drawn}
    if is_whole(blocks):
        assert drawn == held
    else:
        assert any("are drawn" in note for note in blocks.notes)


@given(types())
@example(typed((1, 1), "dp", "tp"))
def test_ranks_without_elements_are_told(type):
    lacking = [r for r in type.mesh.ranks if prod(type.local_shape(r)) == 0]
    (blocks,) = sections(show(type), Blocks)
    assert empty_ranks(type) == lacking
    if type.numel and lacking:
        assert re.fullmatch(f"ranks? {ranks_text(sorted(lacking))} holds? no element", blocks.empty)
    else:
        assert blocks.empty == ""
    assert ("no elements: every block is empty" in blocks.notes) == (type.numel == 0)


@given(types(dtype=None), st.integers(0, 9))
def test_values_are_drawn_where_they_are(type, seed):
    """The cells of each term have the values of its ranks, and all terms are there, or told."""
    locals = scatter(full_tensor(type, seed), type, seed)
    x = DTensor(locals, type, SimulatedComm(type.mesh))
    picture = show(x)
    held = dict(zip(type.mesh.ranks, locals))
    shown = set()
    for blocks in sections(picture, Blocks):
        if type.layout.partial and all(len(p.label.split("term at ")) == 2 for p in panels(blocks)):
            continue  # terms side by side have the term for a label
        for place, cell, (i, j) in elements(blocks, type.shape):
            if cell.values:
                for rank in cell.ranks:
                    at = tuple(list(r).index(k) for r, k in zip(type.index(rank), place))
                    value = held[rank][at].item()
                    text = cell.values[i][j]
                    assert text == ("T" if value else "F") if isinstance(value, bool) else True
                    if not isinstance(value, bool):
                        assert complex(text) == value
                    shown.add((rank, place))
    everything = {(r, p) for r in type.mesh.ranks for p in product(*type.index(r))}
    if shown and not type.layout.partial and all(map(is_whole, sections(picture, Blocks))):
        assert shown == everything


def test_terms_of_a_pending_sum_have_their_own_values():
    type = typed((1, 2), tp="sum", dtype=torch.int64)
    locals = [torch.tensor([[10 * (r % 4), 1]]) for r in range(8)]
    picture = show(DTensor(tuple(locals), type, SimulatedComm(MESH)))
    (blocks,) = sections(picture, Blocks)
    drawn = [(p.label, c.label, c.values) for p in panels(blocks) for row in p.cells for c in row]
    assert drawn == [
        (f"the term at tp={t}", f"+{t},{t + 4}", ((str(10 * t), "1"),)) for t in range(4)
    ]


def test_replicas_that_differ_are_told():
    locals = tuple(torch.full((2, 2), float(r == 5)) for r in range(8))
    picture = show(DTensor(locals, typed((4, 2), "dp"), SimulatedComm(MESH)))
    told = "not the same on all ranks: 5 hold other values than those shown"
    assert Note(told) in picture.description.sections


def test_values_that_cannot_be_read_are_not_drawn():
    type = typed((4, 2), "dp")
    comm = SimulatedComm(MESH)
    wrong = [None, "x", (torch.ones(2, 2),) * 3, (torch.ones(3, 2),) * 8, (object(),) * 8]
    for local in [*wrong, (torch.ones(2, 2, device="meta"),) * 8]:
        (blocks,) = sections(show(DTensor(local, type, comm)), Blocks)
        assert not any(cell.values for cell in cells(blocks))


@given(types(), st.integers(0, 3))
def test_on_a_real_mesh_the_values_are_those_of_this_rank(type, seed):
    class Here:
        rank = type.mesh.ranks[seed % type.mesh.size]

        def leaves(self, value):
            return (value,)

    local = scatter(full_tensor(type, seed), type, seed)[type.mesh.position(Here.rank)]
    picture = show(DTensor(local, type, Here()))
    told = Note(f"values are those that rank {Here.rank} holds")
    assert (told in picture.description.sections) == (type.numel > 0)
    for blocks in sections(picture, Blocks):
        assert all((Here.rank in c.ranks) == bool(c.values) for c in cells(blocks) if local.numel())


def test_ranges_that_overlap_are_drawn_with_all_that_read_them():
    spans = Spans(0, (((0, 4),), ((3, 6),)))
    type = TensorType((8,), torch.float32, Layout(Mesh(x=2), [spans]))
    (blocks,) = sections(show(type), Blocks)
    (panel,) = panels(blocks)
    assert [(b.start, b.stop) for b in panel.cols] == [(0, 3), (3, 4), (4, 6), (6, 8)]
    assert [c and c.ranks for c in panel.cells[0]] == [(0,), (0, 1), (1,), None]


@given(meshes())
def test_each_rank_of_a_mesh_is_at_its_coordinates(mesh):
    (blocks,) = sections(show(mesh), Blocks)
    found = {}
    for panel in panels(blocks):
        for row, line in zip(panel.rows, panel.cells):
            for col, cell in zip(panel.cols, line):
                named = ",".join(filter(None, [panel.label.replace(", ", ","), row.name, col.name]))
                found[cell.label] = named
    named = {
        str(mesh.rank_at(c)): ",".join(f"{a}={i}" for a, i in zip(mesh.axes, c))
        for c in product(*map(range, mesh.sizes))
    }
    assert found == named


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranks_as_text_say_which(ranks):
    text = ranks_text(sorted(ranks))
    assume("more" not in text)
    parts = text.split("..")
    runs = [tuple(map(int, (run.split("-") * 2)[:2])) for run in parts[0].split(",")]
    if len(parts) == 2:
        (a, b), (c, _) = runs[-2:]
        last = int(parts[1].split("-")[0])
        runs += [(s, s + b - a) for s in range(2 * c - a, last + 1, c - a)]
    assert {r for a, b in runs for r in range(a, b + 1)} == ranks


def test_the_text_of_many_ranks_is_short():
    assert ranks_text(range(8)) == "0-7"
    assert ranks_text([0, 4]) == "0,4"
    assert ranks_text(range(0, 64, 4)) == "0,4..60"
    assert ranks_text([0, 1, 8, 9, 16, 17, 24, 25]) == "0-1,8-9..24-25"
    assert ranks_text([0, 2, 3, 7, 9, 14, 20, 30, 31]) == "0,2-3,7,9 and 4 more"


# --- the two renderings ----------------------------------------------------------------------

ANY = types(dtype=None) | redistributions().map(lambda pair: plan(*pair)) | meshes()


@given(ANY)
def test_text_and_html_tell_the_same_facts(thing):
    picture = show(thing)
    text, html = picture.text(400), html_texts(picture.html)
    for fact in facts_of(picture):
        assert fact in text
        assert fact in html


@given(ANY, st.integers(40, 130))
def test_text_keeps_to_its_columns(thing, width):
    text = show(thing).text(width)
    assert max(map(len, text.split("\n"))) <= width
    assert text.isascii()


@given(ANY)
def test_html_and_svg_are_well_formed_and_need_nothing_else(thing):
    picture = show(thing)
    for markup in (picture.html, picture.svg):
        root = ElementTree.fromstring(markup)
        for node in root.iter():
            assert node.tag.rpartition("}")[2] not in ("script", "img", "link", "image", "use")
            assert not {"id", "href", "src", "onclick"} & set(node.attrib)
        assert "http" not in markup.replace("http://www.w3.org/2000/svg", "")
        assert "url(" not in markup
    assert ElementTree.fromstring(picture.html).attrib["aria-label"] == picture.description.title


@given(types(dtype=None))
def test_blocks_do_not_overlap_in_html(type):
    for svg in ElementTree.fromstring(show(type).html).iter("{http://www.w3.org/2000/svg}svg"):
        boxes = []
        for group in svg.iter("{http://www.w3.org/2000/svg}g"):
            box = group.find("{http://www.w3.org/2000/svg}rect").attrib
            x, y, w, h = (float(box[name]) for name in ("x", "y", "width", "height"))
            assert w > 0
            assert h > 0
            assert x + w <= float(svg.attrib["width"])
            assert y + h <= float(svg.attrib["height"])
            assert all(x >= a + c or a >= x + w or y >= b + d or b >= y + h for a, b, c, d in boxes)
            boxes.append((x, y, w, h))


def test_names_are_escaped():
    mesh = Mesh.from_ranks([0, 1], ["<b>&"])
    picture = show(TensorType((4,), torch.int8, mesh.layout("<b>&")))
    assert "<b>&=0" in html_texts(picture.html)
    assert ElementTree.fromstring(picture.svg) is not None


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1))
def test_lengths_fill_what_there_is(total, pairs):
    weights, least = zip(*pairs)
    lengths = spread(total, weights, least)
    assert all(n >= m for n, m in zip(lengths, least))
    assert sum(lengths) <= max(total, sum(least))
    assert all(a <= b for (v, a), (w, b) in product(zip(weights, lengths), repeat=2)
               if v <= w and a > max(least))  # fmt: skip


def test_colors_read_in_grey():
    lights = [_luminance(_rgb(i / 100)) for i in range(101)]
    assert lights == sorted(lights)
    assert len(set(lights)) == 101
    for light, t in zip(lights, (i / 100 for i in range(101))):
        text = 1.0 if ink(t) == "#ffffff" else 0.0
        high, low = max(text, light) + 0.05, min(text, light) + 0.05
        assert high / low >= 4.5
        assert re.fullmatch("#[0-9a-f]{6}", color(t))


def test_a_rank_keeps_its_color_through_a_plan():
    found = show(plan(typed((8, 16), "dp", tp="sum"), MESH.layout(None, "tp")))
    colors = owners(found.description.sections)
    assert list(colors) == list(range(8))
    assert sorted(colors.values()) == list(colors.values())
    assert (colors[0], colors[7]) == (0.0, 1.0)
    some = show(Mesh.from_ranks([700, 5, 33], "x"))
    assert owners(some.description.sections) == {5: 0.0, 33: 0.5, 700: 1.0}


# --- large -----------------------------------------------------------------------------------


LARGE = (
    typed((8192, 8000), "dp", "tp", mesh=HUGE),
    typed((8192, 8192), ("dp", "tp", "pp"), mesh=HUGE),
    typed((8192, 8192), mesh=HUGE),
    typed((8192, 8192), None, "tp", mesh=HUGE, dp="sum"),
    typed((64, 64, 64, 64, 64), "dp", "tp", "pp", mesh=HUGE),
    TensorType((1 << 20,), torch.int8, Layout(HUGE, [StridedShard(0, 64), *[Replicate()] * 2])),
    HUGE,
    Mesh.from_ranks(list(range(9999, -1, -1)), "x"),
    plan(typed((8192, 8000), "dp", mesh=HUGE, tp="sum"), HUGE.layout(None, "tp")),
    TensorType((1024,) * 6, torch.int8, Mesh(a=2, b=2, c=2, d=2).layout(*"abcd")),
)


@pytest.mark.parametrize("thing", LARGE, ids=str)
def test_a_mesh_of_many_ranks_gives_a_small_picture(thing):
    picture = show(thing)
    assert len(picture.html) < 200_000
    assert len(picture.text().split("\n")) < 200
    for width in (40, 57, 80, 120):
        assert max(map(len, picture.text(width).split("\n"))) <= width
    for blocks in sections(picture, Blocks):
        assert 1 <= len(cells(blocks)) <= 400
        assert is_whole(blocks) or blocks.notes


# --- plans and programs ----------------------------------------------------------------------


@given(redistributions(cross_mesh=True))
def test_a_plan_is_drawn_before_and_after_each_step(pair):
    found = plan(*pair)
    picture = show(found)
    blocks, moves = sections(picture, Blocks), sections(picture, Move)
    stages = [found.src, *(step.dst for step in found.steps)]
    assert [b.title.partition(": ")[2] for b in blocks] == list(map(str, stages))
    assert [m.title.partition(". ")[2] for m in moves] == [str(s.collective) for s in found.steps]
    for blocks_of_stage, type in zip(blocks, stages):
        for place, cell, _ in elements(blocks_of_stage, type.shape):
            held = (place in set(product(*type.index(rank))) for rank in cell.ranks)
            assert all(held)


def test_a_program_is_drawn_with_all_its_lines():
    program = program_of_mlp()
    picture = show(program)
    (table,) = sections(picture, Table)
    lines = [line.strip() for line in str(program).split("\n")]
    assert [picture.description.title, *(row.cells[-1] for row in table.rows)] == lines
    assert sum(row.share or 0.0 for row in table.rows) == pytest.approx(1)
    (marked,) = [row for row in table.rows if row.marked]
    assert "all_reduce" in marked.cells[-1]
    assert marked.share == max(row.share for row in table.rows if row.share is not None)


def test_lines_that_repeat_are_drawn_once():
    def deep(x, w):
        for _ in range(120):
            x = torch.tanh(x) @ w
        return x

    program = trace(deep, typed((8, 16), "dp"), typed((16, 16)))
    (table,) = sections(show(program), Table)
    texts = [row.cells[-1] for row in table.rows]
    assert "120 times 2 lines, the first:" in texts
    assert len(texts) == 6  # inputs, the head, a copy, results and the total
    assert sum(row.share or 0.0 for row in table.rows) == pytest.approx(1)


def test_a_long_program_is_drawn_with_its_costliest_lines():
    ops = Random(0).choices([torch.tanh, torch.sin, torch.exp, torch.neg, torch.relu], k=200)
    program = trace(lambda x: reduce(lambda y, op: op(y), ops, x), typed((8, 210), "dp"))
    (table,) = sections(show(program), Table)
    left_out = [row.cells[-1] for row in table.rows if row.cells[-1].startswith("...")]
    assert len(left_out) > 1
    count = sum(int(text.split()[1]) for text in left_out)
    assert count + len(table.rows) - len(left_out) == len(str(program).split("\n")) - 1
    assert sum(row.share or 0.0 for row in table.rows) == pytest.approx(1)


def test_the_layers_of_a_model_are_drawn_once_with_their_names():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(24)]
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    params = {name: typed(p.shape) for name, p in model.named_parameters()}
    forward = lambda params, x: torch.func.functional_call(model, params, (x,))  # noqa: E731
    text = show(trace(forward, params, typed((16, 8), "dp"))).text()
    assert re.search(r"2[34] times \d+ lines, layers\.\d to layers\.2\d, the first:", text)
    assert " more ..." in text  # 49 inputs


def test_a_dict_is_drawn_as_the_types_of_its_tensors():
    params = {
        "up": typed((8, 16), None, "tp"),
        "blocks": [typed((8, 4), "dp"), torch.ones(3, dtype=torch.float64)],
    }
    picture = show(params)
    (table,) = sections(picture, Table)
    assert [row.cells for row in table.rows] == [
        ("['blocks'][0]", "f32[8@dp,4]", "64 B"),
        ("['blocks'][1]", "f64[3], plain", "24 B"),
        ("['up']", "f32[8,16@tp]", "128 B"),
    ]
    assert sum(row.share for row in table.rows) == pytest.approx(1)
    assert picture.description.title == f"3 tensors on {MESH!r}"
    assert "216 B a rank at most, 664 B in full" in picture.text()
    with pytest.raises(ValueTreeError, match="1 of 2 leaves cannot be shown"):
        show((typed((4,)), "text"))


def test_of_many_tensors_the_largest_are_drawn():
    rows = sections(show([typed((n, 4)) for n in range(1, 131)]), Table)[0].rows
    assert rows[0].cells[0] == "[30]"
    assert rows[-1].cells == ("... 30 smaller ones", "", bytes_text(16 * sum(range(31))))
    assert sum(row.share for row in rows) == pytest.approx(1)


@given(redistributions(), st.integers(2, 12))
def test_rounds_of_an_exchange_are_drawn_with_all_bytes(pair, pieces):
    src, dst = pair
    whole = plan(src, dst)
    assume(len(whole.steps) == 1 and isinstance(whole.steps[0].collective, Exchange))
    step = attrs.evolve(
        whole.steps[0], collective=attrs.evolve(whole.steps[0].collective, pieces=pieces)
    )
    (table,) = _rounds(attrs.evolve(whole, steps=(step,)))
    shares = [row.share for row in table.rows if row.share is not None]
    assert len(table.rows) == min(pieces, 8)
    if pieces <= 8:
        assert sum(shares) == pytest.approx(1)


@given(
    st.lists(st.sampled_from("abc"), max_size=6),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=8),
    st.integers(1, 12),
    st.lists(st.sampled_from("abc"), max_size=6),
)
def test_folds_are_copies_apart_from_each_other(before, copy, count, after):
    keys = [*before, *copy * count, *after]
    some = folds(keys, 4)
    for fold in some:
        assert fold.left_out >= 4
        first = keys[fold.start : fold.start + fold.period]
        assert keys[fold.start : fold.stop] == first * fold.count
    assert all(a.stop <= b.start for a, b in pairwise(some))
    if len(copy) * (count - 1) >= 4 and len(set(copy)) == len(copy):
        assert sum(fold.left_out for fold in some) >= len(copy) * (count - 1)


def test_a_copy_may_have_the_same_element_twice():
    assert folds("x" + 5 * "aabb" + "y") == [Fold(1, 4, 5)]


def test_seconds_are_those_of_the_cost_model():
    program = program_of_mlp()
    found = plan(typed((8, 16), "dp", tp="sum"), MESH.layout(None, "tp"))
    for thing in (program, found):
        fast, slow = show(thing).text(), show(thing, cost=GLOO).text()
        assert "cost model 'nccl'" in fast
        assert "cost model 'gloo'" in slow
        assert fast != slow


def test_collectives_run_behind_compute_and_before_their_readers():
    mesh = Mesh(dp=4)
    x, w = typed((65536, 1024), "dp", mesh=mesh), typed((1024, 1024), "dp", mesh=mesh)
    program = trace(lambda x, a, b, c: x @ a @ b @ c, x, w, w, w, out_layouts=mesh.layout("dp"))
    timed = timeline(program, program.cost).lines
    assert [t.eqn for t in timed] == list(program.eqns)
    made = {}
    for t in timed:
        assert t.seconds == pytest.approx(line_seconds(program.types, t.eqn, program.cost))
        assert all(t.start >= made.get(v, 0.0) for v in t.eqn.ins)
        made.update((v, t.stop) for v in t.eqn.outs if v is not None)
    for sends in (False, True):
        lane = [t for t in timed if t.eqn.is_collective is sends]
        assert all(a.stop <= b.start for a, b in pairwise(lane))
    assert len(lane) == 3
    assert any(t.start < sent.stop < t.stop for sent in lane for t in timed if t not in lane)
    sent = {v for t in lane for v in t.eqn.outs}
    readers = [t for t in timed if sent & set(t.eqn.ins)]
    assert len(readers) == 3


def test_an_exchange_runs_beside_what_does_not_read_it():
    mesh = Mesh(dp=4)
    x = typed((63, 65), "dp", mesh=mesh)
    columns = mesh.layout(None, "dp")
    asked = columns, None
    program = trace(
        lambda x, y: (constrain(x.clone(), columns), torch.tanh(y)),
        x,
        x,
        cost=GLOO,
        out_layouts=asked,
    )
    moved, computed = timeline(program, GLOO).lines
    assert moved.eqn.is_collective
    assert (moved.start, moved.stop) == (0.0, program.seconds)
    assert computed.start == 0.0


def test_a_timeline_ends_with_its_last_line():
    (timeline,) = sections(show(program_of_mlp()), Timeline)
    ends = [span.stop for lane in timeline.lanes for span in lane.spans]
    assert max(ends) == pytest.approx(timeline.stop)
    assert [lane.name for lane in timeline.lanes] == ["compute", "network"]
    assert all(0 <= s.start <= s.stop for lane in timeline.lanes for s in lane.spans)


# --- a value ---------------------------------------------------------------------------------


def test_a_picture_is_a_value_that_prints(capsys):
    picture = show(MESH)
    assert isinstance(picture, Picture)
    assert capsys.readouterr().out == ""
    print(picture)
    assert capsys.readouterr().out == repr(picture) + "\n" == MESH_TEXT + "\n"


def test_a_picture_is_drawn_on_request(capsys):
    for _ in range(3):
        show(MESH).draw()
    assert capsys.readouterr().out == (MESH_TEXT + "\n") * 3


def test_a_kernel_draws_html(monkeypatch):
    drawn = []
    ipython = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=None),
        display=SimpleNamespace(display=drawn.append),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    picture = show(MESH)
    picture.draw()
    assert drawn == [picture]


def test_only_the_first_process_of_torchrun_draws(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    show(MESH).draw()
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_colors_and_lines():
    from io import StringIO

    from rich.console import Console

    def printed(**options):
        file = StringIO()
        console = Console(file=file, force_terminal=True, width=80, legacy_windows=False, **options)
        console.print(show(MESH))
        return file.getvalue()

    assert "\x1b[" in printed(color_system="truecolor")
    bare = re.sub("\x1b\\[[0-9;]*m", "", printed(color_system="truecolor"))
    for box, plain in zip(
        "\u2500\u2502\u250c\u2510\u2514\u2518\u251c\u2524\u252c\u2534\u253c", "-|+++++++++"
    ):
        bare = bare.replace(box, plain)
    assert [line.rstrip() for line in bare.split("\n")] == [*MESH_TEXT.split("\n"), ""]
    assert not re.search("\x1b\\[[0-9;]*4[0-9]", printed(color_system="truecolor", no_color=True))


def test_notebooks_get_html_text_and_svg():
    for thing in (typed((4,), "dp"), MESH, program_of_mlp()):
        picture = show(thing)
        assert picture._repr_mimebundle_() == {
            "text/plain": str(picture),
            "text/html": picture.html,
            "image/svg+xml": picture.svg,
        }
    type = typed((4,), "dp")
    x = distribute(torch.arange(4.0), type.layout, SimulatedComm(MESH))
    for thing in (type, x, plan(type, MESH.layout()), program_of_mlp()):
        assert thing._repr_html_() == show(thing).html


def test_pictures_are_saved(tmp_path):
    picture = show(typed((4, 4), "dp"))
    for name in ("a.html", "a.svg", "a.txt"):
        picture.save(tmp_path / name)
    assert (tmp_path / "a.txt").read_text() == f"{picture}\n"
    assert picture.html in (tmp_path / "a.html").read_text()
    page = (tmp_path / "a.html").read_text().removeprefix("<!DOCTYPE html>\n")
    assert ElementTree.fromstring(page).tag == "html"
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


# --- errors and whole texts ------------------------------------------------------------------


def test_what_has_no_picture_is_refused(tmp_path):
    with pytest.raises(FdtensorError) as error:
        show(MESH.layout("dp"))
    assert str(error.value) == NO_SHAPE
    with pytest.raises(FdtensorError) as error:
        show(1)
    assert str(error.value) == NO_PICTURE
    with pytest.raises(FdtensorError) as error:
        show(MESH).save("x.png")
    assert str(error.value) == NO_ENDING


def test_the_texts_of_pictures():
    assert str(show(MESH)) == MESH_TEXT
    uneven = Layout(MESH, [StridedShard(0, 2), Ragged(1, (1, 0, 5, 3))])
    assert str(show(TensorType((6, 9), torch.float32, uneven))) == UNEVEN
    deep = Mesh(dp=2, tp=2, pp=2)
    assert str(show(typed((4, 6, 8), "dp", "tp", mesh=deep, pp="sum"))) == DEEP
    comm = SimulatedComm(MESH)
    x = distribute(torch.arange(12).reshape(3, 4), MESH.layout("dp", "tp"), comm)
    assert str(show(x)) == VALUES
    assert str(show(plan(typed((8, 16), "dp", tp="sum"), MESH.layout(None, "tp")))) == PLAN
    assert str(show(program_of_mlp())) == PROGRAM


def test_any_dtype_can_be_drawn():
    for dtype in {*DTYPES, torch.float16, torch.float8_e4m3fn, torch.complex128}:
        x = distribute(torch.ones(3).to(dtype), MESH.layout("tp"), SimulatedComm(MESH))
        (blocks,) = sections(show(x), Blocks)
        ones = {v for cell in cells(blocks) for line in cell.values for v in line}
        assert ones == {"T" if dtype is torch.bool else "1+0j" if dtype.is_complex else "1"}


MESH_TEXT = """\
Mesh(dp=2, tp=4)
  ranks  8, row-major: the last axis counts fastest

         tp=0   tp=1   tp=2   tp=3
       +------+------+------+------+
  dp=0 |  0   |  1   |  2   |  3   |
       +------+------+------+------+
  dp=1 |  4   |  5   |  6   |  7   |
       +------+------+------+------+"""

UNEVEN = """\
f32[6@dp/2,9@tp:1:0:5:3] on Mesh(dp=2, tp=4)
  dp=2    cuts dim 0 into 2 blocks and takes a part of each
  tp=4    cuts dim 1 into 1, 0, 5, 3
  blocks  8 blocks of at most 4x5
  bytes   80 B a rank at most, 216 B in full

         tp=0           tp=2              tp=3
       0      1                      6             9
     0 +------+----------------------+-------------+
       |      |                      |             |
  dp=0 |  0   |          2           |      3      |
       |      |                      |             |
     2 +------+----------------------+-------------+
  dp=1 |  4   |          6           |      7      |
     3 +------+----------------------+-------------+
       |      |                      |             |
  dp=0 |  0   |          2           |      3      |
       |      |                      |             |
     5 +------+----------------------+-------------+
  dp=1 |  4   |          6           |      7      |
     6 +------+----------------------+-------------+
  ranks 1,5 hold no element
  in each block: the ranks that hold it"""

DEEP = """\
f32[4@dp,6@tp,8]{sum:pp} on Mesh(dp=2, tp=2, pp=2)
  dp=2    cuts dim 0 into 2
  tp=2    cuts dim 1 into 2
  pp=2    sum pending: each of 2 ranks holds a term
  blocks  4 blocks of at most 2x3x8
  bytes   192 B a rank at most, 768 B in full

       [0:2, :, :]  dp=0                                [2:4, :, :]  dp=1
       0                                       8        0                                       8
     0 +---------------------------------------+      0 +---------------------------------------+
  tp=0 |                 +0-1                  |   tp=0 |                 +4-5                  |
     3 +---------------------------------------+      3 +---------------------------------------+
  tp=1 |                 +2-3                  |   tp=1 |                 +6-7                  |
     6 +---------------------------------------+      6 +---------------------------------------+
  in each block: +, and the ranks that hold its terms"""

VALUES = """\
i64[3@dp,4@tp] on Mesh(dp=2, tp=4)
  dp=2    cuts dim 0 into 2
  tp=4    cuts dim 1 into 4
  blocks  8 blocks of at most 2x1
  bytes   16 B a rank at most, 96 B in full

        tp=0  tp=1  tp=2  tp=3
       0     1     2     3     4
     0 + 0 --+ 1 --+ 2 --+ 3 --+
       |   0 |   1 |   2 |   3 |
  dp=0 |   4 |   5 |   6 |   7 |
     2 + 4 --+ 5 --+ 6 --+ 7 --+
  dp=1 |   8 |   9 |  10 |  11 |
     3 +-----+-----+-----+-----+
  in each block: the ranks that hold it"""

PLAN = """\
f32[8@dp,16]{sum:tp} -> f32[8,16@tp] on Mesh(dp=2, tp=4)
  ########  received  256 B  by the busiest rank
  ########  bound     256 B  reached

  in all  2048 B received; bound 2048 B, reached
  sent    256 B by the busiest rank
  peak    576 B held at once by a rank
  time    36 us by the cost model 'nccl'

     step                                         gives            received   time
  1  reduce_scatter[axis=tp dim=1 reduce_op=sum]  f32[8@dp,16@tp]     192 B  22 us
  2  all_gather[axis=dp dim=0]                    f32[8,16@tp]         64 B  14 us

before: f32[8@dp,16]{sum:tp}
       0                                          16
     0 +------------------------------------------+
       |                                          |
  dp=0 |                   +0-3                   |
       |                                          |
     4 +------------------------------------------+
       |                                          |
  dp=1 |                   +4-7                   |
       |                                          |
     8 +------------------------------------------+

1. reduce_scatter[axis=tp dim=1 reduce_op=sum]
   192 B received by the busiest rank, 1536 B by all, 22 us
after 1: f32[8@dp,16@tp]
           tp=0       tp=1       tp=2       tp=3
       0          4          8          12         16
     0 +----------+----------+----------+----------+
       |          |          |          |          |
  dp=0 |    0     |    1     |    2     |    3     |
       |          |          |          |          |
     4 +----------+----------+----------+----------+
       |          |          |          |          |
  dp=1 |    4     |    5     |    6     |    7     |
       |          |          |          |          |
     8 +----------+----------+----------+----------+

2. all_gather[axis=dp dim=0]
   64 B received by the busiest rank, 512 B by all, 14 us
after: f32[8,16@tp]
        tp=0       tp=1       tp=2       tp=3
    0          4          8          12         16
  0 +----------+----------+----------+----------+
    |          |          |          |          |
    |   0,4    |   1,5    |   2,6    |   3,7    |
    |          |          |          |          |
  8 +----------+----------+----------+----------+
  in each block: +, and the ranks that hold its terms, or the ranks that hold it"""

PROGRAM = """\
mlp on Mesh(dp=2, tp=4)
  received  384 B by the busiest rank in 1 collective
  peak      2816 B held at once by a rank
  time      34 us by the cost model 'nccl'
  compute   0.0044 us
  network   34 us

                   time  line
                         in   a:f32[8@dp,16]  b:f32[16,64@tp]  c:f32[64@tp,16]
                0.00 us  d:f32[8@dp,64@tp]      = mm a b
                0.00 us  e:f32[8@dp,64@tp]      = relu d
                0.00 us  f:f32[8@dp,16]{sum:tp} = mm e c
  ########  *  34.01 us  g:f32[8@dp,16]         = all_reduce[axis=tp reduce_op=sum] f  384 B
                         out  g
                         1 collective, 384 B received per rank

  compute |.                                                                                      |
  network |###########################################g###########################################|
           0                                                                                 34 us
  a collective starts once its operand is there and is waited for when its result is read"""

NO_SHAPE = """\
the layout (dp=S(0), tp=R) has no shape to draw.

  mesh: Mesh(dp=2, tp=4)

Write show(TensorType(shape, dtype, layout))."""

NO_PICTURE = """\
there is no picture of an int.

Show a TensorType, a DTensor, a dict of these, a Mesh, a Plan, a Program or a Schedule."""

NO_ENDING = """\
a picture cannot be saved as '.png'.

  path: x.png

End the path with .html, .svg or .txt."""
