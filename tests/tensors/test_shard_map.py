"""Tests of shard_map and of the named collectives, on simulated and on real ranks.

Values are integers in float64, so that results and derivatives are equal to the bit.
"""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from fdtensor.layouts.errors import CommError, FdtensorError, LayoutError, MeshError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.programs.tracer import trace
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.shard_map.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    reduce_scatter,
)
from fdtensor.tensors.shard_map.mapped import shard_map
from fdtensor.testing.pool import WorkerError
from fdtensor.testing.strategies import layouts, meshes, shapes
from fdtensor.testing.values import full_tensor, gather_full, scatter

MESH = Mesh(dp=2, tp=2)
few = settings(max_examples=settings.default.max_examples // 3)
fewer = settings(max_examples=max(3, settings.default.max_examples // 16))


def ints(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, tuple(shape), generator=generator).to(torch.float64)


# --- each collective against its definition --------------------------------------------------


def blocks(size, count):
    """Where `Shard` cuts a dim."""
    step = -(-size // count)
    return [slice(min(size, i * step), min(size, (i + 1) * step)) for i in range(count)]


def along(x, dim, where):
    return x[(slice(None),) * dim + (where,)]


def extreme(value):
    return lambda xs: [getattr(torch.stack(xs), value)(0)] * len(xs)


def cutting(cut, join):
    def defined(xs):
        parts = [[along(x, cut, b) for b in blocks(x.shape[cut], len(xs))] for x in xs]
        return [torch.cat([row[i] for row in parts], join) for i in range(len(xs))]

    return defined


def scattered(dim):
    def defined(xs):
        total = torch.stack(xs).sum(0)
        return [along(total, dim, b) for b in blocks(total.shape[dim], len(xs))]

    return defined


def permuted(xs):
    return [torch.zeros_like(xs[0]), *xs[:-1]] if len(xs) > 1 else list(map(torch.zeros_like, xs))


def shifts(x, axis):
    return ppermute(x, axis, [(i, i + 1) for i in range(axis_size(axis) - 1)])


def turns(x, axis):
    count = axis_size(axis)
    return ppermute(x, axis, [((i + 1) % count, i) for i in range(count)])


LAWS = {
    "psum": (psum, lambda xs: [torch.stack(xs).sum(0)] * len(xs)),
    "pmean": (pmean, lambda xs: [torch.stack(xs).sum(0) / len(xs)] * len(xs)),
    "pmax": (pmax, extreme("amax")),
    "pmin": (pmin, extreme("amin")),
    "gather": (lambda x, a: all_gather(x, a, 1), lambda xs: [torch.cat(xs, 1)] * len(xs)),
    "stack": (
        lambda x, a: all_gather(x, a, -1, tiled=False),
        lambda xs: [torch.stack(xs, -1)] * len(xs),
    ),
    "scatter": (lambda x, a: reduce_scatter(x, a, -2), scattered(0)),
    "swap": (lambda x, a: all_to_all(x, a, 0, 1), cutting(0, 1)),
    "back": (lambda x, a: all_to_all(x, a, 1, 0), cutting(1, 0)),
    "shift": (shifts, permuted),
    "turn": (turns, lambda xs: [*xs[1:], xs[0]]),
}
SMOOTH = [name for name in LAWS if name not in ("pmax", "pmin", "pmean")]


@st.composite
def places(draw, world=None):
    """A mesh, some of its axes and the shape of a matrix."""
    mesh = draw(meshes(world=world).filter(lambda mesh: mesh.ndim > 0))
    axes = draw(st.permutations(mesh.axes))
    axes = tuple(axes[: draw(st.integers(1, len(axes)))])
    axes = axes[0] if len(axes) == 1 and draw(st.booleans()) else axes
    return mesh, axes, (draw(st.integers(0, 5)), draw(st.integers(0, 4)))


def own(rank, shape, seed=0):
    """What a rank starts with; ties and bools for extremes come from the small range."""
    return ints(shape, 100 * seed + rank).remainder(4) - 1


def on_each_rank(mesh, f, comm):
    """What `f(rank)` returns on every rank that runs here."""
    found = {}

    def body(x):
        rank = mesh.ranks[axis_index(mesh.axes)]
        found[rank] = f(rank)
        return x

    shard_map(body, mesh)(distribute(torch.zeros(()), mesh.layout(), comm))
    return found


def through(name, mesh, axes, shape):
    """What the ranks here have after a collective, and the gradient of a product with it."""
    collective = LAWS[name][0]

    def f(rank):
        x = own(rank, shape).requires_grad_()
        y = collective(x, axes)
        (grad,) = torch.autograd.grad((y * own(rank, y.shape, 1)).sum(), x)
        return y.detach(), grad

    comm = connect(Mesh(world=1 + max(mesh.ranks)))
    if comm.rank is not None and comm.rank not in mesh.ranks:
        return {}
    return on_each_rank(mesh, f, comm)


def check_law(name, mesh, axes, shape, found):
    """The definition, and `<A x, y> == <x, A' y>` over all ranks of a coset."""
    names = (axes,) if isinstance(axes, str) else axes
    for ranks in {mesh.coset(names, mesh.coord(rank)) for rank in mesh.ranks}:
        xs = [own(rank, shape) for rank in ranks]
        there = 0.0
        for rank, x, expected in zip(ranks, xs, LAWS[name][1](xs), strict=True):
            value, grad = found[rank]
            assert torch.equal(value, expected), name
            assert value.is_contiguous()
            there += (value * own(rank, value.shape, 1)).sum() - (x * grad).sum()
        assert name not in SMOOTH or there == 0


@pytest.mark.parametrize("name", LAWS)
@few
@given(places())
def test_a_named_collective_is_what_its_definition_says(name, place):
    check_law(name, *place, through(name, *place))


@pytest.mark.mesh
@pytest.mark.parametrize("name", LAWS)
@fewer
@given(places(world=4))
def test_real_ranks_give_what_simulated_ranks_give(pool4, name, place):
    expected, found = through(name, *place), {}
    for rank in pool4.run(through, name, *place):
        found |= rank
    check_law(name, *place, found)
    for rank, values in expected.items():
        assert all(map(torch.equal, values, found[rank]))


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.bool, torch.bfloat16, torch.complex64], ids=str
)
def test_collectives_take_every_dtype(dtype):
    def f(rank):
        x = torch.tensor([rank % 2, 1]).to(dtype)
        return psum(x, "dp"), all_gather(x, "tp"), ppermute(x, "tp", [(0, 1)])

    total, both, sent = on_each_rank(MESH, f, SimulatedComm(MESH))[3]
    assert total.tolist() == [2, 2]
    assert total.dtype == (torch.int64 if dtype == torch.bool else dtype)
    assert both.tolist() == [0, 1, 1, 1]
    assert sent.tolist() == [0, 1]
    assert both.dtype == sent.dtype == dtype


def test_blocks_of_other_sizes_are_gathered_and_swapped():
    def f(rank):
        x = torch.full((rank % 2 + 1, 3), float(rank), requires_grad=True)
        y, z = all_gather(x, "tp"), all_to_all(x, "tp", 1, 0)
        return y, z, torch.autograd.grad((rank + 1) * y.sum(), x)[0]

    found = on_each_rank(MESH, f, SimulatedComm(MESH))
    assert found[2][0].tolist() == [[2] * 3, [3] * 3, [3] * 3]
    assert found[3][1].tolist() == [[2], [3], [3]]
    assert found[3][2].tolist() == [[7] * 3] * 2


def test_ranks_that_tie_share_the_cotangent_of_an_extreme():
    def f(rank):
        x = torch.tensor([1.0, rank, -rank], requires_grad=True)
        high = torch.autograd.grad(pmax(x, ("dp", "tp")).sum(), x)[0]
        low = torch.autograd.grad(pmin(x, ("dp", "tp")).sum(), x)[0]
        return high.tolist(), low.tolist()

    found = on_each_rank(MESH, f, SimulatedComm(MESH))
    assert found == {
        0: ([1, 0, 4], [1, 4, 0]),
        1: ([1, 0, 0], [1, 0, 0]),
        2: ([1, 0, 0], [1, 0, 0]),
        3: ([1, 4, 0], [1, 0, 4]),
    }


def test_all_to_all_may_cut_and_join_one_dim():
    found = on_each_rank(
        MESH, lambda rank: all_to_all(torch.arange(4) + 10 * rank, "tp", 0, 0), SimulatedComm(MESH)
    )
    assert [found[r].tolist() for r in (2, 3)] == [[20, 21, 30, 31], [22, 23, 32, 33]]


def test_the_index_along_several_axes_counts_the_last_fastest():
    def f(rank):
        return axis_index("dp"), axis_index(("tp", "dp")), axis_size(("tp", "dp"))

    assert on_each_rank(MESH, f, SimulatedComm(MESH))[2] == (1, 1, 4)


def test_vmap_inside_runs_one_collective_for_the_batch():
    comm = SimulatedComm(MESH)

    def f(rank):
        batch = torch.arange(6.0).reshape(3, 2) + rank
        each = torch.func.vmap(lambda x: all_gather(psum(x, "dp"), "tp"), 1)(batch)
        grad = torch.func.grad(lambda x: (psum(x, "dp") ** 2).sum())(batch)
        return each, grad

    each, grad = on_each_rank(MESH, f, comm)[1]
    whole = torch.cat([2 * torch.arange(6.0).reshape(3, 2) + 2 + 2 * r for r in (0, 1)])
    assert torch.equal(each, whole.T)
    assert torch.equal(grad, 4 * (2 * torch.arange(6.0).reshape(3, 2) + 4))
    assert sum(comm.calls.values()) <= 4


# --- shapes and layouts of results -----------------------------------------------------------


@st.composite
def tensors(draw, partial=(), max_ranks=27):
    """A type of doubles on any mesh, under any layout."""
    mesh, shape = draw(meshes(max_ranks=max_ranks)), draw(shapes())
    return TensorType(shape, torch.float64, draw(layouts(mesh, shape, partial=partial)))


def comm_of(mesh):
    return SimulatedComm(Mesh(world=1 + max(mesh.ranks)))


@given(tensors(partial=("sum", "avg")))
def test_a_function_sees_the_blocks_and_its_results_have_their_types(type):
    x = from_local(scatter(full_tensor(type, 0), type, 0), type, comm_of(type.mesh))
    seen = {}

    def f(tree):
        seen[axis_index(type.mesh.axes) if type.mesh.ndim else 0] = tree["x"]
        return [2 * tree["x"], (tree["x"],)]

    (twice, (once,)) = shard_map(f, type.mesh, None, type.layout)({"x": x, "static": 3})
    assert isinstance(twice, DTensor)
    assert twice.type is once.type is type
    assert all(map(torch.equal, x.local, (seen[i] for i in range(type.mesh.size))))
    assert torch.equal(gather_full(twice.local, type), 2 * full_tensor(type, 0))


@given(tensors(partial=("sum",)), st.data())
def test_arguments_come_in_the_layout_that_is_asked_for(type, data):
    to = data.draw(layouts(type.mesh, type.shape, partial=()))
    x = from_local(scatter(full_tensor(type, 0), type, 0), type, comm_of(type.mesh))
    y = shard_map(lambda x, n: x + n, type.mesh, (to, None), to)(x, 1)
    assert y.layout is to
    assert torch.equal(gather_full(y.local, y.type), full_tensor(type, 0) + 1)


def test_blocks_that_no_shard_cuts_need_ragged():
    layout = Layout(MESH, [Replicate(), Ragged(0, (1, 4))])

    def f(x):
        return torch.ones(1 + 3 * axis_index("tp"))

    x = distribute(torch.zeros(2), MESH.layout(), SimulatedComm(MESH))
    assert shard_map(f, MESH, None, layout)(x).shape == (5,)
    with pytest.raises(LayoutError) as raised:
        shard_map(f, MESH, None, MESH.layout("tp"))(x)
    assert str(raised.value) == UNEVEN


def test_none_stands_for_a_replicated_result():
    x = distribute(torch.ones(4), MESH.layout("tp"), SimulatedComm(MESH))
    y, z = shard_map(lambda x: (psum(x, "tp"), x), MESH, None, (None, MESH.layout("tp")))(x)
    assert (y.layout, z.layout) == (MESH.layout(), MESH.layout("tp"))
    assert y.full().tolist() == [2, 2]


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_result_that_is_not_replicated_is_found(axis):
    x = distribute(torch.arange(4.0), MESH.layout(axis), SimulatedComm(MESH))
    other = "tp" if axis == "dp" else "dp"
    with pytest.raises(LayoutError) as raised:
        shard_map(lambda x: x, MESH, None, MESH.layout(other))(x)
    assert str(raised.value) == NOT_REPLICATED.replace("AXIS", axis).replace(
        "OTHER", "2" if axis == "dp" else "1"
    )


def test_copies_that_differ_by_rounding_only_are_replicas():
    def f(x):
        return x * (1 + axis_index("tp") * 1e-15), x * float("nan")

    x = distribute(torch.ones(3).double(), MESH.layout(), SimulatedComm(MESH))
    assert shard_map(f, MESH)(x)[0].shape == (3,)


def test_all_cosets_count_as_one_call():
    comm = SimulatedComm(MESH)
    x = distribute(torch.ones(4), MESH.layout("dp"), comm)
    shard_map(lambda x: all_gather(x, "dp"), MESH)(x)
    assert comm.calls == {"all_gather": 1}
    assert comm.received == dict.fromkeys(range(4), 8)


# --- derivatives -----------------------------------------------------------------------------


def dense(x, w):
    """The reference for `parallel`."""
    return ((x @ w) ** 2 @ w.T).sum(0)


def parallel(shape, mesh=MESH):
    """`dense`, on rows over dp and on columns, then rows, of w over tp."""
    comm = connect(Mesh(world=4))

    def f(x, w):
        h = (x @ w) ** 2
        out = reduce_scatter(h @ w.T, "tp", 1)
        return psum(all_gather(out, "tp", 1).sum(0), "dp")

    into = (mesh.layout("dp"), mesh.layout(None, "tp"))
    mapped = shard_map(f, mesh, into, mesh.layout())

    def full(x, w):
        return mapped(
            distribute(x, mesh.layout(None, "dp"), comm),
            distribute(w, mesh.layout("dp"), comm),
        ).full()

    return full


def derivatives(fn, *args):
    """The value of `fn`, and its derivatives of every kind against fixed cotangents."""
    leaves = [arg.clone().requires_grad_() for arg in args]
    y = fn(*leaves)
    grads = torch.autograd.grad(y, leaves, ints(y.shape, 3).requires_grad_(), create_graph=True)
    second = torch.autograd.grad([(g * ints(g.shape, 4)).sum() for g in grads], leaves)
    plain = torch.autograd.grad(fn(*leaves), leaves, ints(y.shape, 3))
    _, pull = torch.func.vjp(fn, *args)
    tangents = tuple(ints(a.shape, 5) for a in args)
    _, tangent = torch.func.jvp(fn, args, tangents)
    with forward_ad.dual_level():
        dual = fn(*map(forward_ad.make_dual, args, tangents))
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)
    batch = torch.func.vmap(fn)(*[torch.stack([arg, 2 * arg]) for arg in args])

    weights = ints(y.shape, 3)

    def loss(*args):
        return (fn(*args) * weights).sum()

    _, forward = torch.func.jvp(torch.func.grad(loss), args, tangents)
    backward = torch.func.grad(lambda *args: torch.func.jvp(fn, args, tangents)[1].sum())(*args)
    each = torch.func.vmap(torch.func.grad(loss))(*[torch.stack([a, 2 * a]) for a in args])
    found = [
        y,
        *grads,
        *second,
        *plain,
        *pull(ints(y.shape, 3)),
        tangent,
        batch,
        forward,
        backward,
        each,
    ]
    return [tensor.detach() for tensor in found]


def parallel_derivatives(shape):
    return derivatives(parallel(shape), *matrices(shape))


def matrices(shape):
    i, j, k = shape
    return ints((i, j), 1).remainder(4), ints((j, k), 2).remainder(4)


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


@fewer
@given(SIZES)
def test_derivatives_are_those_of_the_full_function(shape):
    expected = derivatives(dense, *matrices(shape))
    assert all(map(torch.equal, parallel_derivatives(shape), expected))


@pytest.mark.mesh
@fewer
@given(SIZES)
def test_derivatives_on_real_ranks_are_those_of_the_full_function(pool4, shape):
    expected = derivatives(dense, *matrices(shape))
    for found in pool4.run(parallel_derivatives, shape):
        assert all(map(torch.equal, found, expected))


def elementwise(type):
    """A product of two tensors of one type, of which one keeps its layout on the way."""
    comm = connect(Mesh(world=1 + max(type.mesh.ranks)))
    mapped = shard_map(lambda x, y: (x**2 * y, x), type.mesh, None, type.layout)

    def fn(x, y):
        z, x = mapped(distribute(x, type.layout, comm), distribute(y, type.layout, comm))
        return z.full() + x.full()

    return fn


@fewer
@given(tensors(max_ranks=6))
def test_replicated_inputs_and_results_count_once(type):
    args = (ints(type.shape, 1), ints(type.shape, 2))
    found = derivatives(elementwise(type), *args)
    assert all(map(torch.equal, found, derivatives(lambda x, y: x**2 * y + x, *args)))


def pending(type, to):
    comm = connect(Mesh(world=1 + max(type.mesh.ranks)))
    mapped = shard_map(lambda x, w: (x * w, 2 * x), type.mesh, None, to)

    def fn(x, w):
        y, z = mapped(distribute(x, type.layout, comm), distribute(w, to_copies(type), comm))
        return y.full() + z.full()

    return fn


def to_copies(type):
    return type.cotangent().layout


@fewer
@given(tensors(partial=("sum",), max_ranks=6))
def test_terms_of_sums_have_the_derivatives_of_the_full_function(type):
    args = (ints(type.shape, 1), ints(type.shape, 2))
    found = derivatives(pending(type, type.layout), *args)
    assert all(map(torch.equal, found, derivatives(lambda x, w: x * w + 2 * x, *args)))


def test_terms_of_an_average_have_their_part_of_the_cotangent():
    layout = MESH.layout(partial={"tp": "avg"})
    mapped = shard_map(lambda x: 3 * x, MESH, None, layout)
    terms = [torch.tensor([float(r)], requires_grad=True) for r in range(4)]
    terms = [terms[0], terms[1], terms[0], terms[1]]
    type = TensorType((1,), torch.float32, layout)
    y = mapped(from_local(terms, type, SimulatedComm(MESH)))
    y.full().sum().backward()
    assert y.full().item() == 1.5
    assert [terms[i].grad.item() for i in (0, 1)] == [3, 3]  # each is given for two ranks


def test_an_input_replicated_over_an_axis_gets_the_sum_of_its_cotangents():
    x = torch.ones(2, requires_grad=True)
    dx = distribute(x, MESH.layout(), SimulatedComm(MESH))
    y = shard_map(lambda x: x * (axis_index("tp") + 1), MESH, None, MESH.layout("tp"))(dx)
    y.full().sum().backward()
    assert x.grad.tolist() == [3, 3]


@pytest.mark.mesh
def test_ranks_may_use_or_leave_what_they_get(pool4):
    """Each rank runs the backward of every collective, also of one whose result it ignores."""

    def stages():
        comm = connect(Mesh(world=4))
        x = ints((2, 3)).requires_grad_()

        def f(x):
            first = axis_index("tp") == 0
            got = ppermute(2 * x, "tp", [(0, 1)])
            psum(x, "dp")
            kept = psum(torch.zeros(2, 3).double() if first else got**2, "tp")
            return kept * (axis_index("dp") + 1) if first else 0 * kept.detach()

        total = MESH.layout(partial={"dp": "sum", "tp": "sum"})
        y = shard_map(f, MESH, None, total)(distribute(x, MESH.layout(), comm)).full()
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), grad

    x = ints((2, 3))
    for y, grad in (stages(), *pool4.run(stages)):
        assert torch.equal(y, 12 * x**2)
        assert torch.equal(grad, 24 * x)


