"""Arguments whose layouts are free: chosen with all else, tied to results, within a budget."""

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fdtensor import (
    LayoutError,
    Mesh,
    Shard,
    SimulatedComm,
    TensorType,
    TraceError,
    constrain,
    distribute,
    from_local,
    like,
    plan,
    run,
    spmd,
    trace,
)
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tree import flatten
from fdtensor.plans.cost import NCCL
from fdtensor.programs.bound.least import bound_of
from fdtensor.testing.strategies import layouts, meshes
from tests.programs.optimum import drawn
from tests.support.depth import times

MESH = Mesh(dp=4)
SEEDS = st.integers(0, 10**6)


def free(*shape: int, dtype: torch.dtype = torch.float32) -> FreeType:
    return TensorType(shape, dtype, layout="free")


def seconds(program) -> float:
    """What the choice takes by its prices."""
    return max(choice.seconds for choice in program.origin.choices.values())


OPS = {
    "mm": lambda x, y: x @ y,
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "t": lambda x, _: x.t(),
    "sum": lambda x, _: x.sum(0, keepdim=True).expand(x.shape),
}


@st.composite
def functions(draw):
    """A function of square matrices that returns some new ones in place of each, and their size."""
    count, n = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    pick = st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9))
    steps = draw(st.lists(pick, min_size=1, max_size=4))

    def f(*args):
        values = list(args)
        for op, i, j in steps:
            values.append(OPS[op](values[i % len(values)], values[j % len(values)]).clone())
        return tuple(values[-count:]) if len(values) >= 2 * count else tuple(values[:count])

    return f, count, n


@settings(max_examples=times(8, 200))
@given(functions(), meshes(), st.data())
def test_a_program_of_free_arguments_gives_what_the_function_does(function, mesh, data):
    f, count, n = function
    comm = SimulatedComm(mesh)
    tensors = [torch.randint(-3, 4, (n, n)) for _ in range(count)]
    types = [
        free(n, n, dtype=torch.int64)
        if data.draw(st.booleans())
        else TensorType((n, n), torch.int64, data.draw(layouts(mesh, (n, n), partial=False)))
        for _ in range(count)
    ]
    program = trace(f, *types, mesh=mesh)
    program.verify()
    given_ = [distribute(t, u.layout, comm) for t, u in zip(tensors, program.in_types)]
    for kind, type in zip(types, program.in_types):
        assert kind is type or all(
            isinstance(p, (Shard, Replicate)) for p in type.layout.placements
        )
    results = spmd(f, as_if=program)(*given_)
    assert [r.type for r in results] == list(program.out_types)
    assert all(torch.equal(r.full(), e) for r, e in zip(results, f(*tensors), strict=True))


@settings(max_examples=times(4, 100))
@given(seed=SEEDS, number=st.integers(0, 3))
@example(seed=32, number=1)
def test_no_fixed_layout_of_free_arguments_takes_less_time(seed, number):
    """Replicated, and cut along each axis alone or both."""
    case = drawn(seed)
    number %= len(case.types)

    def traced(layout=None):
        types = list(case.types)
        for i in range(number, len(types)):
            shape, dtype = types[i].shape, types[i].dtype
            types[i] = TensorType(shape, dtype, "free" if layout is None else layout)
        return trace(case, *types, out_layouts=like(None), mesh=case.mesh)

    a, b = case.mesh.axes
    fixed = [(), (a,), (None, a), (b,), (None, b), (a, b), (b, a)]
    least = min(seconds(traced(case.mesh.layout(*dims))) for dims in fixed)
    program = traced()
    assert seconds(program) <= least * 1.005 + 1e-9
    assert bound_of(program.origin.choices).least <= seconds(program) * (1 + 1e-6) + 1e-12


def loss(params, x):
    for w in params:
        x = torch.relu(x @ w)
    return (x * x).sum()


def step(params, m, v, x):
    """A step as AdamW takes it."""
    grads = torch.func.grad(loss)(params, x)
    first = [0.9 * a + 0.1 * g for a, g in zip(m, grads, strict=True)]
    second = [0.99 * b + 0.01 * g * g for b, g in zip(v, grads, strict=True)]
    moved = zip(params, first, second, strict=True)
    return [p - 0.01 * a / (b.sqrt() + 1e-8) for p, a, b in moved], first, second


def params(dtype: torch.dtype = torch.float32) -> list[FreeType]:
    return [free(64, 256, dtype=dtype), free(256, 64, dtype=dtype)]


