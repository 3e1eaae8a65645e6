"""What rounds of exchanges hold, all rounds at once beside one round after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import Mesh, TensorType, plan
from fdtensor.errors import PlanError
from fdtensor.plans.boxes import contiguous
from fdtensor.plans.budget import in_pieces
from fdtensor.plans.collectives.buffers import most_buffered
from fdtensor.plans.collectives.exchange import by_exchange
from fdtensor.plans.collectives.rounds import piece
from fdtensor.plans.cost import NCCL
from fdtensor.plans.planner import by_layouts
from fdtensor.plans.routes import Message, Route, route
from fdtensor.testing.strategies import redistributions


def one_after_the_other(way, pieces, source, packed):
    most = 0
    for i in range(pieces):
        sends = [piece(m, i, pieces) for m in way.sends]
        recvs = [piece(m, i, pieces) for m in way.recvs]
        if not packed:
            sends = {m.box: m for m in sends if not contiguous(m.box, source)}.values()
            recvs = [m for m in recvs if m.term or not contiguous(m.box, way.shape or ())]
        most = max(most, sum(m.numel for m in (*sends, *recvs)))
    return most


@given(redistributions() | redistributions(cross_mesh=True), st.integers(1, 12), st.booleans())
@settings(max_examples=150)
def test_the_round_that_holds_most(pair, pieces, packed):
    moves = by_exchange(*pair).moves
    for rank in {*moves.src.mesh.ranks, *moves.dst.mesh.ranks}:
        inside = moves.src.mesh.position(rank) is not None
        source = (pair[0].local_shape(rank) or (1,)) if inside else ()
        entry = route(moves, rank), pieces, source, packed
        assert most_buffered(*entry) == one_after_the_other(*entry)


def test_equal_pieces_of_boxes_that_overlap_are_packed_once():
    """As of windows that two peers want: in the last of the rounds both get the last two rows."""
    columns = (0, 3)
    boxes = [(((first, 10),), (columns,)) for first in (1, 0)]
    way = Route(0, None, None, tuple(Message(n, box) for n, box in enumerate(boxes)), ())
    assert most_buffered(way, 8, (10, 4), packed=True) == 4 * 3
    assert most_buffered(way, 8, (10, 4), packed=False) == 2 * 3


def test_a_budget_that_nothing_fits_in_is_refused_without_counting_each_round(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "fdtensor.plans.collectives.buffers.piece", lambda *args: calls.append(args) or piece(*args)
    )
    mesh = Mesh(a=4, b=4)
    pending = mesh.layout(partial={"a": "sum", "b": "sum"})
    src = TensorType((8200, 8192), torch.float32, pending)
    with pytest.raises(PlanError, match="the least is 2"):
        plan(src, mesh.layout("a", "b"), max_bytes=10**6)
    assert 0 < len(calls) < 3_000  # of some 8 million pieces


shapes = st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple)


@given(
    redistributions()
    | redistributions(cross_mesh=True)
    | shapes.flatmap(lambda shape: redistributions(shape=shape))
)
@settings(max_examples=150)
def test_beyond_one_round_more_of_them_never_hold_more(pair):
    """So that the least budget is that of the plan, of one round or of the most there can be."""
    found = by_layouts(*pair, NCCL)
    longest = max([1, *found.src.shape])
    counts = [1, *(2**i for i in range(1, longest.bit_length()) if 2**i < longest), longest]
    peaks = [in_pieces(found, pieces).peak_bytes for pieces in counts]
    assert peaks[1:] == sorted(peaks[1:], reverse=True)
    least = min(plan(*pair).peak_bytes, found.peak_bytes, *peaks)
    assert plan(*pair, max_bytes=least).peak_bytes <= least
    if least:
        with pytest.raises(PlanError, match=f"the least is {least}"):
            plan(*pair, max_bytes=least - 1)