def test_a_step_of_training_runs_inside():
    """Gradients taken inside are those of each rank's own copy, until they are added."""
    comm = SimulatedComm(MESH)
    x, w = ints((4, 3)), ints((3,), 1)

    def step(x, w):
        w = w.detach().requires_grad_()
        loss = psum(((x @ w) ** 2).sum(), "dp")
        (grad,) = torch.autograd.grad(loss, w)
        return w.detach() - psum(grad, "dp") / 2

    mapped = shard_map(step, MESH, (MESH.layout("dp"), MESH.layout()))
    new = mapped(distribute(x, MESH.layout(), comm), distribute(w, MESH.layout(), comm))
    assert torch.equal(new.full(), w - 2 * x.T @ (x @ w))


def test_results_that_nothing_tracked_reaches_are_not_tracked():
    x = distribute(torch.ones(3, requires_grad=True), MESH.layout(), SimulatedComm(MESH))
    y, z, n = shard_map(lambda x: (x * 2, x.detach(), x.long()), MESH)(x)
    assert [t.local[0].requires_grad for t in (y, z, n)] == [True, False, False]
    with torch.no_grad():
        assert not shard_map(lambda x: x * 2, MESH)(x).local[0].requires_grad


# --- simulated ranks -------------------------------------------------------------------------


