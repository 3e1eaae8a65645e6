"""`choice="follow"`: the layouts that were given decide, at any size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import fdtensor as fd
from fdtensor import Mesh, SimulatedComm, TensorType, distribute, spmd, trace
from fdtensor.errors import TraceError

tp, dp = Mesh(tp=2), Mesh(dp=2)


def typed(layout, *shape, dtype=torch.float32):
    return TensorType(shape, dtype, layout)


def mlp(p, x):
    return torch.relu(x @ p["up"]) @ p["down"] + p["bias"]


def loss(p, x, y):
    return ((mlp(p, x) - y) ** 2).sum()


def mlp_types(mesh, up, down, data, scale=1):
    n, d, h = 8 * scale, 4 * scale, 16 * scale
    p = {
        "up": typed(up, d, h),
        "down": typed(down, h, d),
        "bias": typed(mesh.layout(), d),
    }
    return p, typed(data, n, d), typed(data, n, d)


MEGATRON = tp, tp.layout(None, "tp"), tp.layout("tp"), tp.layout()
DATA = dp, dp.layout(), dp.layout(), dp.layout("dp")
SHARDED = dp, dp.layout("dp"), dp.layout("dp"), dp.layout("dp")


def moves(program):
    """What is moved, without sizes: the kinds of collectives, in order."""
    return [str(e.op.collective).partition("[")[0] for e in program.eqns if e.is_collective]


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        (MEGATRON, "strategy: tensor parallel over tp"),
        (DATA, "strategy: data parallel over dp"),
        (SHARDED, "strategy: fully sharded data parallel over dp"),
    ],
)
def test_programs_of_any_size_are_what_the_layouts_say(given_, told):
    step = torch.func.grad_and_value(loss)
    programs = [trace(step, *mlp_types(*given_, scale=n), choice="follow") for n in (1, 16, 256)]
    assert [p.summary().splitlines()[-1] for p in programs] == [told] * 3
    taken = [
        [[(o.ins, o.outs) for o in c.calls] for c in p.origin.choices.values()] for p in programs
    ]
    assert taken[0] == taken[1] == taken[2]


GIVEN = {
    "a tuple": lambda p, x, y: (lambda p, batch: loss(p, *batch), (p, (x, y))),
    "a dict": lambda p, x, y: (lambda p, batch: loss(p, **batch), (p, {"x": x, "y": y})),
    "beside tokens": lambda p, x, y: (
        lambda p, batch: loss(p, batch["x"] + batch["i"].unsqueeze(1), batch["y"]),
        (p, {"x": x, "y": y, "i": typed(x.layout, *x.shape[:1], dtype=torch.int64)}),
    ),
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("placed", [MEGATRON, DATA, SHARDED], ids=["megatron", "data", "sharded"])
def test_a_batch_that_is_a_pytree_is_no_parameter(placed, name):
    types = mlp_types(*placed)
    f, args = GIVEN[name](*types)
    plain = trace(torch.func.grad(loss), *types, choice="follow")
    program = trace(torch.func.grad(f), *args, choice="follow")
    assert program.summary().splitlines()[-1] == plain.summary().splitlines()[-1]
    assert program.received_bytes == plain.received_bytes


def test_the_first_pytree_is_one_of_parameters_where_all_could_be_batches():
    weights, batch = {"w": typed(dp.layout("dp"), 8, 4)}, {"x": typed(dp.layout("dp"), 6, 8)}
    program = trace(torch.func.grad(lambda p, b: (b["x"] @ p["w"]).sum()), weights, batch)
    assert program.origin.constraints.parameters == {0}


def test_megatron_is_one_reduction_of_an_activation_each_way():
    p, x, y = mlp_types(*MEGATRON)
    step = torch.func.grad(loss, argnums=(0, 1))
    program = trace(step, p, x, y, choice="follow")
    assert len(program.collectives) == 2
    assert program.received_bytes == 2 * x.nbytes  # all-reduce on two ranks: the block of one


def test_fully_sharded_data_gather_each_weight_once_and_scatter_its_gradient():
    p, x, y = mlp_types(*SHARDED)
    program = trace(torch.func.grad(loss), p, x, y, choice="follow")
    weights = sum(t.local_nbytes(0) for t in (p["up"], p["down"]))
    assert program.received_bytes == 2 * weights + p["bias"].nbytes


def test_data_parallel_sends_gradients_alone():
    p, x, y = mlp_types(*DATA)
    program = trace(torch.func.grad(loss), p, x, y, choice="follow")
    assert program.received_bytes == sum(t.nbytes for t in p.values())
    assert moves(program) == ["all_reduce"] or moves(program) == ["exchange"]


def block(p, x):
    b, s, d = x.shape
    h = F.rms_norm(x, (d,), p["norm"])
    q, k, v = ((h @ p[w]).view(b, s, 4, d // 4).transpose(1, 2) for w in "qkv")
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + a.transpose(1, 2).reshape(b, s, d) @ p["o"]
    return x + F.silu(x @ p["up"]) @ p["down"]


def language_loss(p, ids):
    x = block(p["block"], p["embedding"][ids])
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), ids.flatten())


def language_types(mesh):
    column, row, whole = mesh.layout(None, "tp"), mesh.layout("tp"), mesh.layout()
    d, h, vocab = 16, 32, 64
    weights = {w: typed(column, d, d) for w in "qkv"}
    weights |= {"o": typed(row, d, d), "up": typed(column, d, h), "down": typed(row, h, d)}
    weights["norm"] = typed(whole, d)
    p = {"block": weights, "embedding": typed(row, vocab, d), "head": typed(column, d, vocab)}
    return p, typed(mesh.layout("dp"), 4, 8, dtype=torch.int64)


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(tp=2, dp=2)])
def test_a_transformer_with_styles_stays_as_its_styles_are(mesh):
    program = trace(
        torch.func.grad_and_value(language_loss), *language_types(mesh), choice="follow"
    )
    assert program.summary().splitlines()[-1].startswith("strategy: ")
    told = "data parallel over dp", "tensor parallel over tp"
    assert all(part in program.summary() for part in told)
    assert "gathered" not in program.summary()
    assert "all_gather" not in moves(program)  # nothing that is cut is made whole


@pytest.mark.parametrize("choice", ["follow", "cheapest"])
def test_numbers_of_a_transformer_are_those_of_torch(choice):
    mesh = Mesh(dp=2, tp=2)
    comm = SimulatedComm(mesh)
    types = language_types(mesh)
    torch.manual_seed(0)
    full = torch.utils._pytree.tree_map(
        lambda t: (
            torch.randint(64, t.shape) if t.dtype == torch.int64 else torch.randn(t.shape) / 4
        ),
        types,
        is_leaf=lambda t: isinstance(t, TensorType),
    )
    layouts = torch.utils._pytree.tree_map(
        lambda t: t.layout, types, is_leaf=lambda t: isinstance(t, TensorType)
    )
    p, ids = (distribute(x, layout, comm) for x, layout in zip(full, layouts, strict=True))
    step = torch.func.grad_and_value(language_loss)
    grads, value = spmd(step, choice=choice)(p, ids)
    expected, number = step(*full)
    torch.testing.assert_close(value.full(), number)
    assert grads["block"]["o"].layout is p["block"]["o"].layout
    for name, grad in grads["block"].items():
        torch.testing.assert_close(grad.full(), expected["block"][name], atol=1e-5, rtol=1e-4)


LAYOUTS = st.sampled_from([None, 0, 1])


@given(LAYOUTS, LAYOUTS, LAYOUTS, st.sampled_from([1, 4]), st.booleans())
def test_any_layouts_give_right_numbers_and_keep_what_is_cut(up, down, data, scale, backward):
    mesh = Mesh(x=2)

    def cut(dim):
        return mesh.layout(*[None, None, "x"][2 - dim :]) if dim is not None else mesh.layout()

    comm = SimulatedComm(mesh)
    types = mlp_types(mesh, cut(up), cut(down), cut(data), scale)
    gen = torch.Generator().manual_seed(1)
    fulls = [torch.randint(-2, 3, t.shape, generator=gen).double() for t in types[0].values()]
    fulls += [torch.randint(-2, 3, t.shape, generator=gen).double() for t in types[1:]]
    p = dict(zip(types[0], fulls, strict=False))
    given_ = (p, *fulls[3:])
    layouts = {k: t.layout for k, t in types[0].items()}, types[1].layout, types[2].layout
    args = [distribute(x, layout, comm) for x, layout in zip(given_, layouts, strict=True)]
    f = torch.func.grad(loss) if backward else loss
    result = spmd(f, choice="follow")(*args)
    expected = f(*given_)
    if backward:
        assert all(torch.equal(result[k].full(), expected[k]) for k in expected)
    else:
        assert torch.equal(result.full(), expected)


def test_backward_of_autograd_follows_too():
    mesh, up, down, data = SHARDED
    comm = SimulatedComm(mesh)
    types = mlp_types(mesh, up, down, data)
    p = {k: distribute(torch.ones(t.shape), t.layout, comm) for k, t in types[0].items()}
    for v in p.values():
        v.requires_grad_()
    x = distribute(torch.ones(types[1].shape), data, comm)
    spmd(loss, choice="follow")(p, x, x).backward()
    assert p["up"].grad.layout is p["up"].layout


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(TraceError, match="choice='folow' is no option"):
        spmd(mlp, choice="folow")


def test_explanations_have_no_tolls_among_their_seconds():
    p, x, y = mlp_types(*SHARDED)
    text = fd.explain(trace(torch.func.grad(loss), p, x, y, choice="follow"))
    assert "undoes what is given" in text
    assert "choice='follow'" in text
    assert "," not in "".join(line for line in text.splitlines() if " us" in line and "+" in line)


def test_values_of_a_region_have_its_layout():
    mesh = Mesh(x=2)

    def f(x):
        y = x + 1
        with fd.region(mesh.layout(None, "x")):
            z = torch.softmax(y * 2, 0).mT.contiguous().mT
            total = z.sum()
        return z.sum(0), total

    x = typed(mesh.layout("x"), 4, 6)
    program = trace(f, x)
    kinds = {str(e.op): program.type_of(e.outs[0]).layout for e in program.eqns if not e.steps}
    assert kinds["aten.mul.Tensor"] is mesh.layout(None, "x")
    assert kinds["aten._softmax.default"] is mesh.layout(None, "x")
    value = torch.arange(24.0).view(4, 6)
    result = spmd(f)(distribute(value, mesh.layout("x"), SimulatedComm(mesh)))
    torch.testing.assert_close(tuple(r.full() for r in result), f(value))


def test_a_region_keeps_writes_in_place_and_derivatives():
    mesh = Mesh(x=2)

    def f(x):
        with fd.region(mesh.layout(None, "x")):
            y = x * 3
            y[0].mul_(2)
            with fd.region(mesh.layout("x")):
                y = y + 1
        return (y * y).sum()

    value = torch.arange(24.0).view(4, 6)
    x = distribute(value, mesh.layout("x"), SimulatedComm(mesh))
    grad, number = spmd(torch.func.grad_and_value(f))(x)
    expected, known = torch.func.grad_and_value(f)(value)
    assert torch.equal(grad.full(), expected)
    assert torch.equal(number.full(), known)


def test_a_region_in_a_vmap_is_refused_and_outside_of_traces_does_nothing():
    mesh = Mesh(x=2)

    def f(x):
        with fd.region(mesh.layout("x")):
            return x * 2

    assert torch.equal(torch.vmap(f)(torch.ones(4)), torch.full((4,), 2.0))
    with pytest.raises(TraceError, match="a region is inside of a vmap"):
        trace(torch.vmap(f), typed(mesh.layout("x"), 4, 4))
    with pytest.raises(fd.errors.LayoutError), fd.region("x"):
        pass
