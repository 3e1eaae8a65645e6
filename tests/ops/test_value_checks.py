"""Tests of ops/value_checks.py: what torch refuses for its values, every layout refuses."""

import re
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import (
    FallbackWarning,
    IndexRangeError,
    OperandError,
    Shard,
    SimulatedComm,
    TraceError,
    call,
    connect,
    distribute,
    spmd,
    trace,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.random import key
from fdtensor.testing.pool import GlooPool
from fdtensor.testing.strategies import layouts, meshes
from fdtensor.testing.values import block

MESH = Mesh(dp=2)

few = settings(max_examples=max(4, settings.default.max_examples // 12))


def x(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def ints(*values):
    return torch.tensor(values)


def put_rows(x, i, v):
    x = x.clone()
    x[i] = v
    return x


def in_chunks(x, matrix, target):
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    return F.linear_cross_entropy(x, matrix, target, options=options)


def put_masked(x, mask, v):
    x = x.clone()
    x[mask] = v
    return x


BAD = {
    "x[i]": (lambda x, i: x[i], x(5, 3), ints(0, 5, 2)),
    "x[-i]": (lambda x, i: x[i], x(5, 3), ints(0, -6, 2)),
    "x[:, i]": (lambda x, i: x[:, i], x(5, 3), ints(1, 3)),
    "x[i, j]": (lambda x, i, j: x[i, j], x(5, 3), ints(1, 2), ints(0, 3)),
    "x[i] = v": (put_rows, x(5, 3), ints(1, 7), x(2, 3)),
    "x[mask] = v": (put_masked, x(4), ints(1, 0, 1, 1) > 0, x(2)),
    "flat": (lambda x, i: x.flatten()[i], x(5, 3), ints(15, 0)),
    "index_select": (lambda x, i: x.index_select(0, i), x(5, 3), ints(1, 5)),
    "index_select, negative": (lambda x, i: x.index_select(0, i), x(5, 3), ints(1, -1)),
    "index_add": (lambda x, i, v: x.index_add(0, i, v), x(5, 3), ints(1, 5), x(2, 3)),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), x(5, 3), ints(1, 5), x(2, 3)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), x(5, 3), ints(1, 9)),
    "index_reduce": (
        lambda x, i, v: x.index_reduce(0, i, v, "amax"),
        *(x(5, 3), ints(1, 5), x(2, 3)),
    ),
    "gather": (lambda x, i: x.gather(0, i), x(5, 3), ints([0, 5, 1])),
    "gather, negative": (lambda x, i: x.gather(0, i), x(5, 3), ints([0, -1, 1])),
    "scatter": (lambda x, i, v: x.scatter(0, i, v), x(5, 3), ints([0, 5, 1]), x(1, 3)),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 2.0), x(5, 3), ints([0], [3])),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), x(5, 3), ints([0, 5, 1]), x(1, 3)),
    "scatter_reduce": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "sum"),
        *(x(5, 3), ints([0, 6, 1]), x(1, 3)),
    ),
    "take": (torch.take, x(5, 3), ints(0, 15)),
    "put": (lambda x, i, v: x.put(i, v), x(5, 3), ints(0, 15), x(2)),
    "one_hot": (lambda x, i: F.one_hot(i, 5) + x, x(1), ints(0, 7)),
    "one_hot, negative": (lambda x, i: F.one_hot(i, 5) + x, x(1), ints(0, -1)),
    "embedding": (lambda x, i: F.embedding(i, x), x(5, 3), ints([0, 5], [1, 2])),
    "embedding_bag": (
        lambda x, i: F.embedding_bag(i, x, mode="sum"),
        x(5, 3),
        ints([0, 5], [1, 2]),
    ),
    "nll_loss": (F.nll_loss, x(4, 5), ints(0, 5, 1, 2)),
    "nll_loss of planes": (F.nll_loss, x(2, 5, 3), ints([0, 5, 1], [2, 0, 0])),
    "cross_entropy": (F.cross_entropy, x(4, 5), ints(0, -3, 1, 2)),
    "multi_margin_loss": (F.multi_margin_loss, x(4, 5), ints(0, 5, 1, 2)),
    "masked_scatter": (lambda x, m, v: x.masked_scatter(m, v), x(4), ints(1, 1, 0, 1) > 0, x(2)),
    "binary_cross_entropy": (F.binary_cross_entropy, x(4), x(4) / 4),
    "inverse": (torch.linalg.inv, x(3, 2, 2) * 0),
    "cholesky": (torch.linalg.cholesky, -torch.eye(2).expand(3, 2, 2)),
    "solve": (torch.linalg.solve, x(3, 2, 2) * 0, x(3, 2, 1)),
    "gaussian_nll_loss": (F.gaussian_nll_loss, x(4), x(4), x(4) - 1),
    "assertion": (lambda x: (torch._assert_async((x < 3).all()), x + 1)[1], x(4)),
}
"""Calls that torch refuses for the values of an operand."""