def test_a_failure_on_one_rank_is_raised_once_and_stops_the_others():
    ends, before = [], threading.active_count()

    def f(x):
        try:
            if axis_index(("dp", "tp")) == 2:
                raise RuntimeError("on rank 2")
            return psum(x, "tp")
        finally:
            ends.append(axis_index(("dp", "tp")))

    with pytest.raises(RuntimeError, match="on rank 2"):
        shard_map(f, MESH)(distribute(torch.ones(2), MESH.layout(), SimulatedComm(MESH)))
    assert sorted(ends) == [0, 1, 2]
    assert threading.active_count() == before


def test_ranks_run_in_turns_with_the_state_of_their_caller():
    seen = []

    def f(x):
        y = x @ x
        seen.append((torch.is_grad_enabled(), y.dtype, torch.ones(1).device.type))
        psum(x, "tp")
        seen.append(axis_index(("dp", "tp")))
        return x

    x = distribute(torch.ones(2, 2), MESH.layout(), SimulatedComm(MESH))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        shard_map(f, MESH)(x)
    assert seen == [(False, torch.bfloat16, "meta")] * 4 + [0, 1, 2, 3]


def test_inference_mode_reaches_the_ranks():
    x = distribute(torch.ones(2), MESH.layout(), SimulatedComm(MESH))
    seen = []
    with torch.inference_mode():
        shard_map(lambda x: seen.append(torch.is_inference_mode_enabled()) or x, MESH)(x)
    assert seen == [True] * 4