def batch(dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType((256, 64), dtype, MESH.layout("dp"))


def test_parameters_and_state_are_cut_as_far_as_a_budget_asks():
    types = params(torch.float64)
    whole = [TensorType(t.shape, t.dtype, MESH.layout()) for t in types]
    held = trace(step, whole, whole, whole, batch(torch.float64))
    budget = held.peak_bytes * 2 // 3
    program = trace(step, types, types, types, batch(torch.float64), max_bytes=budget)
    assert program.peak_bytes <= budget
    assert program.in_types[:-1] == program.out_types  # a step takes what the one before gave

    comm, generator = SimulatedComm(MESH), torch.Generator().manual_seed(0)
    full = [torch.rand(t.shape, generator=generator).double() for t in program.in_types]
    spread = [distribute(x, t.layout, comm).local for x, t in zip(full, program.in_types)]
    for _ in range(2):
        spread[:-1] = run(program, spread, comm)
        full[:-1] = flatten(step(full[:2], full[2:4], full[4:6], full[6]))[0]
    for value, type, expected in zip(spread, program.in_types, full):
        torch.testing.assert_close(from_local(value, type, comm).full(), expected)


def test_what_a_budget_has_room_for_stays_whole():
    """Where messages are slow parameters are whole; the large one is cut first."""
    slow = attrs.evolve(NCCL, latency=1e-3)
    types = [free(64, 1024), free(1024, 64), free(64, 64)]
    x = TensorType((8, 64), torch.float32, MESH.layout())

    def f(weights, x):
        return [w * 2 for w in weights], loss(weights, x)

    def of(max_bytes=None):
        program = trace(f, types, x, cost=slow, max_bytes=max_bytes)
        return program.peak_bytes, [t.local_nbytes(0) < t.nbytes for t in program.in_types[:3]]

    peak, cut = of()
    assert cut == [False] * 3
    assert of(peak) == (peak, cut)
    less, cut = of(peak // 2)
    assert less <= peak // 2
    assert cut == [True, True, False]


def test_a_budget_that_nothing_fits_is_told_with_the_least_that_does():
    with pytest.raises(TraceError, match=r"the least that is known to do is \d+"):
        trace(torch.func.grad(loss), params(), batch(), max_bytes=1000)


def test_results_like_an_argument_have_the_layout_that_is_chosen_for_it():
    def f(a, b, x):
        return {"b": {"w": b["w"] + 1}, "a": {"w": a["w"] * 2}}, x @ a["w"]

    a, b = {"w": free(64, 64)}, {"w": free(64, 64)}
    x = TensorType((64, 64), torch.float32, MESH.layout(None, "dp"))
    program = trace(f, a, b, x, out_layouts=({"a": like("a"), "b": like("b")}, like(None)))
    layouts = {"a": program.layouts_of("a"), "b": program.layouts_of(1)}
    out = [type.layout for type in program.out_types]
    assert out[:2] == [layouts["a"]["w"], layouts["b"]["w"]]


def test_results_that_look_like_several_arguments_have_the_layout_of_the_one_in_their_place():
    rows, columns = MESH.layout("dp"), MESH.layout(None, "dp")
    p, m = ({"w": TensorType((8, 8), torch.float32, layout)} for layout in (rows, columns))
    program = trace(lambda p, m: (p, {"w": m["w"] + 1}, p["w"].sum()), p, m)
    assert [type.layout for type in program.out_types[:2]] == [rows, columns]
    program = trace(lambda p, m: ({"w": m["w"] + p["w"]}, m["w"].sum()), p, m)
    assert program.out_types[0].layout == rows


def test_the_order_in_which_axes_are_written_does_not_matter():
    def chosen(mesh):
        x = TensorType((256, 64), torch.float32, mesh.layout("a"))
        program = trace(step, params(), params(), params(), x)
        return [str(t) for t in program.in_types], program.seconds

    (types, taken), (others, also) = chosen(Mesh(a=2, b=4)), chosen(Mesh(b=4, a=2))
    assert taken == pytest.approx(also)
    assert [t.count("@") for t in types] == [t.count("@") for t in others]


def test_a_program_at_other_sizes_has_the_layouts_of_the_one_it_repeats():
    large = [free(6400, 2560), free(2560, 6400)]
    x = TensorType((25600, 6400), torch.float32, MESH.layout("dp"))
    program = trace(step, large, large, large, x)
    small = trace(step, params(), params(), params(), batch(), like=program)
    assert [t.layout for t in small.in_types] == [t.layout for t in program.in_types]
    scaled = trace(
        *(step, params(), params(), params(), batch()),
        as_if=lambda shape: tuple(100 * n if n != 256 else 2560 for n in shape),
    )
    assert all(isinstance(t, TensorType) for t in scaled.in_types)


def test_a_free_argument_that_nothing_reads_is_cut():
    program = trace(lambda x, y: x + 1, free(8, 2), free(3, 16), mesh=MESH)
    assert program.in_types[1].layout == MESH.layout(None, "dp")


def test_axes_of_inputs_have_the_order_in_which_they_are_read():
    """State is cut as the update of parameters that one axis cuts, further by the other."""
    mesh = Mesh(dp=2, tp=4)
    w = TensorType((256, 256), torch.float32, mesh.layout("tp"))
    x = TensorType((65536, 256), torch.float32, mesh.layout("dp"))
    program = trace(step, [w], [free(256, 256)], [free(256, 256)], x)
    assert not [s for s in program.steps if "exchange" in str(s.collective)]


def test_types_keep_their_writing():
    type = free(8, 16)
    assert eval(repr(type), {"TensorType": TensorType, "torch": torch}) is type
    assert str(type) == "f32[8,16]{free}"
    assert (type.shape, type.ndim, type.numel, type.nbytes) == ((8, 16), 2, 128, 512)


def test_a_type_without_a_layout_is_refused_where_one_is_needed():
    type, comm = free(8, 16), SimulatedComm(MESH)
    whole = TensorType((8, 16), torch.float32, MESH.layout())
    for use in (
        lambda: type.layout,
        lambda: type.local_shape(0),
        lambda: plan(type, MESH.layout()),
        lambda: plan(whole, type),
        lambda: from_local(torch.ones(8, 16), type, comm),
    ):
        with pytest.raises(LayoutError) as error:
            use()
        assert str(error.value) == UNCHOSEN
    with pytest.raises(AttributeError, match="'FreeType' object has no attribute 'colour'"):
        type.colour  # noqa: B018
    for shape, dtype in (((-1,), torch.float32), ((2,), "f32"), ((2**62,), torch.float64)):
        with pytest.raises(LayoutError):
            TensorType(shape, dtype, "free")
    with pytest.raises(LayoutError, match="'any' is not a Layout"):
        TensorType((8,), torch.float32, "any")


def test_a_mesh_is_needed_where_all_layouts_are_free():
    with pytest.raises(TraceError) as error:
        trace(torch.matmul, free(8, 16), free(16, 8))
    assert str(error.value) == NO_MESH
    program = trace(torch.matmul, free(8, 16), free(16, 8), mesh=MESH)
    assert program.mesh is MESH
    with pytest.raises(TraceError, match="the arguments are on 2 meshes"):
        trace(torch.neg, TensorType((8,), torch.float32, MESH.layout()), mesh=Mesh(x=2))


def test_layouts_of_an_argument_that_was_not_given_are_refused():
    program = trace(torch.neg, free(8, 16), mesh=MESH)
    with pytest.raises(TraceError) as error:
        program.layouts_of(1)
    assert str(error.value) == NO_ARGUMENT
    with pytest.raises(TraceError, match="does not have the structure of its arguments"):
        type(program).from_json(program.to_json()).layouts_of(0)


def test_spmd_traces_free_types_beside_tensors():
    x = distribute(torch.ones(8, 16), MESH.layout("dp"), SimulatedComm(MESH))
    program = spmd(lambda w, x: x @ constrain(w, MESH.layout(None, "dp"))).trace(free(16, 8), x)
    assert program.layouts_of("w") == MESH.layout(None, "dp")


UNCHOSEN = """\
the layout of f32[8,16]{free} is not chosen yet: the program that trace makes has it.

program.layouts_of(0) has those of argument 0; inside of a function constrain(x, layout) and \
x.redistribute(layout) pin one."""

NO_MESH = """\
the layouts of all arguments are free, and no mesh is given to choose them on.

  arguments: f32[8,16]{free}, f32[16,8]{free}

Write trace(f, ..., mesh=mesh), or give one argument a layout."""

NO_ARGUMENT = """\
layouts_of asks for argument 1, which was not given.

  positions: 0 to 0
  names:     none

Give the position or the name of an argument."""