if hasattr(F, "linear_cross_entropy"):  # it came with torch 2.13
    BAD["linear_cross_entropy"] = (in_chunks, x(4, 3), x(5, 3), ints(0, 5, 1, 2))

KINDS = (IndexError, RuntimeError, ValueError)


def settings_of(name):
    return places_of(BAD[name][1:])


def places_of(tensors):
    @st.composite
    def drawn(draw):
        mesh = draw(meshes(max_axes=2, max_ranks=4).filter(lambda m: m.ndim))
        return [draw(layouts(mesh, tuple(t.shape), partial=())) for t in tensors]

    return drawn()


def spread(tensors, placed, comm):
    return [distribute(t, layout, comm) for t, layout in zip(tensors, placed)]


@pytest.mark.few(10)
@pytest.mark.parametrize("name", BAD)
def test_what_torch_refuses_every_layout_refuses(name):
    f, *tensors = BAD[name]
    with pytest.raises(KINDS) as plain:
        f(*tensors)

    @few
    @given(settings_of(name))
    def law(placed):
        args = spread(tensors, placed, SimulatedComm(placed[0].mesh))
        for run in (spmd(f), lambda *args: call(f, *args)):
            with pytest.raises(type(plain.value)):
                run(*args)

    law()


GOOD = {
    "x[i]": (lambda x, i: x[i], x(5, 3), ints(0, -5, 4)),
    "x[mask] = v": (put_masked, x(4), ints(1, 0, 1, 1) > 0, x(3)),
    "gather": (lambda x, i: x.gather(0, i), x(5, 3), ints([0, 4, 1])),
    "take": (torch.take, x(5, 3), ints(-15, 14)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 9.0), x(6, 3), ints(-1, 2, -6)),
    "index_fill_": (lambda x, i: x.clone().index_fill_(1, i, 9.0), x(3, 5), ints(0, -2)),
    "embedding": (lambda x, i: F.embedding(i, x), x(5, 3), ints([0, 4], [1, 2])),
    "nll_loss, ignored": (F.nll_loss, x(4, 5), ints(0, -100, 4, 2)),
    "one_hot": (lambda x, i: F.one_hot(i, 5) + x, x(1), ints(0, 4)),
    "empty": (lambda x, i: x[i], x(5, 3), torch.zeros(0, dtype=torch.int64)),
    "binary_cross_entropy": (F.binary_cross_entropy, x(4) / 3, x(4) / 4),
    "inverse": (torch.linalg.inv, torch.eye(2).expand(3, 2, 2).clone()),
}
if hasattr(F, "linear_cross_entropy"):
    GOOD["linear_cross_entropy"] = (in_chunks, x(4, 3) / 12, x(5, 3), ints(0, -100, 1, 4))


@pytest.mark.parametrize("name", GOOD)
def test_what_is_in_range_is_computed(name):
    f, *tensors = GOOD[name]
    expected = f(*tensors)

    @few
    @given(settings_of_good(name))
    def law(placed):
        result = spmd(f)(*spread(tensors, placed, SimulatedComm(placed[0].mesh)))
        for rank, local in zip(result.mesh.ranks, result.local, strict=True):
            torch.testing.assert_close(local, block(expected, result.type, rank))

    law()


def settings_of_good(name):
    return places_of(GOOD[name][1:])


# --- random ops --------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


def written(p):
    return torch.empty_like(p).bernoulli_(p)


def some(p):
    return torch.multinomial(p, 2)


def many(p):
    return torch.multinomial(p, 5, replacement=True)