# --- what is refused -------------------------------------------------------------------------


def branch(one, other):
    """Rank 3 does `other`."""
    return lambda x: other(x) if axis_index(("dp", "tp")) == 3 else one(x)


def refused(f, *layouts):
    x = distribute(torch.ones(4, 2), MESH.layout(), connect(Mesh(world=4)))
    with pytest.raises(FdtensorError) as raised:
        shard_map(f, MESH, *layouts)(x)
    return f"{type(raised.value).__name__}: {raised.value}\n"


BRANCHES = {
    "kind": branch(lambda x: psum(x, "tp"), lambda x: pmax(x, "tp")),
    "axis": branch(lambda x: psum(x, "tp"), lambda x: psum(x, "dp")),
    "dtype": branch(lambda x: psum(x, "tp"), lambda x: psum(x.double(), "tp")),
    "shape": branch(lambda x: psum(x, "tp"), lambda x: psum(x[1:], "tp")),
    "none": branch(lambda x: psum(x, "tp"), lambda x: x),
    "perm": branch(lambda x: ppermute(x, "tp", [(0, 1)]), lambda x: ppermute(x, "tp", [(1, 0)])),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_ranks_that_call_different_things_fail_together(name):
    assert refused(BRANCHES[name]) == DIFFERENT[name]


@pytest.mark.mesh
@pytest.mark.parametrize("name", BRANCHES)
def test_real_ranks_that_call_different_things_fail_together(pool4, name):
    f = BRANCHES[name]
    assert pool4.run(lambda: refused(f)) == [DIFFERENT[name]] * 4


@pytest.mark.mesh
def test_a_failure_on_one_real_rank_stops_the_others(pool4):
    def failing():
        x = distribute(torch.ones(4, 2), MESH.layout(), connect(Mesh(world=4)))
        shard_map(branch(lambda x: psum(x, "tp"), lambda x: 1 / 0), MESH)(x)

    with pytest.raises(WorkerError) as raised:
        pool4.run(failing)
    texts = raised.value.failures
    assert "ZeroDivisionError: division by zero" in texts[3]
    for rank in (0, 1, 2):
        what = "rank 3 failed in shard_map with ZeroDivisionError: division by zero"
        assert f"CommError: {what}" in texts[rank]


@pytest.mark.mesh
def test_later_calls_trust_what_was_said_at_the_first(pool4):
    def twice():
        comm, sizes = connect(Mesh(world=4)), []

        def f(x):
            sizes.append(axis_index("tp") + 1)
            return all_gather(x[: sizes[-1]], "tp")

        mapped = shard_map(f, MESH)
        x = distribute(torch.arange(4.0), MESH.layout(), comm)
        told = []
        comm.agree = lambda *args: told.append(args)
        found = [mapped(x).full().tolist() for _ in range(3)]
        return found, len(told), len(sizes)

    assert pool4.run(twice) == [([[0, 0, 1]] * 3, 1, 3)] * 4


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin", "all_gather", "reduce_scatter"])
def test_a_collective_is_only_for_shard_map(name):
    with pytest.raises(CommError) as raised:
        globals()[name](torch.ones(2), "tp")
    assert str(raised.value) == OUTSIDE.format(name=name)


@pytest.mark.parametrize("source", ["axis_index('tp')", "axis_size('tp')", "ppermute(1, 'tp', [])"])
def test_places_are_only_for_shard_map(source):
    with pytest.raises(CommError, match="is called outside of shard_map"):
        eval(source)


def test_a_mesh_axis_must_be_there():
    with pytest.raises(MeshError, match="the mesh has no axis 'pp'"):
        on_each_rank(MESH, lambda rank: psum(torch.ones(1), "pp"), SimulatedComm(MESH))


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: psum(1, "tp"), "psum of 1, which is not a tensor."),
        (lambda x: psum(x, ("tp", "tp")), "psum over ('tp', 'tp') names no axis, or one twice."),
        (lambda x: pmean(x.int(), "tp"), "pmean of a tensor of i32, which has no avg."),
        (lambda x: all_gather(x, "tp", 2), "all_gather along dim 2 of a tensor that has 2 dims."),
        (lambda x: ppermute(x, "tp", [(0, 2)]), "ppermute over 'tp' names an index twice, or one "
         "that is not there."),
        (lambda x: ppermute(x, "tp", [0]), "[0] is not a permutation."),
        (lambda x: all_to_all(x[1:], "tp", 0, 0), "all_to_all over 'tp' cannot cut dim 0 of 3 into "
         "2 even blocks, to join them along the same dim."),
        (lambda x: [x, 1], "result[1] is 1, which is not a tensor."),
    ],
)  # fmt: skip
def test_what_a_function_does_wrong_is_told_in_a_sentence(f, text):
    assert refused(f).partition(": ")[2].splitlines()[0] == text


