"""Every row of the rules for attention that a CPU can run, and the form of those of the others."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import SimulatedComm, distribute, from_local, spmd
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Full, Var
from fdtensor.ops.lowering import lowered
from fdtensor.ops.notation.core import P, R, S, Units, rule_of
from fdtensor.ops.recorder import record
from fdtensor.ops.rows import rows_of
from fdtensor.ops.rules import Row
from fdtensor.programs.options import like
from fdtensor.programs.tracer import trace
from fdtensor.testing.row_checks import call_of, verify
from fdtensor.testing.strides import Strides, strided
from tests.support.decompositions import differences
from tests.support.nested import nested

aten = torch.ops.aten
attention = aten._scaled_dot_product_flash_attention_for_cpu.default
attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash = aten._scaled_dot_product_flash_attention.default
flash_backward = aten._scaled_dot_product_flash_attention_backward.default
COUNTS = [2, 3, 4]


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small random integers, so that sums of them are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def heads(n: int, h: int, q: int, k: int, kv: int, e: int = 4) -> tuple[torch.Tensor, ...]:
    """A query, a key and a value of `kv` heads."""
    return ints(n, h, q, e) / 3, ints(n, kv, k, e, seed=1), ints(n, kv, k, e, seed=2)


SAMPLES = {
    "plain": (heads(2, 4, 5, 6, 4), False, {}),
    "causal": (heads(5, 3, 4, 4, 3), True, {}),
    "fewer heads of keys": (heads(3, 6, 4, 5, 2), False, {}),
    "fewer heads of keys and a mask": (heads(3, 6, 4, 4, 2), False, {"mask": (3, 6, 4, 4)}),
    "one mask for all heads": (heads(2, 4, 5, 6, 4), False, {"mask": (5, 6)}),
    "a mask for each head": (heads(2, 4, 5, 6, 4), False, {"mask": (1, 4, 5, 6)}),
    "one batch and one head": (heads(1, 1, 3, 2, 1), False, {}),
}


def forward_of(name: str) -> tuple[tuple, dict]:
    (query, key, value), causal, rest = SAMPLES[name]
    kwargs = {"attn_mask": ints(*rest["mask"], seed=5)} if rest else {"scale": 0.5}
    return (query, key, value, 0.0, causal), kwargs


def backward_of(name: str) -> tuple[tuple, dict]:
    args, kwargs = forward_of(name)
    out, logsumexp = attention(*args, **kwargs)
    return (ints(*out.shape, seed=7), *args[:3], out, logsumexp, *args[3:]), kwargs


@pytest.mark.parametrize("name", SAMPLES)
def test_the_rows_of_attention_are_right(name):
    """Batches, heads and queries, and the value is linear."""
    for count in COUNTS:
        assert verify(attention, [forward_of(name)], count=count) == []


@pytest.mark.parametrize("name", SAMPLES)
def test_the_rows_of_the_gradients_of_attention_are_right(name):
    """A cut of the keys too, which leaves the gradient of the query pending."""
    for count in COUNTS:
        assert verify(attention_backward, [backward_of(name)], count=count) == []


def test_blocks_of_queries_and_keys_keep_a_causal_mask():
    """Also where one axis cuts the queries and another one batches, heads or keys."""
    (query, key, value, *rest), kwargs = forward_of("causal")
    args = (*(t.double() for t in (query, key, value)), *rest)
    out, logsumexp = attention(*args, **kwargs)
    back = (out.cos(), *args[:3], out, logsumexp, *rest)
    for op, sample in ((attention, (args, kwargs)), (attention_backward, (back, kwargs))):
        call, tensors, whole = call_of(op, *sample)
        types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
        assert any(S(2) in row.ins for row in rows_of(call, types, 2))
        assert not [*nested(op, sample)]


def test_a_causal_mask_with_a_cut_sequence_moves_keys_and_values_alone():
    """Forward, and the sums of their gradients backward."""
    cut = TensorType((2, 3, 64, 8), torch.float32, Layout(Mesh(x=4), [S(2)]))

    def attend(*t):
        return torch.nn.functional.scaled_dot_product_attention(*t, is_causal=True)

    def gradients(*t):
        return torch.func.grad(lambda *t: attend(*t).pow(2).sum(), (0, 1, 2))(*t)

    moved = 2 * cut.nbytes * 3 // 4
    assert trace(attend, cut, cut, cut).received_bytes == moved
    assert trace(gradients, cut, cut, cut).received_bytes <= 2 * moved


@pytest.mark.parametrize("blocks", COUNTS)
def test_blocks_of_keys_are_put_together(blocks):
    """Also where a query sees no key of a block, or none at all."""
    (query, key, value, *rest), _ = forward_of("plain")
    mask = torch.zeros(5, 6)
    mask[1, 1:] = mask[2, :3] = mask[3] = -torch.inf
    masked = ((query, key, value, *rest), {"attn_mask": mask})
    assert not differences(attention, [*map(forward_of, SAMPLES), masked], blocks=blocks)


def test_cut_keys_stay_where_they_are():
    """What moves has the size of the queries, forward and backward."""
    mesh = Mesh(x=4)
    query = TensorType((2, 4, 512, 16), torch.float32, mesh.layout())  # small ones are gathered
    cut = TensorType((2, 4, 65536, 16), torch.float32, Layout(mesh, [S(2)]))

    def attend(*t):
        return torch.nn.functional.scaled_dot_product_attention(*t)

    def gradients(*t):
        return torch.func.grad(lambda *t: attend(*t).pow(2).sum(), (0, 1, 2))(*t)

    found = trace(attend, query, cut, cut, out_layouts=like(None))
    assert found.received_bytes <= 2 * query.nbytes
    assert trace(gradients, query, cut, cut).received_bytes <= 4 * query.nbytes


def test_a_flash_kernel_takes_the_keys_that_a_block_of_queries_may_see():
    """It aligns a causal mask with the last query and the last key."""
    x, lse = f32(2, 3, 8, 16), f32(2, 3, 8)
    v = tuple(map(Var, range(9)))
    forward = Call(flash, (*v[:3], 0.0, True), (), (*v[3:5], None, None, None))
    back = Call(flash_backward, (*v[:6], None, None, 8, 8, 0.0, True, *v[4:6]), (), v[6:])
    mesh = Mesh(x=4)

    def typed(full, placed):
        return TensorType(full.shape, full.dtype, Layout(mesh, [placed]))

    q, k, s = typed(x, S(2)), typed(x, R), typed(lse, S(2))
    seed = typed(SEED, R)
    graph = lowered(forward, [q, k, k], [q, s, None, None, None], (1,))
    shapes = [graph.types[v.index].shape[2] for v in graph.calls[-1].ins]
    assert shapes == [2, 4, 4]
    sum_ = typed(x, P)
    graph = lowered(back, [q, q, k, k, q, s, seed, seed], [q, sum_, sum_], (2,))
    kernel = next(call for call in graph.calls if call.op is flash_backward)
    assert [graph.types[v.index].shape[2] for v in kernel.ins[:4]] == [2, 2, 6, 6]
    assert kernel.args[8:10] == (2, 6)
    assert [graph.types[v.index].shape[2] for v in graph.outs] == [2, 8, 8]


def test_dropout_has_no_rows():
    """Each rank would draw its own numbers."""
    query, key, value = (Full((2, 4, 5, 8), torch.float32) for _ in range(3))
    call = Call(attention, (Var(0), Var(1), Var(2), 0.5), (), (Var(3), Var(4)))
    types = [query, key, value, query, Full((2, 4, 5), torch.float32)]
    assert len(rows_of(call, types, 2)) == 1


def f32(*shape: int) -> Full:
    return Full(shape, torch.float32)


SEED = Full((), torch.int64)
GPU = [
    (aten._scaled_dot_product_flash_attention.default, 3, (), 5),
    (aten._scaled_dot_product_efficient_attention.default, 3, (None, True), 4),
    (aten._scaled_dot_product_efficient_attention.default, 4, (True,), 4),
    (aten._scaled_dot_product_cudnn_attention.default, 3, (None, True), 4),
    (aten._scaled_dot_product_fused_attention_overrideable.default, 3, (), 4),
]


@pytest.mark.parametrize(("op", "tensors", "rest", "outs"), GPU, ids=str)
def test_kernels_of_other_devices_cut_batches_and_heads(op, tensors, rest, outs):
    """Their seeds are on every rank."""
    types = [f32(2, 4, 6, 8)] * 3 + [f32(1, 4, 6, 6)] * (tensors - 3)
    types += [f32(2, 4, 6, 8), f32(2, 4, 6), *[SEED] * (outs - 2)]
    given = tuple(map(Var, range(tensors)))
    call = Call(op, (*given, *rest), (), tuple(map(Var, range(tensors, tensors + outs))))
    rows = rows_of(call, types, 2)
    seeds = (R,) * (outs - 2)
    assert Row((S(0),) * 3 + (R,) * (tensors - 3), (S(0), S(0), *seeds)) in rows
    assert Row((S(1),) * tensors, (S(1), S(1), *seeds)) in rows


def test_gradient_kernels_of_other_devices_cut_batches_and_heads():
    """The gradient of a mask for all batches is pending where batches are cut."""
    q, m, lse = f32(2, 4, 6, 8), f32(1, 4, 6, 6), f32(2, 4, 32)
    v = tuple(map(Var, range(9)))
    op = aten._scaled_dot_product_efficient_attention_backward.default
    call = Call(op, (*v, 0.0, (True,) * 4), (), tuple(map(Var, range(9, 13))))
    rows = rows_of(call, [q, q, q, q, m, q, lse, SEED, SEED, q, q, q, m], 2)
    s = S(0)
    assert Row((s, s, s, s, R, s, s, R, R), (s, s, s, P)) in rows
    s = S(1)
    assert Row((s, s, s, s, s, s, s, R, R), (s, s, s, s)) in rows
    op = aten._scaled_dot_product_flash_attention_backward.default
    args = (*v[:6], None, None, 6, 6, 0.0, False, *v[6:8])
    call = Call(op, args, (), tuple(map(Var, range(8, 11))))
    rows = rows_of(call, [q, q, q, q, q, lse, SEED, SEED, q, q, q], 2)
    assert Row((s, s, s, s, s, s, R, R), (s, s, s)) in rows
    assert Row((P, *[R] * 7), (P, P, P)) in rows


def test_heads_are_cut_where_both_counts_line_up():
    """Each rank holds the heads of keys of its heads of queries."""
    (args, kwargs) = forward_of("fewer heads of keys")
    call, tensors, whole = call_of(attention, args, kwargs)
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    cut, kept = Units(1, 3).of(6, 2), Units(1, 1).of(2, 2)
    assert Row((cut, kept, kept), (cut, cut), exact=True) in rows_of(call, types, 2)


MODULES = {
    "attention": lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True),
    "encoder layer": lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    "gru": lambda: torch.nn.GRU(8, 5, batch_first=True),
    "rnn": lambda: torch.nn.RNN(8, 5, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("weights", [False, True])
def test_every_op_of_a_layer_and_its_gradient_has_a_rule(name, weights):
    """Forward and backward, with and without the weights of the attention."""
    module = MODULES[name]()
    named = dict(module.named_parameters())

    def loss(x, *parameters):
        args = ((x, x, x), {"need_weights": weights}) if name == "attention" else ((x,), {})
        out = torch.func.functional_call(module, dict(zip(named, parameters)), *args)
        return (out[0] if isinstance(out, tuple) else out).pow(2).sum()

    def gradients(tensors):
        return torch.func.grad(loss, tuple(range(len(tensors))))(*tensors)

    types = [f32(2, 3, 8), *(f32(*p.shape) for p in named.values())]
    ops = {call.op for call in record(gradients, types).calls}
    assert {op for op in ops if rule_of(op) is None} == set()


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_two_axes_cut_unevenly_hide_what_is_not_there_in_float64(causal):
    """The score of what is hidden is less than float32 has numbers for."""
    mesh = Mesh(x=2, y=2)
    q, k, v = (t.double() for t in heads(2, 2, 3, 5, 2, 2))
    cuts = ("x", "y"), (None, "x"), (None, None, None, "x")
    comm = SimulatedComm(mesh)
    given = [distribute(t, mesh.layout(*c), comm) for t, c in zip((q, k, v), cuts)]
    keys = [distribute(t, mesh.layout(None, None, ("x", "y")), comm) for t in (k, v)]
    q_, expected = given[0], F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    for some in (given, [q_, *keys]):
        made = spmd(F.scaled_dot_product_attention)(*some, is_causal=causal)
        torch.testing.assert_close(made.full(), expected)


@pytest.mark.one_of("order")
@pytest.mark.parametrize("order", [(0, 1, 3, 2), (0, 3, 1, 2), (3, 2, 1, 0), (0, 2, 1, 3)])
@pytest.mark.parametrize("cuts", [(), ("x",), (None, "x"), (None, None, "x")])
def test_operands_may_lie_in_memory_in_any_order(order, cuts):
    """The kernels read rows; torch looks at strides before it takes one."""
    tensors = [ints(2, 2, 4, 2, seed=i).double() for i in range(3)]
    mesh = Mesh(x=2)
    comm = SimulatedComm(mesh)
    given = []
    for t in tensors:
        d = distribute(t, mesh.layout(*cuts), comm)
        given.append(from_local(strided(d.local, Strides(order)), d.type, comm))

    def f(*tensors):
        return (F.scaled_dot_product_attention(*tensors) ** 2).sum()

    torch.testing.assert_close(spmd(f)(*given).full(), f(*tensors))
    found = spmd(torch.func.grad(f, (0, 1, 2)))(*given)
    for d, expected in zip(found, torch.func.grad(f, (0, 1, 2))(*tensors)):
        torch.testing.assert_close(d.full(), expected)