UNFIT = {
    "bernoulli": (torch.bernoulli, [0, 2, 0.5, 1]),
    "bernoulli, negative": (torch.bernoulli, [[0, -0.5], [1, 1]]),
    "bernoulli, nan": (torch.bernoulli, [0, NAN, 0.5, 1]),
    "bernoulli_": (written, [[0.5, 1, 1], [0, 0, 1.5]]),
    "normal": (lambda std: torch.normal(0.0, std), [1, -2, 0.5, 1]),
    "normal of two": (lambda std: torch.normal(std, std), [1, 0, NAN, 1]),
    "multinomial": (some, [1, -2, 0.5, 1]),
    "multinomial, nan": (some, [[1, 1, 2, 3], [1, 2, NAN, 3]]),
    "multinomial, inf": (some, [[1, INF, 2, 3], [1, 2, 0, 3]]),
    "multinomial, zeros": (some, [[1, 2, 2, 3], [0, 0, 0, 0]]),
    "multinomial again, negative": (many, [1, -2, 0.5, 1]),
    "multinomial again, zeros": (many, [0, 0, 0, 0]),
}
"""Random ops of one operand, whose values torch refuses."""

FIT = {
    "bernoulli": (torch.bernoulli, [0, -0.0, 0.5, 1]),
    "bernoulli_": (written, [[0.5, 1, 1], [0, 0, 1]]),
    "normal": (lambda std: torch.normal(0.0, std), [1, 0, 0.5, INF]),
    "multinomial": (some, [[1, 0, 1e-30, 3e38], [0, 0, 0, 1]]),
    "multinomial again": (many, [0, 0, 0, 1e-30]),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", UNFIT)
def test_what_torch_cannot_draw_by_every_layout_refuses(name):
    f, values = UNFIT[name]
    operand = torch.tensor(values, dtype=torch.float32)
    with pytest.raises(RuntimeError):
        f(operand)

    @few
    @given(places_of([operand]))
    def law(placed):
        args = spread([operand], placed, SimulatedComm(placed[0].mesh))
        for run in (spmd(f), partial(call, f)):
            with pytest.raises(OperandError):
                run(*args, key=key(0))
        assert (
            spmd(f, check_indices=False)(*args, key=key(0)).shape
            == f(torch.ones_like(operand)).shape
        )

    law()


@pytest.mark.parametrize("name", FIT)
def test_what_is_in_range_is_drawn(name):
    f, values = FIT[name]
    operand = torch.tensor(values, dtype=torch.float32)

    @few
    @given(places_of([operand]))
    def law(placed):
        args = spread([operand], placed, SimulatedComm(placed[0].mesh))
        assert spmd(f)(*args, key=key(0)).shape == f(operand).shape

    law()


NUMBERS = {
    "bernoulli": lambda x: torch.bernoulli(x, 1.5),
    "bernoulli_": lambda x: x.clone().bernoulli_(NAN),
    "uniform_": lambda x: x.clone().uniform_(2, 1),
    "normal": lambda x: torch.normal(x, -1.0),
    "normal of a size": lambda x: x + torch.normal(0.0, -1.0, (4,)),
    "randint": lambda x: x + torch.randint(5, 5, (4,)),
    "randint_like": lambda x: torch.randint_like(x, 0),
    "random_": lambda x: x.clone().random_(5, 5),
    "multinomial of none": lambda x: torch.multinomial(x, 0),
    "multinomial of too many": lambda x: torch.multinomial(x, 5),
    "normal of complex": lambda x: torch.normal(x + 0j, x + 0j),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_torch_cannot_draw_by_are_refused_in_its_words(name):
    f = NUMBERS[name]
    with pytest.raises(RuntimeError) as plain:
        f(x(4))
    held = distribute(x(4), MESH.layout("dp"), SimulatedComm(MESH))
    with pytest.raises(TraceError, match=re.escape(str(plain.value)[:20])):
        spmd(f)(held, key=key(0))


@pytest.mark.parametrize("f", [torch.bernoulli, some, NUMBERS["bernoulli"]])
def test_values_are_checked_on_replicas_too(f):
    held = distribute(x(4) - 1, MESH.layout("dp"), SimulatedComm(MESH))

    def reads(x):
        return f(x) if x.sum().item() == 2 else x

    run = spmd(reads, on_data_dependent="replicate")
    with pytest.warns(FallbackWarning), pytest.raises(RuntimeError):
        run(held, key=key(0))


@pytest.mark.parametrize("dims", [("dp",), (None, "dp"), ()])
@pytest.mark.parametrize("f", [some, many, torch.bernoulli])
def test_checks_of_what_is_drawn_by_travel_together(f, dims):
    by, other = typed((8, 64), torch.float32, *dims), typed((4096, 64), torch.float32, "dp")
    step = lambda p, y, key: (f(p), y.sum())  # noqa: E731
    checked, bare = (
        trace(step, by, other, key=key(0), check_indices=checks) for checks in (True, False)
    )
    assert len(checked.collectives) == len(bare.collectives)
    assert checked.received_bytes <= bare.received_bytes + 16


def test_numbers_that_are_known_are_not_looked_at():
    def drawn(x, key):
        halves = torch.bernoulli(torch.full((4,), 0.5)), torch.bernoulli(x, 0.5)
        return *halves, torch.normal(x, torch.ones_like(x)), torch.multinomial(torch.ones(4), 2)

    text = str(trace(drawn, typed((4,), torch.float32, "dp"), key=key(0)))
    assert "bounded" not in text
    with pytest.raises(OperandError):
        call(
            lambda x: x * torch.bernoulli(torch.full((4,), 2.0)),
            distribute(x(4), MESH.layout("dp"), SimulatedComm(MESH)),
            key=key(0),
        )


# --- how it is told and what it costs ----------------------------------------------------------


def loss(table, ids, targets):
    h = F.embedding(ids, table)
    return F.cross_entropy(h.flatten(0, 1) @ table.t(), targets.flatten())


def typed(shape, dtype, *dims):
    return TensorType(shape, dtype, MESH.layout(*dims))


def test_counts_of_faults_travel_with_other_sums():
    table = typed((256, 64), torch.float32)
    ids = typed((128, 64), torch.int64, "dp")
    step = torch.func.grad_and_value(loss)
    checked, bare = (trace(step, table, ids, ids, check_indices=c) for c in (True, False))
    assert len(checked.collectives) == len(bare.collectives)
    assert checked.received_bytes <= bare.received_bytes + 16
    assert "check" in str(checked)
    assert "check" not in str(bare)


def test_what_all_ranks_hold_is_looked_at_without_traffic():
    table, ids = typed((16, 8), torch.float32, "dp"), typed((6,), torch.int64)
    checked, bare = (
        trace(lambda t, i: t[i], table, ids, check_indices=c, out_layouts=MESH.layout())
        for c in (True, False)
    )
    assert checked.received_bytes == bare.received_bytes


def test_the_error_says_which_index_and_where():
    comm = SimulatedComm(MESH)
    table = distribute(x(5, 3), MESH.layout("dp"), comm)
    i = distribute(ints(0, 7, 2, 1), MESH.layout("dp"), comm)
    with pytest.raises(IndexRangeError) as raised:
        call(lambda t, i: t.index_select(0, i), table, i)
    error = raised.value
    assert str(error).replace(error.facts["line"], "<line>") == REFUSED
    assert error.facts["line"].startswith("test_value_checks.py:")


REFUSED = """\
1 entry where it must not be: index of index_select, 0 to 4.

  line:        <line>
  one of them: 7

All ranks raise this and return nothing. check_indices=False looks at no values."""


def test_a_matrix_without_an_inverse_is_told():
    m = distribute(torch.zeros(4, 2, 2), MESH.layout("dp"), SimulatedComm(MESH))
    with pytest.raises(OperandError, match=r"matrix of linalg\.inv"):
        spmd(torch.linalg.inv)(m)


def test_without_checks_nothing_is_looked_at():
    comm = SimulatedComm(MESH)
    args = distribute(x(4, 3), MESH.layout("dp"), comm), distribute(ints(0, 9), MESH.layout(), comm)
    assert spmd(lambda t, i: t[i], check_indices=False)(*args).shape == (2, 3)
    assert call(torch.index_select, args[0], 0, args[1], check_indices=False).shape == (2, 3)


def test_an_index_is_looked_at_once_for_forward_and_backward():
    ids = typed((4, 6), torch.int64, "dp")
    step = torch.func.grad(loss)
    text = str(trace(step, typed((16, 8), torch.float32), ids, ids))
    assert text.count("bounded") == 2, "one look at ids, one at targets"


def test_a_gradient_outside_of_a_traced_function_is_refused_at_the_call():
    comm = SimulatedComm(MESH)
    table = distribute(x(5, 3), MESH.layout("dp"), comm).requires_grad_()
    good, bad = (distribute(i, MESH.layout("dp"), comm) for i in (ints(0, 1), ints(0, 5)))
    f = spmd(lambda t, i: F.embedding(i, t).sum())
    f(table, good).full().backward()
    with pytest.raises(IndexRangeError):
        f(table, bad)


def test_an_exported_module_asserts():
    program = trace(lambda t, i: t[i], typed((5, 3), torch.float32), typed((2,), torch.int64))
    module = program.to_fx(0)
    assert module(x(5, 3), ints(0, 4))[0].shape == (2, 3)
    with pytest.raises(RuntimeError, match="index of index, -5 to 4"):
        module(x(5, 3), ints(0, 5))


# --- real ranks --------------------------------------------------------------------------------

FOUR = Mesh(a=4)


def refused_on_a_rank(names):
    """How each call with one bad entry, on one rank, ends here, and the slowest's seconds."""
    comm, kinds, slowest = connect(FOUR), [], 0.0
    for name in names:
        f, *tensors = BAD[name]
        args = [distribute(t, FOUR.layout("a" if t.ndim else None), comm) for t in tensors]
        run = spmd(f)
        start = time.monotonic()
        try:
            run(*args)
            kinds.append(None)
        except KINDS as error:
            kinds.append(type(error).__name__)
        slowest = max(slowest, time.monotonic() - start)
    x = distribute(torch.arange(8.0), FOUR.layout("a"), comm)
    return kinds, call(torch.sum, x).full().item()


@pytest.mark.mesh
def test_all_ranks_raise_and_go_on(pool4: GlooPool):
    names = ["x[i]", "gather", "embedding", "cross_entropy", "index_add", "take", "inverse"]
    answers = pool4.run(refused_on_a_rank, names)
    assert len({str(answer) for answer in answers}) == 1
    kinds, total = answers[0]
    assert None not in kinds
    assert total == 28


def test_a_backward_has_checks_of_its_own():
    """A solve by cotangents is checked where they are there."""
    a = torch.eye(3, dtype=torch.float64) * 2
    for layout in (MESH.layout(), MESH.layout("dp")):
        x = distribute(a, layout, SimulatedComm(MESH)).requires_grad_()
        whole = call(lambda m: torch.linalg.solve(m @ m.mT, m), x).full()
        whole.sum().backward()
        due = a.clone().requires_grad_()
        torch.linalg.solve(due @ due.mT, due).sum().backward()
        grads = [t.grad for t in x.local]
        gradient = torch.cat(grads) if layout.placements[0] == Shard(0) else grads[0]
        assert torch.allclose(gradient, due.grad)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_counts_of_narrow_integers_are_taken(dtype):
    indices = torch.arange(12).to(dtype) % 5
    counted = spmd(lambda i: torch.bincount(i, minlength=5))
    given = distribute(indices, MESH.layout("dp"), SimulatedComm(MESH))
    assert torch.equal(counted(given).full(), torch.bincount(indices, minlength=5))


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16, torch.int64])
def test_counts_of_a_known_number_are_taken_where_values_are(weights):
    indices = torch.arange(24) ** 2 % 7
    w = () if weights is None else (torch.arange(24).to(weights),)

    def counted(i, *w):
        return torch.bincount(i, *w, minlength=9), i.bincount(*w, minlength=7)

    comm = SimulatedComm(MESH)
    held = [distribute(t, MESH.layout("dp"), comm) for t in (indices, *w)]
    for got, due in zip(spmd(counted)(*held), counted(indices, *w), strict=True):
        assert got.dtype == due.dtype
        assert torch.equal(got.full(), due)
    for wrong in (indices + 6, indices - 1):
        with pytest.raises(IndexRangeError):
            spmd(lambda i: i.bincount(minlength=7))(distribute(wrong, MESH.layout("dp"), comm))