def test_arguments_must_fit_the_mesh():
    comm = SimulatedComm(MESH)
    x, other = (distribute(torch.ones(4), m.layout(), comm) for m in (MESH, Mesh(dp=4)))
    with pytest.raises(ValueTreeError) as raised:
        shard_map(lambda *args: args[0], MESH)(x, [other, torch.ones(2)], 1)
    assert str(raised.value) == MISFITS
    with pytest.raises(ValueTreeError, match="no DTensor among its arguments"):
        shard_map(lambda x: x, MESH)(1)
    with pytest.raises(ValueTreeError, match="on another Comm"):
        shard_map(lambda x, y: x, MESH)(x, DTensor(x.local, x.type, SimulatedComm(MESH)))


def test_layouts_must_fit():
    x = distribute(torch.ones(4), MESH.layout(), SimulatedComm(MESH))
    with pytest.raises(LayoutError, match="in_layouts\\[0\\] is 'tp', which is not a Layout"):
        shard_map(lambda x: x, MESH, ("tp",))
    with pytest.raises(LayoutError, match="out_layouts is a layout on another mesh"):
        shard_map(lambda x: x, MESH, None, Mesh(dp=4).layout())
    with pytest.raises(LayoutError, match="is not a Mesh"):
        shard_map(lambda x: x, "mesh")
    with pytest.raises(ValueTreeError, match="in_layouts does not have the structure of the arg"):
        shard_map(lambda x: x, MESH, (None, None))(x)
    with pytest.raises(ValueTreeError, match="out_layouts does not have the structure of the res"):
        shard_map(lambda x: x, MESH, None, (None,))(x)
    with pytest.raises(LayoutError, match="shards dim 1 of a tensor that has 1 dims"):
        shard_map(lambda x: x, MESH, None, MESH.layout(None, "tp"))(x)


