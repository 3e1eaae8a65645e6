"""Rows that are found by running an op on blocks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import Partial, RuleError, Shard, discover, verify
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import _RULES, rule_of
from fdtensor.ops.notation.formula import formula
from fdtensor.ops.rules import P, R, Row, S
from fdtensor.testing.discovery import child
from fdtensor.testing.row_checks import call_of, overload_of
from tests.operators.recall import by_dtensor, calls_of, chosen, fake_mesh, recalled

aten = torch.ops.aten
MAX, MIN, AVG = Partial("max"), Partial("min"), Partial("avg")


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def named(value: object) -> str:
    """The name of an op as a test has it."""
    known = isinstance(value, (torch._ops.OpOverload, torch.library.CustomOpDef))
    return str(value) if known else ""


def plain(rows) -> set:
    """The rows of R, S and pending sums, as pairs."""
    return {r for r in pairs(rows) if not {MAX, MIN, AVG} & {*r[0], *r[1]}}


def pairs(rows) -> set:
    """The rows as pairs."""
    return {(r.ins, r.outs) for r in rows}


def registered(text: str, **names) -> None:
    """Runs the text of a rule."""
    exec(compile(text, "rule", "exec"), {"__name__": "pasted", **names})


def typed(value):
    """An argument as a rule sees it."""
    if isinstance(value, torch.Tensor):
        return Full(tuple(value.shape), value.dtype)
    return tuple(map(typed, value)) if isinstance(value, list) else value


def rows_at(op, *args) -> set:
    """The rows that the rule of an op has for these arguments, as pairs."""
    rows = rule_of(op).rows(*map(typed, args))
    return {(tuple(ins), outs if isinstance(outs, tuple) else (outs,)) for ins, outs in rows}


@torch.library.custom_op("discovery::scaled", mutates_args=())
def scaled(x: torch.Tensor, y: torch.Tensor, by: float) -> torch.Tensor:
    """`out[i, j] = by * x[i, j] * sum_k y[j, k]`"""
    return by * x * y.sum(1)


@pytest.mark.parametrize(
    ("op", "args", "rows"),
    [
        (
            aten.mm.default,
            (floats(4, 6), floats(6, 5)),
            [
                ((S(0), R), S(0)),
                ((R, S(1)), S(1)),
                ((S(1), S(0)), P),
                ((P, R), P),
                ((R, P), P),
            ],
        ),
        (
            aten.add.Tensor,
            (floats(4, 6), floats(6)),
            [((S(0), R), S(0)), ((S(1), S(0)), S(1)), ((P, P), P)],
        ),
        (aten._softmax.default, (floats(4, 6, 5), 1, False), [((S(d),), S(d)) for d in (0, 2)]),
        (
            aten.cat.default,
            ([floats(4, 6), floats(3, 6)], 0),
            [((S(1), S(1)), S(1)), ((P, P), P)],
        ),
        (aten.view.default, (floats(4, 6, 5), [4, 30]), [((S(0),), S(0)), ((P,), P)]),
        (aten.expand.default, (floats(1, 6), [4, 6]), [((R,), S(0)), ((S(1),), S(1)), ((P,), P)]),
        (aten.amax.default, (floats(4, 6), [1]), [((S(0),), S(0))]),
        (
            aten.gather.default,
            (floats(4, 6), 1, torch.tensor([[0, 5, 2], [3, 1, 1], [2, 0, 4], [5, 5, 3]])),
            [((S(0), S(0)), S(0)), ((R, S(1)), S(1)), ((P, R), P)],
        ),
        (
            scaled,
            (floats(4, 6), floats(6, 5), 2.0),
            [
                ((S(0), R), S(0)),
                ((S(1), S(0)), S(1)),
                ((R, S(1)), P),
                ((P, R), P),
                ((R, P), P),
            ],
        ),
    ],
    ids=named,
)
def test_all_rows_of_an_op_are_found(op, args, rows):
    found = discover(op, args)
    assert plain(found.rows) == {(ins, (outs,)) for ins, outs in rows}


@pytest.mark.parametrize(
    ("op", "args", "row"),
    [
        (aten.amax.default, (floats(4, 6), [1]), ((S(1),), (MAX,))),
        (aten.neg.default, (floats(4, 6),), ((MAX,), (MIN,))),
        (aten.add.Tensor, (floats(4, 6), floats(4, 6)), ((MIN, R), (MIN,))),
        (aten.add.Scalar, (floats(4, 6), 1.0), ((AVG,), (AVG,))),
        (aten.any.dim, (floats(4, 6) > 0, 1), ((S(1),), (MAX,))),
        (aten.all.dim, (floats(4, 6) > 0, 1), ((S(1),), (MIN,))),
    ],
)
def test_rows_of_maxima_minima_and_averages_are_found(op, args, row):
    assert row in pairs(discover(op, args).rows)


def test_an_average_that_a_sum_implies_is_not_listed():
    rows = discover(aten.mm.default, (floats(4, 6), floats(6, 5))).rows
    assert not any(AVG in r.ins for r in rows)


def test_a_maximum_of_one_operand_is_implied_by_that_of_all():
    rows = discover(aten.maximum.default, (floats(4, 6), floats(4, 6, seed=1))).rows
    assert [r.ins for r in rows if MAX in r.ins] == [(MAX, MAX)]


def test_operands_that_are_not_read_are_placed_one_at_a_time():
    def f(x, shape, other):
        return x.exp()

    rows = plain(discover(f, (floats(4, 6), floats(4, 6), floats(4, 6))).rows)
    assert {((S(0), R, R), (S(0),)), ((S(0), P, R), (S(0),)), ((S(0), R, S(0)), (S(0),))} <= rows
    assert not any(R not in ins[1:] for ins, _ in rows)


def test_tensors_of_a_long_list_are_placed_alike():
    rows = plain(discover(aten.cat.default, ([floats(4, 6)] * 12, 0)).rows)
    assert rows == {((S(1),) * 12, (S(1),)), ((P,) * 12, (P,))}


SAMPLES = {
    aten.mm.default: lambda n, m: (floats(n, 6), floats(6, m)),
    aten.add.Tensor: lambda n, m: (floats(n, m), floats(n, m, seed=1)),
    aten._softmax.default: lambda n, m: (floats(n, m), 1, False),
    aten.cat.default: lambda n, m: ([floats(n, m), floats(2, m)], 0),
    aten.sum.dim_IntList: lambda n, m: (floats(n, m), [1]),
    aten.maximum.default: lambda n, m: (floats(n, m), floats(n, m, seed=1)),
    aten.where.self: lambda n, m: (floats(n, m, seed=2) > 0, floats(n, m), floats(n, m, seed=1)),
    aten.tril.default: lambda n, m: (floats(n, m, 5),),
}


@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_what_is_found_holds_on_other_sizes(op):
    found = discover(op, SAMPLES[op](5, 4))
    assert found.rows
    for count in (2, 3, 4):
        assert verify(op, [SAMPLES[op](7, 3)], found.rows, count=count) == []


LETTERS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)


@given(LETTERS, LETTERS, st.data())
@settings(max_examples=20, deadline=None)
def test_an_einsum_has_the_rows_of_its_formula(left, right, data):
    letters = sorted({*left, *right})
    out = data.draw(st.permutations(letters).map(lambda p: p[: data.draw(st.integers(0, len(p)))]))
    sizes = dict(zip("abcd", (4, 5, 6, 7)))
    a, b = (floats(*(sizes[x] for x in side), seed=i) for i, side in enumerate((left, right)))
    text = f"{''.join(left)},{''.join(right)}->{''.join(out)}"

    def product(a, b):
        return torch.einsum(text, a, b)

    types = [Full(tuple(t.shape), t.dtype) for t in (a, b)]
    due = formula(f"{' '.join(left)}, {' '.join(right)} -> {' '.join(out)}", *types)
    assert plain(discover(product, (a, b)).rows) == set(due)


@given(st.permutations(range(3)), st.integers(0, 2))
@settings(max_examples=10, deadline=None)
def test_a_plain_function_has_the_rows_that_its_dims_say(order, reduced):
    def f(x):
        return x.permute(order).cumsum(reduced)

    found = plain(discover(f, (floats(4, 5, 6),)).rows)
    due = {((S(d),), (S(i),)) for i, d in enumerate(order) if i != reduced}
    assert found == due | {((P,), (P,))}


def test_a_kernel_that_kills_its_process_has_the_rows_that_do_not():
    def fragile(x, y):
        if x.shape != y.shape:
            os.kill(os.getpid(), signal.SIGSEGV)
        return x + y

    found = discover(fragile, (floats(4, 6), floats(4, 6, seed=1)))
    due = {((S(0), S(0)), (S(0),)), ((S(1), S(1)), (S(1),)), ((P, P), (P,))}
    assert plain(found.rows) == due


def test_a_kernel_that_dies_of_empty_blocks_keeps_its_rows():
    def fragile(x):
        if not x.numel():
            os.kill(os.getpid(), signal.SIGSEGV)
        return x.exp()

    found = discover(fragile, (floats(4, 6),))
    assert plain(found.rows) == {((S(0),), (S(0),)), ((S(1),), (S(1),))}
    assert "# not on empty blocks" in str(found)


def test_a_kernel_that_hangs_is_no_row(monkeypatch):
    monkeypatch.setattr(child, "SECONDS", 0.2)

    def slow(x):
        if x.shape[1] != 6:
            time.sleep(60)
        return x.exp()

    assert plain(discover(slow, (floats(4, 6),)).rows) == {((S(0),), (S(0),))}


def test_without_a_child_process_the_rows_are_the_same():
    sample = floats(4, 6), floats(6, 5)
    one, other = (discover(aten.mm.default, sample, isolated=way) for way in (True, False))
    assert one.rows == other.rows


@pytest.mark.parametrize(
    ("f", "rows"),
    [
        (lambda x, y: x == y, [((S(d), S(d)), (S(d),)) for d in (0, 1)]),  # all false
        (lambda x, y: (x == y).any(), []),
        (
            lambda x, y: (x + 10).clamp(max=1) * y.ceil().abs() * 0,
            [((S(d), S(d)), (S(d),)) for d in (0, 1)],
        ),
    ],
)
def test_a_row_that_holds_by_accident_is_not_listed(f, rows):
    found = discover(f, (floats(4, 6), floats(4, 6, seed=1)))
    assert plain(found.rows) == set(rows)


def test_terms_are_not_whole_numbers():
    rows = discover(aten.ceil.default, (floats(4, 6).round(),)).rows
    assert plain(rows) == {((S(d),), (S(d),)) for d in (0, 1)}


def test_a_row_that_asks_for_contiguous_blocks_says_so():
    def part(places, table):
        return table[int(places[0]) :][: len(places)]

    found = discover(part, (torch.arange(6), floats(6)))
    (row,) = [r for r in found.rows if r.ins == (S(0), R)]
    assert row == Row((S(0), R), (S(0),), contiguous=True)
    assert "contiguous=True" in str(found)


@pytest.mark.parametrize(
    ("f", "sentence"),
    [
        (lambda x: x.add_(1), "writes to its arguments."),
        (lambda x: torch.rand_like(x), "gives other values when it runs again."),
    ],
)
def test_what_is_no_pure_function_is_refused(f, sentence):
    with pytest.raises(RuleError, match=sentence):
        discover(f, (floats(4, 6),))


def test_a_sample_is_needed():
    with pytest.raises(RuleError) as error:
        discover(aten.mm.default)
    assert str(error.value) == ("no sample of the op is given.\n\nWrite discover(op, (x, y)).")


def test_a_plain_function_is_verified_with_its_rows():
    def f(x):
        return x.sum(0)

    (wrong,) = verify(f, [(floats(4, 6),)], [Row((S(0),), (S(0),))])
    assert wrong.row == Row((S(0),), (S(0),))
    assert verify(f, [(floats(4, 6),)], [Row((S(0),), (P,)), Row((S(1),), (S(0),))]) == []
    with pytest.raises(RuleError, match="a plain function, which has no rule"):
        verify(f, [(floats(4, 6),)])


def test_the_text_is_a_rule():
    op = overload_of(scaled, (), {})
    samples = [(floats(4, 6), floats(6, 5), 2.0), (floats(5, 7), floats(7, 3), -0.5)]
    found = discover(scaled, *samples)
    assert set(found.missing()) == set(found.rows)
    try:
        registered(str(found))
        assert found.missing() == ()
        for count in (2, 3, 4):
            others = [(floats(3, 8), floats(8, 6), 3.0)]
            assert verify(scaled, others, count=count) == []
    finally:
        _RULES.pop(op, None)


def test_missing_are_those_that_given_rows_lack():
    found = discover(aten.mm.default, (floats(4, 6), floats(6, 5)))
    some = [Row((S(0), R), (S(0),)), Row((P, R), (P,)), Row((R, P), (P,))]
    assert set(found.missing(some)) == {Row((R, S(1)), (S(1),)), Row((S(1), S(0)), (P,))}
    assert found.missing() == ()


@pytest.mark.parametrize(
    ("op", "samples", "others"),
    [
        (
            aten._softmax.default,
            [(floats(4, 6), 1, False), (floats(4, 6), 0, False), (floats(4, 6, 5), 1, False)],
            [(floats(3, 4, 5, 6), -2, False), (floats(5), 0, False)],
        ),
        (
            aten.amax.default,
            [
                (floats(4, 6), [1], False),
                (floats(4, 6), [0], False),
                (floats(4, 6, 5), [0, 2], False),
                (floats(4, 6, 5), [1], False),
            ],
            [(floats(3, 4, 5, 6), [1, -1], False)],
        ),
        (
            aten.stack.default,
            [([floats(4, 6)], 0), ([floats(4, 6)], 1), ([floats(4, 6, 5)], 2)],
            [([floats(3, 4, 5, 6)], 1), ([floats(6, 4)], -1)],
        ),
        (
            aten.linear.default,
            [(floats(4, 6), floats(5, 6)), (floats(4, 3, 6), floats(5, 6))],
            [(floats(2, 4, 3, 6), floats(5, 6))],
        ),
        (
            aten.linear.default,
            [
                (floats(4, 6), floats(5, 6)),
                (floats(4, 3, 6), floats(5, 6)),
                (floats(4, 6), floats(5, 6), floats(5)),
                (floats(4, 3, 6), floats(5, 6), floats(5)),
            ],
            [(floats(2, 4, 3, 6), floats(5, 6)), (floats(2, 4, 3, 6), floats(5, 6), floats(5))],
        ),
    ],
    ids=named,
)
def test_dims_are_generalized(op, samples, others):
    """The rule of a few samples has, for other numbers of dims, what is found there."""
    text = str(discover(op, *samples))
    known = _RULES[op]
    _RULES.pop(op)
    try:
        registered(text)
        for args in others:
            assert rows_at(op, *args) == pairs(discover(op, args).rows)
    finally:
        _RULES[op] = known


def test_a_broadcast_is_not_taken_for_a_cut():
    """The rule of operands of one shape has no cut of a dim that one of them lacks."""
    text = str(discover(aten.add.Tensor, (floats(4, 6), floats(4, 6))))
    known = _RULES.get(aten.add.Tensor)
    _RULES.pop(aten.add.Tensor, None)
    try:
        registered(text)
        rows = rows_at(aten.add.Tensor, floats(4, 6), floats(1, 6))
        assert {r for r in rows if isinstance(r[1][0], Shard)} == {((S(1), S(1)), (S(1),))}
    finally:
        if known is not None:
            _RULES[aten.add.Tensor] = known


@pytest.mark.parametrize("name", ["MM", "SOFTMAX", "SCALED", "VIEW", "NONE"])
def test_the_text_of_a_rule(name):
    op, samples, text = GOLDEN[name]
    assert str(discover(op, *samples)) == text


NAMES = ("mm", "softmax", "cat", "nn.functional.linear", "cumsum", "gather", "tril", "mean")
"""Entries of the database of ops."""


def test_our_rules_have_most_rows_that_hold():
    calls = chosen((c for name in NAMES for c in calls_of(name, 2)), 1)
    with fake_mesh() as mesh:
        rows = [r for op, each in calls.items() for c in each for r in recalled(op, *c, mesh)]
    known = [r for r in rows if r.plain]
    assert len({r.op for r in known}) >= 15
    assert sum(r.ours for r in known) >= 0.95 * len(known)
    assert 0.5 * len(known) <= sum(r.dtensor for r in known)


@pytest.mark.parametrize(
    ("row", "has"),
    [
        (Row((S(0), R), (S(0),)), True),
        (Row((S(1), S(0)), (P,)), True),
        (Row((S(1), R), (P,)), False),
        (Row((S(0), R), (S(1),)), False),
    ],
)
def test_dtensor_has_a_row_that_moves_nothing(row, has):
    call, tensors, outs = call_of(aten.mm.default, (floats(4, 6), floats(6, 4)), {})
    from fdtensor.testing.discovery.sample import Sample

    with fake_mesh() as mesh:
        assert by_dtensor(Sample(call, tuple(tensors), tuple(outs)), row, mesh) == has


GOLDEN = {
    "MM": (
        aten.mm.default,
        [(floats(4, 6), floats(6, 5))],
        '''import torch

from fdtensor.ops.rules import P, R, S, rule


@rule(torch.ops.aten.mm.default)
def rows(x, mat2):
    """The rows that hold on ([4, 6], [6, 5])."""
    if (x.ndim, mat2.ndim) != (2, 2):
        return
    yield (S(0), R), S(0)
    yield (R, S(1)), S(1)
    yield (S(1), S(0)), P
    yield (R, P), P
    yield (P, R), P''',
    ),
    "SOFTMAX": (
        aten._softmax.default,
        [(floats(4, 6), 1, False), (floats(4, 6), 0, False), (floats(4, 6, 5), 1, False)],
        '''import torch

from fdtensor.ops.rules import S, rule


@rule(torch.ops.aten._softmax.default)
def rows(x, dim, half_to_float):
    """The rows that hold on these samples.

    ([4, 6], 1, False)
    ([4, 6], 0, False)
    ([4, 6, 5], 1, False)
    """
    if half_to_float:
        return
    for d in range(x.ndim):
        if d != dim % x.ndim:
            yield (S(d),), S(d)''',
    ),
    "SCALED": (
        scaled,
        [(floats(4, 6), floats(6, 5), 2.0), (floats(4, 6), floats(6, 5), -2.0)],
        '''import torch

from fdtensor.ops.rules import P, R, S, rule


@rule(torch.ops.discovery.scaled.default)
def rows(x, y, by):
    """The rows that hold on these samples.

    ([4, 6], [6, 5], 2.0)
    ([4, 6], [6, 5], -2.0)
    """
    if (x.ndim, y.ndim) != (2, 2):
        return
    yield (S(0), R), S(0)
    yield (R, S(1)), P
    if x.shape[1] == y.shape[0]:
        yield (S(1), S(0)), S(1)
    yield (R, P), P
    yield (P, R), P''',
    ),
    "VIEW": (
        aten.view.default,
        [(floats(4, 6, 5), [4, 30])],
        '''import torch

from fdtensor.layouts.placement import Partial
from fdtensor.ops.rules import P, S, rule


@rule(torch.ops.aten.view.default, sizes={"size": 0})
def rows(x, size):
    """The rows that hold on ([4, 6, 5], (4, 30))."""
    if x.ndim != 3:
        return
    if x.shape[0] == size[0]:
        yield (S(0),), S(0)
    yield (P,), P
    yield (Partial("max"),), Partial("max")
    yield (Partial("min"),), Partial("min")''',
    ),
    "NONE": (
        aten.msort.default,
        [(floats(6),)],
        "# no rows of torch.ops.aten.msort.default but that of all R",
    ),
}
