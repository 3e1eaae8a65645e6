"""Tests of ops/decompositions/grouped.py: products of groups of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import SimulatedComm, TensorType, distribute, run, shards, spmd, trace, verify
from fdtensor.layouts.mesh import Mesh
from fdtensor.ops.decompositions.grouped import GROUPED_MM, GROUPED_OUTER
from fdtensor.testing import assert_same_on_every_layout
from tests.support.depth import times

few = settings(max_examples=max(3, settings.default.max_examples // 10))


@st.composite
def groups(draw):
    """Rows, and where the groups of them end."""
    rows = draw(st.integers(0, 7))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=1, max_size=4)))
    return rows, torch.tensor(ends, dtype=torch.int32)


def reference(x, w, offs):
    """The product of each group, written out; rows of no group are zero."""
    starts = [0, *offs.tolist()[:-1]]
    if w.ndim == 2:
        return torch.stack([x[:, a:b] @ w[a:b] for a, b in zip(starts, offs.tolist())])
    out = x.new_zeros(len(x), w.shape[2])
    for matrix, a, b in zip(w, starts, offs.tolist()):
        out[a:b] = x[a:b] @ matrix
    return out


def ints(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


@few
@given(groups())
def test_rows_hold_for_any_groups(drawn):
    rows, ends = drawn
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    x, y = ints(rows, 3), ints(rows, 2, seed=1)
    assert verify(GROUPED_MM, [(x, ints(len(ends), 3, 2), starts, ends)]) == []
    assert verify(GROUPED_OUTER, [(x, y, starts, ends)]) == []


@few
@given(groups(), st.integers(1, 3), st.booleans())
def test_a_batch_has_groups_of_its_own_and_vmap_makes_one(drawn, batch, shares):
    rows, ends = drawn
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    x, y = ints(batch, rows, 3), ints(batch, rows, 2, seed=1)
    w = ints(len(ends), 3, 2) if shares else ints(batch, len(ends), 3, 2)
    wide = w.expand(batch, *w.shape) if shares else w
    each = [t.expand(batch, -1).contiguous() for t in (starts, ends)]
    assert verify(GROUPED_MM, [(x, wide.contiguous(), *each)]) == []
    assert verify(GROUPED_OUTER, [(x, y, *each)]) == []

    def loss(x, w, y):
        out = torch.nn.functional.grouped_mm(x, w, offs=ends)
        return (out * out).sum() + torch.nn.functional.grouped_mm(x.mT, y, offs=ends).sum()

    def plain(x, w, y):
        return (reference(x, w, ends) ** 2).sum() + reference(x.mT, y, ends).sum()

    over = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None if shares else 0, 0))
    types = [TensorType(t.shape, t.dtype, Mesh(x=2).layout("x")) for t in (x, y)]
    of_w = TensorType(w.shape, w.dtype, Mesh(x=2).layout())
    program = trace(over, types[0], of_w, types[1], out_layouts=Mesh(x=2).layout())
    values = [shards(t, s.layout) for t, s in zip((x, w, y), program.in_types, strict=True)]
    outs = run(program, values, SimulatedComm(Mesh(x=2)))
    for i in range(batch):
        wanted = torch.func.grad(plain, (0, 1))(x[i], wide[i], y[i])
        assert all(torch.equal(got[0][i], t) for got, t in zip(outs, wanted, strict=True))


@few
@given(groups())
def test_it_is_the_product_of_each_group_on_every_layout(drawn):
    rows, offs = drawn

    def products(x, w, y):
        by_rows = torch.nn.functional.grouped_mm(x, w, offs=offs)
        return by_rows, torch.nn.functional.grouped_mm(x.mT, y, offs=offs)

    x, w, y = ints(rows, 3), ints(len(offs), 3, 2), ints(rows, 2, seed=1)
    mesh = Mesh(x=2)
    comm = SimulatedComm(mesh)
    results = spmd(products)(*(distribute(t, mesh.layout("x"), comm) for t in (x, w, y)))
    for result, expected in zip(results, (reference(x, w, offs), reference(x.mT, y, offs))):
        assert torch.equal(result.full(), expected)


@pytest.mark.parametrize("kind", ["rows", "columns", "sums", "batch"])
def test_it_is_what_torch_computes_with_its_derivatives(kind):
    offs = torch.tensor([4, 4, 8], dtype=torch.int32)
    groups = {
        "rows": (ints(8, 4), ints(3, 4, 8)),
        "columns": (ints(3, 4, 8), ints(8, 8)),
        "sums": (ints(4, 8), ints(8, 4)),
        "batch": (ints(3, 4, 8), ints(3, 8, 4)),
    }
    x, w = (t.float() for t in groups[kind])
    ends = None if kind == "batch" else offs

    def product(x, w):
        return torch.nn.functional.grouped_mm(x, w, offs=ends)

    assert_same_on_every_layout(product, x, w, grad=True, max_examples=times(4, 40))


def test_experts_stay_where_they_are():
    mesh = Mesh(ep=4)
    x = TensorType((4096, 512), torch.float32, mesh.layout())
    w = TensorType((64, 512, 512), torch.float32, mesh.layout("ep"))
    offs = TensorType((64,), torch.int32, mesh.layout())
    program = trace(
        lambda x, w, offs: torch.nn.functional.grouped_mm(x, w, offs=offs),
        *(x, w, offs),
        out_layouts=mesh.layout("ep"),
    )
    assert program.received_bytes <= 4096 * 512 * 4, "sums of rows travel, no expert does"
    moved = [step for eqn in program.eqns if eqn.is_collective for step in eqn.steps]
    assert {len(step.src.shape) for step in moved} == {2}