def test_a_tensor_that_is_closed_over_must_not_require_grad():
    w = torch.ones(4, requires_grad=True)
    x = distribute(torch.ones(4), MESH.layout(), SimulatedComm(MESH))
    with pytest.raises(ValueTreeError, match="closes over 'w', a tensor that requires grad"):
        shard_map(lambda x: x * w, MESH)(x)


def test_a_dtensor_made_by_hand_is_looked_at():
    comm = SimulatedComm(MESH)
    x = DTensor((torch.ones(3),) * 4, TensorType((4,), torch.float32, MESH.layout()), comm)
    with pytest.raises(CommError, match="rank 0 has shape"):
        shard_map(lambda x: x, MESH)(x)


_CALLS = """\
CommError: rank 0 calls {} of f32[4,2], but rank 3 {} of {}[4,2].

  mesh: Mesh(dp=2, tp=2)

Let every rank of the mesh call the same collectives, in the same order; choose by axis_index only \
what a rank computes.
"""

DIFFERENT = {
    "kind": _CALLS.format("psum over 'tp'", "calls pmax over 'tp'", "f32"),
    "axis": _CALLS.format("psum over 'tp'", "calls psum over 'dp'", "f32"),
    "dtype": _CALLS.format("psum over 'tp'", "calls psum over 'tp'", "f64"),
    "shape": """\
CommError: ranks 2 and 3 call psum over 'tp' with shapes (4, 2) and (3, 2).

Give it tensors of one shape.
""",
    "none": _CALLS.format("psum over 'tp'", "returns", "f32").replace("returns of", "returns"),
    "perm": _CALLS.format(
        "ppermute[perm=[(0, 1)]] over 'tp'", "calls ppermute[perm=[(1, 0)]] over 'tp'", "f32"
    ),
}

