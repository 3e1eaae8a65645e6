"""Sums of half precision wait in float32, are rounded once on their way, and integers wrap."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import (
    NCCL,
    Layout,
    Partial,
    Shard,
    SimulatedComm,
    TraceError,
    debug,
    distribute,
    from_local,
    like,
    plan,
    spmd,
    trace,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.testing.strategies import layouts, meshes

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)
PENDING = MESH.layout(partial={"x": "sum"})
BYTES_ALONE = attrs.evolve(NCCL, latency=0.0, launch=(), copy=1e300, flops=1e300)
"""Prices by which no sum is too small to be rounded halfway."""
HALVES = [torch.float16, torch.bfloat16]


def product(a, b):
    return a @ b


def test_terms_that_overflow_a_half_add_up():
    numbers = torch.tensor([6e4, 6e4, -6e4, -6e4, 5.0, 5.0, 5.0, 5.0]).half()
    x = distribute(numbers.repeat(64), MESH.layout("x"), COMM)
    ones = distribute(torch.ones(512, 64).half(), MESH.layout("x"), COMM)
    halves = distribute(numbers.repeat_interleave(64)[None], MESH.layout(None, "x"), COMM)

    assert spmd(torch.sum)(x).full() == numbers.repeat(64).sum() == 64 * 20
    assert (spmd(product)(halves, ones).full() == 64 * 20).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_over_a_cut_dim_is_rounded_once(dtype):
    """As close to the exact one as that of a single process, as terms in halves are not."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator).to(dtype) for _ in range(2))
    given = [distribute(a, MESH.layout(None, "x"), COMM), distribute(b, MESH.layout("x"), COMM)]
    exact = a.double() @ b.double()
    for f in (product, lambda a, b: torch.bmm(a[None], b[None])[0]):
        error = (spmd(f)(*given).full() - exact).abs().max()
        assert error <= 1.01 * ((a @ b) - exact).abs().max()
    narrow = spmd(product, reduce_dtype=None)(*given).full()
    assert (narrow - exact).abs().max() > 1.2 * ((a @ b) - exact).abs().max()


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_travel_in_the_dtype_that_is_asked_for(dtype):
    types = [
        TensorType((16, 4096), dtype, MESH.layout(None, "x")),
        TensorType((4096, 16), dtype, MESH.layout("x")),
    ]
    moved = {}
    for asked in (torch.float64, torch.float32, None):
        program = trace(product, *types, out_layouts=MESH.layout("x"), reduce_dtype=asked)
        program.verify()
        assert program.out_types[0].dtype == dtype
        moved[asked] = program.received_bytes
    assert moved[torch.float64] == 2 * moved[torch.float32] == 4 * moved[None]
    with pytest.raises(TraceError, match=r"reduce_dtype=torch\.float16 is no option"):
        trace(product, *types, reduce_dtype=torch.float16)


def test_pending_halves_that_are_asked_for_are_halves():
    types = [
        TensorType((8, 8), torch.float16, MESH.layout(None, "x")),
        TensorType((8, 8), torch.float16, MESH.layout("x")),
    ]
    program = trace(product, *types, out_layouts=PENDING)
    program.verify()
    assert program.out_types[0] == TensorType((8, 8), torch.float16, PENDING)
    assert program.received_bytes == 0


FUNCTIONS = {
    "mm": lambda x, y: x @ y.mT,
    "mean": lambda x, y: (x * y).mean(0),
    "sum of sums": lambda x, y: x.sum(0) + 2 * y.sum(0),
    "norm": lambda x, y: torch.linalg.vector_norm(x, dim=0),
    "softmax": lambda x, y: torch.softmax(x, 0) * y,
    "gradient": lambda x, y: torch.func.grad(lambda x: (x @ y.mT).square().mean())(x),
    "layer norm": lambda x, y: torch.nn.functional.layer_norm(x @ y.mT, [4]),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 3, 3, 1]), y),
    "promotion": lambda x, y: x.sum(0) * torch.ones(6, dtype=torch.float32),
}


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(st.data())
def test_halves_of_any_layout_give_what_one_process_gives(data):
    """Small integers, whose sums are exact in halves too; and a program that verifies."""
    dtype = data.draw(st.sampled_from(HALVES))
    f = FUNCTIONS[data.draw(st.sampled_from(sorted(FUNCTIONS)))]
    mesh = data.draw(meshes(max_ranks=4))
    comm = SimulatedComm(mesh, cost=data.draw(st.sampled_from([NCCL, BYTES_ALONE])))
    whole = [torch.randint(-2, 3, (4, 6)).to(dtype) for _ in range(2)]
    spread = [
        distribute(t, data.draw(layouts(mesh, (4, 6), partial=("sum", "avg"))), comm) for t in whole
    ]
    step = spmd(f)
    due, got = f(*whole), step(*spread)
    assert got.dtype == due.dtype
    assert all(t.dtype == due.dtype for t in got.local)
    torch.testing.assert_close(got.full(), due, rtol=2e-2, atol=2e-2)
    step.last.traced.program.verify()


