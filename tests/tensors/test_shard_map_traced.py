"""`shard_map` inside of a traced function: lines of its program, which do what it does alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import func
from fdtensor.layouts.errors import CommError, LayoutError, TraceError, ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.programs.program import Program
from fdtensor.programs.tracer import trace
from fdtensor.random import key as random_key
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.shard_map.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    ppermute,
    psum,
    reduce_scatter,
)
from fdtensor.tensors.shard_map.mapped import shard_map
from fdtensor.tensors.spmd import spmd

few = settings(max_examples=settings.default.max_examples // 2)
fewer = settings(max_examples=settings.default.max_examples // 8)

MESH = Mesh(dp=2, tp=2)
COMM = SimulatedComm(MESH)
AXES = ("dp", "tp", ("dp", "tp"), ("tp", "dp"))
EVEN = [
    MESH.layout(*dims)
    for dims in [
        *((), ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"), (("dp", "tp"),), (("tp", "dp"),)),
        *((None, "dp"), (None, ("tp", "dp")), ("tp", None)),
    ]
]
PENDING = [
    MESH.layout("dp", partial={"tp": "sum"}),
    MESH.layout(partial={"dp": "sum", "tp": "sum"}),
]


def ring(axis):
    n = axis_size(axis)
    return [(i, (i + 1) % n) for i in range(n)]


def wide(a, axis, dim):
    return torch.cat([a] * axis_size(axis), dim)


STEPS = {
    "psum": lambda a, b, x, d: psum(a * b, x),
    "gather": lambda a, b, x, d: a + all_gather(a, x, d).narrow(d, 0, a.shape[d]),
    "scatter": lambda a, b, x, d: reduce_scatter(wide(a, x, d), x, d),
    "turn": lambda a, b, x, d: (
        all_to_all(wide(a, x, d), x, d, 1 - d).unflatten(1 - d, (axis_size(x), -1)).sum(1 - d)
    ),
    "shuffle": lambda a, b, x, d: a - all_to_all(wide(a, x, d), x, d, d).narrow(d, 0, a.shape[d]),
    "ring": lambda a, b, x, d: ppermute(a, x, ring(x)) * 2 - b,
    "send": lambda a, b, x, d: ppermute(a, x, [(0, axis_size(x) - 1)]) + b,
    "index": lambda a, b, x, d: a * (axis_index(x) + 1),
    "constant": lambda a, b, x, d: a + psum(torch.ones((), dtype=a.dtype), x),
    "local": lambda a, b, x, d: a * a + b,
    "choose": lambda a, b, x, d: torch.where(a > 0, a, b) + pmean(b * 4, x),
    "greatest": lambda a, b, x, d: pmax(a, x) - b,
}

bodies = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(AXES), st.integers(0, 1)),
    min_size=1,
    max_size=4,
)
layouts = st.sampled_from(EVEN)


def function(steps):
    def f(a, b):
        for name, axis, dim in steps:
            a = STEPS[name](a, b, axis, dim)
        return a, psum((a * b).sum(), ("dp", "tp"))

    return f


def tensors(first, second):
    a = (torch.arange(64.0, dtype=torch.float64).reshape(8, 8) % 5) - 2
    b = (torch.arange(64.0, dtype=torch.float64).reshape(8, 8) % 3) - 1
    return distribute(a, first, COMM), distribute(b, second, COMM)


@few
@given(bodies, layouts, layouts, layouts, st.sampled_from([*EVEN[3:7], *PENDING]))
def test_inside_it_gives_what_it_gives_alone(steps, first, second, taken, given):
    args = tensors(first, second)
    alone = shard_map(function(steps), MESH, taken, (given, MESH.layout()))
    for ours, wanted in zip(spmd(lambda a, b: alone(a, b))(*args), alone(*args), strict=True):
        assert torch.equal(ours.full(), wanted.full())


@fewer
@given(bodies, layouts, layouts, st.sampled_from(EVEN[3:7]))
def test_derivatives_inside_are_those_of_alone(steps, first, taken, given):
    alone = shard_map(function(steps), MESH, taken, (given, MESH.layout()))

    def loss(f, a, b):
        y, total = f(a, b)
        return call(torch.sum, y * 3) + total

    grads = []
    for f in (alone, spmd(lambda a, b: alone(a, b))):
        a, b = (x.detach().requires_grad_() for x in tensors(first, first))
        loss(f, a, b).backward()
        grads.append((a.grad, b.grad))
    grads.append(func.grad(lambda a, b: loss(alone, a, b), (0, 1))(*tensors(first, first)))
    for wanted, *others in zip(*grads, strict=True):
        for grad in others:
            full = torch.zeros(8, 8, dtype=torch.float64) if wanted is None else wanted.full()
            torch.testing.assert_close(grad.full(), full)


@fewer
@given(bodies, layouts)
def test_programs_are_verified_written_and_read(steps, taken):
    alone = shard_map(function(steps), MESH, taken, (MESH.layout("dp", "tp"), MESH.layout()))
    program = trace(lambda a, b: alone(a, b), *tensors(taken, taken))
    program.verify()
    assert Program.from_json(program.to_json()).digest == program.digest


def received(body, taken, given):
    """The bytes of the program with this body alone."""
    x = TensorType((64, 64), torch.float32, taken)
    program = trace(lambda x: shard_map(body, MESH, taken, given)(x), x, out_layouts=given)
    return program.received_bytes


@pytest.mark.parametrize(
    ("body", "taken", "given", "nbytes"),
    [
        (lambda a: psum(a, "tp"), ("dp", "tp"), ("dp",), 32 * 32 * 4),
        (lambda a: all_gather(a, "tp", 1), ("dp", "tp"), ("dp",), 32 * 32 * 4),
        (lambda a: reduce_scatter(a, "tp", 0), ("dp",), (("dp", "tp"),), 16 * 64 * 4),
        (lambda a: all_to_all(a, "tp", 1, 0), (("dp", "tp"),), ("dp", "tp"), 16 * 32 * 4),
        (lambda a: ppermute(a, "tp", ring("tp")), ("dp", "tp"), ("dp", "tp"), 32 * 32 * 4),
        (lambda a: a + axis_index("dp"), ("dp", "tp"), ("dp", "tp"), 0),
    ],
)
def test_a_collective_inside_receives_what_it_has_to(body, taken, given, nbytes):
    assert received(body, MESH.layout(*taken), MESH.layout(*given)) == nbytes


LINE = Mesh(x=4)
ON_LINE = SimulatedComm(LINE)
ROWS = LINE.layout("x")


def ring_attention(q, k, v):
    """Causal attention over a sequence that an axis cuts: keys and values go around."""
    n, block = axis_size("x"), q.shape[-2]
    here, places = axis_index("x"), torch.arange(block)
    rows = here * block + places
    most = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    total, out = torch.zeros_like(most), torch.zeros_like(q)
    for step in range(n):
        columns = (here - step) % n * block + places
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = torch.where(rows[:, None] >= columns, scores, -math.inf)
        new = torch.maximum(most, scores.amax(-1))
        weights, scale = torch.exp(scores - new[..., None]), torch.exp(most - new)
        total = total * scale + weights.sum(-1)
        out, most = out * scale[..., None] + weights @ v, new
        if step < n - 1:
            k, v = ppermute(k, "x", ring("x")), ppermute(v, "x", ring("x"))
    return out / total[..., None]


def sequences():
    x = torch.arange(2 * 2 * 16 * 4.0, dtype=torch.float64).reshape(2, 2, 16, 4)
    return [(x * i).sin() for i in (1, 2, 3)]


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_ring_attention_is_one_layer_of_an_automatic_model():
    cut = LINE.layout(None, None, "x")
    ours = shard_map(ring_attention, LINE, cut, cut)
    args = [distribute(t, cut, ON_LINE) for t in sequences()]

    def model(attend):
        return lambda q, k, v: torch.relu(q + attend(q * 2, k, v)).square().sum()

    program = trace(model(ours), *args, out_layouts=LINE.layout(partial={"x": "sum"}))
    block = args[0].type.nbytes // 4
    assert program.received_bytes == 2 * 3 * block
    grad = func.grad(model(ours), (0, 1, 2))
    wanted = torch.func.grad(model(attention), (0, 1, 2))(*sequences())
    for x, y in zip(grad(*args), wanted, strict=True):
        torch.testing.assert_close(x.full(), y)
    # keys and values once more around, as their cotangents: nothing is sent again
    assert grad.trace(*args).received_bytes == 4 * 3 * block


def test_transforms_go_inside_and_around():
    rows = LINE.layout("x")
    x = distribute(torch.arange(16.0).reshape(8, 2), rows, ON_LINE)
    inner = shard_map(torch.func.grad(lambda a: (psum(a, "x") * a).sum()), LINE, rows, rows)
    assert torch.equal(spmd(lambda x: inner(x))(x).full(), inner(x).full())
    each = shard_map(torch.func.vmap(lambda a: psum(a, "x") * a), LINE, rows, rows)
    assert torch.equal(spmd(lambda x: each(x))(x).full(), each(x).full())
    three = distribute(torch.arange(48.0).reshape(3, 8, 2), LINE.layout(None, "x"), ON_LINE)
    many = func.vmap(lambda x: each(x))(three)
    for i in range(3):
        one = distribute(three.full()[i], rows, ON_LINE)
        assert torch.equal(many.full()[i], each(one).full())
    cubes = shard_map(lambda a: psum((a * a * a).sum(), "x"), LINE, rows, LINE.layout())
    second = func.hessian(lambda x: cubes(x))(x).full().reshape(16, 16)
    assert torch.equal(second, torch.diag(6 * x.full().flatten()))
    _, tangent = func.jvp(lambda x: each(x), (x,), (x,))
    assert torch.equal(tangent.full(), 2 * each(x).full())


def attended(q, k, v, mask):
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("mask", [None, (6, 6), (2, 1, 6, 6)])
def test_attention_of_each_rank_is_one_of_all(heads, mask):
    three = Mesh(dp=2, fs=2, tp=2)
    batch = three.layout(("dp", "fs"), "tp")
    shapes = (8, 4 * 2, 6, 4), (8, heads * 2, 6, 4)
    q, k, v = (torch.rand(s, dtype=torch.float64) for s in (shapes[0], shapes[1], shapes[1]))
    masks = () if mask is None else (torch.rand(mask, dtype=torch.float64),)

    def inside(q, k, v, *masks):
        return shard_map(
            lambda q, k, v, *m: attended(q, k, v, *(m or (None,))).cos(),
            three,
            (batch, batch, batch, *[three.layout()] * len(masks)),
            batch,
        )(q, k, v, *masks)

    def plain(q, k, v, *masks):
        own = [m.repeat(4, 1, 1, 1) if m.dim() == 4 else m for m in masks]
        return attended(q, k, v, *(own or (None,))).cos()

    comm = SimulatedComm(three)
    given = [distribute(t, batch, comm) for t in (q, k, v)]
    masks_given = [distribute(m, three.layout(), comm) for m in masks]
    assert not trace(inside, *given, *masks_given).collectives
    torch.testing.assert_close(spmd(inside)(*given, *masks_given).full(), plain(q, k, v, *masks))
    loss = func.grad(lambda *a: inside(*a).sum(), (0, 1, 2))
    wanted = torch.func.grad(lambda *a: plain(*a).sum(), (0, 1, 2))(q, k, v, *masks)
    for a, b in zip(spmd(loss)(*given, *masks_given), wanted, strict=True):
        torch.testing.assert_close(a.full(), b)


def test_what_all_ranks_have_whole_is_one_tensor_unless_they_write_to_it():
    whole, rows = MESH.layout(), MESH.layout(("dp", "tp"))
    w, x = (distribute(torch.arange(64.0).reshape(8, 8) % n, rows, COMM) for n in (3, 5))

    def product(w, x):
        return x @ w

    def written(w, x):
        w[:2] += x
        return w.sum() + x

    for f, kept in ((product, False), (written, True)):
        inside = shard_map(f, MESH, (whole, rows), rows)
        alone = inside(w, x).full()
        assert torch.equal(spmd(lambda w, x, g=inside: g(w, x))(w, x).full(), alone)
        assert ("expand" in str(trace(inside, w, x))) == kept
    assert torch.equal(w.full(), torch.arange(64.0).reshape(8, 8) % 3)


def test_random_numbers_differ_from_rank_to_rank():
    rows = LINE.layout("x")
    x = distribute(torch.zeros(8, 2), rows, ON_LINE)
    noisy = spmd(lambda x: shard_map(lambda a: a + torch.rand_like(a), LINE, rows, rows)(x))
    drawn = noisy(x, key=random_key(0)).full()
    assert drawn.unique().numel() == 16
    assert torch.equal(drawn, noisy(x, key=random_key(0)).full())


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def mistaken(f, out=ROWS, taken=ROWS, rows=8):
    x = distribute(torch.arange(2.0 * rows).reshape(rows, 2), LINE.layout(), ON_LINE)
    return spmd(lambda x: shard_map(f, LINE, taken, out)(x))(x)


def test_mistakes_are_told():
    with pytest.raises(TraceError, match=r"asks for the value of a tensor.*\n(.*\n)*.*axis_index"):
        mistaken(lambda a: a if axis_index("x") == 0 else -a)
    with pytest.raises(LayoutError, match=r"dim 0 of 6 in 4 blocks.*\n(.*\n)*.*pad the dim"):
        mistaken(lambda a: a, rows=6)
    with pytest.raises(LayoutError, match=r"args.0. of shard_map has no layout yet"):
        mistaken(lambda a: a, taken=None)
    with pytest.raises(LayoutError, match="said to be replicated over 'x', but ranks 0 and 1"):
        mistaken(lambda a: a, out=LINE.layout())
    with pytest.raises(CommError, match="psum is called outside of shard_map"):
        spmd(lambda x: psum(x, "x"))(distribute(torch.ones(4), LINE.layout(), ON_LINE))
    with pytest.raises(ValueTreeError, match="result is 3, which is not a tensor"):
        mistaken(lambda a: 3)
    with pytest.raises(TraceError, match=r"tests::twice in shard_map has no batching rule"):
        mistaken(twice)
    w = distribute(torch.ones(2, 2), LINE.layout(), ON_LINE)
    with pytest.raises(TraceError, match="that it closes over"):
        mistaken(lambda a: a * w)