UNEVEN = """\
result of shard_map has shape (1,) on rank 0, but its layout cuts a tensor of shape (5,) so that \
the rank holds (3,).

  layout: (dp=R, tp=S(0))

Return blocks as the layout cuts them, or say Ragged(dim, sizes) for blocks of other sizes."""

NOT_REPLICATED = """\
the result of shard_map is said to be replicated over 'AXIS', but ranks 0 and OTHER have different \
values.

psum it over 'AXIS', or say Shard or Partial in out_layouts."""

OUTSIDE = """\
{name} is called outside of shard_map.

Call it in the function that you give to shard_map(f, mesh, ...)."""

MISFITS = """\
2 of 4 arguments cannot go into shard_map on Mesh(dp=2, tp=2).

  args[1][0]: a DTensor on Mesh(dp=4): redistribute it to this mesh.
  args[1][1]: a plain tensor: distribute(tensor, layout, comm) makes a DTensor.

Give it DTensors on its mesh and on one Comm, and Python values."""


# --- what a function writes to ----------------------------------------------------------------

WRITERS = {
    "its argument": lambda x, y: x.mul_(10),
    "a view of it": lambda x, y: x[0:1].fill_(7) + y,
    "one argument through another": lambda x, y: (x.add_(y), y),
    "nothing": lambda x, y: x,
    "nothing, and both": lambda x, y: (x, y, x),
    "by out=": lambda x, y: torch.add(x, y, out=x),
}