@settings(max_examples=max(10, settings.default.max_examples // 2))
@given(st.data())
def test_a_sum_is_rounded_once_and_moves_in_halves_from_there_on(data):
    """The very bits of a reduction in float32, for at most its bytes."""
    dtype = data.draw(st.sampled_from(HALVES))
    mesh = data.draw(meshes(max_ranks=8))
    shape = data.draw(st.sampled_from([(8, 8), (4, 6), (8, 3, 2), (5,), (0, 4)]))
    source = data.draw(layouts(mesh, shape, partial=("sum", "avg")))
    target = data.draw(layouts(mesh, shape, partial=()))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    whole = torch.randint(-20000, 20000, shape, generator=generator).float()
    comm = SimulatedComm(mesh, cost=BYTES_ALONE)
    given = distribute(whole, source, comm)

    narrowed = spmd(lambda x: x.to(dtype), out_layouts=target, reduce_dtype=torch.float32)
    got = narrowed(given)
    program = narrowed.last.traced.program
    program.verify()
    assert got.type.layout == target
    assert got.full().equal(given.full().to(dtype))
    assert program.received_bytes <= plan(given.type, target, cost=BYTES_ALONE).received_bytes


def test_windows_of_a_sum_of_halves_are_rounded_where_they_are():
    x = torch.arange(84).reshape(1, 2, 7, 6).to(torch.float16)
    pool = torch.nn.functional.max_pool2d
    mesh = Mesh(x=2, y=2)
    for dim in range(2, 4):
        layout = Layout(mesh, [Shard(dim), Partial()])
        given = distribute(x, layout, SimulatedComm(mesh, cost=BYTES_ALONE))
        assert torch.equal(spmd(lambda x: pool(x, 3, 2, 1))(given).full(), pool(x, 3, 2, 1))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_halves_wait_in_complex_numbers_of_the_wider_kind():
    x = torch.arange(4).to(torch.float16)
    pending = distribute(x, PENDING, COMM)
    functions = [
        lambda x: torch.complex(x, x),
        lambda x: torch.view_as_complex(x.reshape(2, 2)),
        lambda x: torch.view_as_real(torch.complex(x, x) * 1),
    ]
    for f in functions:
        for layout in (None, PENDING, MESH.layout()):
            with debug():
                got = spmd(f, out_layouts=layout)(pending)
            assert got.dtype == f(x).dtype
            assert torch.equal(got.full().cfloat(), f(x).cfloat())


def test_a_replicated_sum_of_halves_takes_three_quarters_of_the_bytes_of_an_all_reduce():
    mesh = Mesh(tp=4)
    a = TensorType((512, 4096), torch.bfloat16, mesh.layout(None, "tp"))
    b = TensorType((4096, 512), torch.bfloat16, mesh.layout("tp"))
    program = trace(torch.mm, a, b, out_layouts=mesh.layout())
    both = plan(
        attrs.evolve(
            a, shape=(512, 512), dtype=torch.float32, layout=mesh.layout(partial={"tp": "sum"})
        ),
        mesh.layout(),
    )
    assert 4 * program.received_bytes == 3 * both.received_bytes


CASTS = {
    "a product": lambda x, y: x.float() @ y,
    "copy_": lambda x, y: y.copy_(x),
    "promotion": lambda x, y: x * y,
    "sum": lambda x, y: x.sum(dtype=torch.float64),
    "stack": lambda x, y: torch.stack([x, y]),
    "cat": lambda x, y: torch.cat([x, y]),
    "narrower": lambda x, y: x.int(),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "alpha": lambda x, y: torch.add(y, x, alpha=2),
    "mean": lambda x, y: x.mean(dtype=torch.float32),
    "cumsum": lambda x, y: x.cumsum(0, dtype=torch.float32),
    "division": lambda x, y: x / 2,
    "addcmul": lambda x, y: torch.addcmul(y, y, x),
}


@pytest.mark.parametrize("name", CASTS)
def test_integers_whose_terms_wrap_around_are_reduced_before_they_are_cast(name):
    most, value = 2**63 - 1, torch.tensor([1, 2, 3])
    terms = (torch.full((3,), most), value - most)
    x = from_local(terms, TensorType((3,), torch.int64, PENDING), COMM)
    y = distribute(torch.ones(3), MESH.layout(), COMM)
    due = CASTS[name](value, torch.ones(3))
    for layouts_ in (None, PENDING, like(None)):
        got = spmd(CASTS[name], out_layouts=layouts_)(x, y)
        assert got.dtype == due.dtype
        assert torch.equal(got.full(), due)


def test_a_sum_of_one_rank_is_none():
    """A pending sum along an axis of one rank moves in its own dtype."""
    mesh = Mesh(a=3, one=1)
    x = TensorType((6, 4), torch.bfloat16, mesh.layout("a", partial={"one": "sum"}))
    program = trace(lambda x: x, x, out_layouts=mesh.layout())
    assert program.received_bytes == 4 * 4 * 2
    assert "f32" not in str(program)


def test_a_sum_that_lies_in_one_row_on_several_ranks_is_reduced_and_verified():
    """Its cast is of a dim of size 1 that an axis cuts, which no rule of an op has."""
    mesh = Mesh(a=3, b=2)
    x = TensorType((1,), torch.bfloat16, mesh.layout("b", partial={"a": "sum"}))
    program = trace(torch.neg, x, out_layouts=mesh.layout())
    program.verify()
    assert "_to_copy" in str(program)