def memory_of(x):
    return {t.data_ptr() for t in x.comm.leaves(x.local) if t.numel()}


def check_arguments_stay(comm, name, grad=False):
    """The results are those on copies, the arguments stay, and no memory is shared."""
    x, y = (distribute(ints((4, 4), i), MESH.layout("dp", "tp"), comm) for i in range(2))
    before = [t.clone() for t in (*comm.leaves(x.local), *comm.leaves(y.local))]
    if grad:
        x.requires_grad_()
    out = shard_map(WRITERS[name], MESH, None, x.layout)(x, y)
    outs = out if isinstance(out, tuple) else (out,)
    for t, old in zip((*comm.leaves(x.local), *comm.leaves(y.local)), before, strict=True):
        assert torch.equal(t, old)
    for out in outs:
        for leaf in comm.leaves(out.local):
            leaf.detach().add_(1)  # of a new value
    for t, old in zip((*comm.leaves(x.local), *comm.leaves(y.local)), before, strict=True):
        assert torch.equal(t, old)
    assert len({p for out in outs for p in memory_of(out)}) == sum(
        len(memory_of(out)) for out in outs
    )


@pytest.mark.parametrize("name", WRITERS)
def test_a_function_may_write_to_its_arguments(name):
    check_arguments_stay(SimulatedComm(MESH), name)
    if name != "by out=":  # of which torch has no derivative
        check_arguments_stay(SimulatedComm(MESH), name, grad=True)


def arguments_stay_on_a_rank(name):
    comm = connect(MESH)
    for _ in range(2):
        check_arguments_stay(comm, name)
        check_arguments_stay(comm, name, grad=name != "by out=")


@pytest.mark.mesh
def test_real_ranks_may_write_to_their_arguments(pool4):
    for name in ("its argument", "nothing", "nothing, and both"):
        pool4.run(arguments_stay_on_a_rank, name)


def test_memory_of_numpy_is_copied_at_once():
    base = torch.ones(4, 2).numpy()
    x = from_local(
        (torch.from_numpy(base),) * 4, TensorType((4, 2), torch.float32, MESH.layout()),
        SimulatedComm(MESH),
    )  # fmt: skip
    shard_map(lambda x: x.mul_(5), MESH, None, MESH.layout())(x)
    assert (base == 1).all()


def test_a_collective_of_a_traced_function_inside_is_refused_and_nobody_waits():
    mesh = Mesh(x=2)
    rows = mesh.layout("x")
    x = distribute(torch.arange(4.0), rows, SimulatedComm(mesh))

    def body(a):
        trace(lambda t: psum(t, "x"), x.type)
        return a

    with pytest.raises(CommError, match="psum is called in a traced function inside of shard_map"):
        shard_map(body, mesh, rows, rows)(x)
