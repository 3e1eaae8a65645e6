"""Programs on real ranks: results, derivatives and refusals are those of a single process.

Each body runs on every rank, also on those that are not in the mesh of the tensors.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.programs.tracer import trace
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.pool import WorkerError
from fdtensor.testing.strides import Strides, laid_out
from fdtensor.testing.values import block
from tests.support.memory import Memory
from tests.support.programs import (
    CASES,
    SMOOTH,
    alone,
    close,
    derivatives,
    plainly,
    settings_of,
    spread_over,
    tensors_of,
)

pytestmark = pytest.mark.mesh

few = settings(max_examples=settings.default.max_examples // 6)
fewer = settings(max_examples=max(3, settings.default.max_examples // 12))
any_setting = st.sampled_from(sorted(CASES)).flatmap(lambda name: settings_of(name, world=4))
any_smooth = st.sampled_from(SMOOTH).flatmap(
    lambda name: settings_of(name, world=4, partial=("sum", "avg"), max_size=4)
)
X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) - 4
SOME = Mesh.from_ranks([3, 1], "x")


def comm_here():
    """This rank of four."""
    return connect(Mesh(world=4))


def blocks_here(setting):
    """The results on this rank, with their types."""
    comm = comm_here()
    tensors = tensors_of(setting.case, setting.sizes)
    args = [distribute(t, layout, comm) for t, layout in zip(tensors, setting.layouts)]
    out = flatten(spmd(setting.case.f)(*args), is_leaf=lambda x: isinstance(x, DTensor))[0]
    return [(y.local, y.type) for y in out if isinstance(y, DTensor)]


@few
@given(any_setting)
def test_each_rank_has_its_block_of_what_a_single_process_gives(pool4, setting):
    wanted = alone(setting)
    for rank, found in enumerate(pool4.run(blocks_here, setting)):
        for (local, type), single in zip(found, wanted, strict=True):
            assert not type.layout.partial
            if rank in setting.mesh.ranks:
                close([local], [block(single.detach(), type, rank)])
            else:
                assert local.numel() == (not single.ndim)
                assert local.dtype is single.dtype


def derivatives_here(setting, twice):
    leaves = [t.requires_grad_() for t in tensors_of(setting.case, setting.sizes)]
    return derivatives(spread_over(setting, comm_here()), leaves, twice)


@fewer
@given(any_smooth, st.booleans())
def test_derivatives_are_those_of_a_single_process(pool4, setting, twice):
    assume(setting.name != "adam" or 0 not in setting.sizes.values())  # torch itself fails
    twice = twice and setting.name not in ("attention", "hessian")
    leaves = [t.requires_grad_() for t in tensors_of(setting.case, setting.sizes)]
    wanted = derivatives(plainly(setting), leaves, twice)
    for rank, found in enumerate(pool4.run(derivatives_here, setting, twice)):
        if rank in setting.mesh.ranks:
            close(found, wanted)


def answers(mesh):
    x = distribute(X, mesh.layout(mesh.axes[0]), comm_here())
    y = call(torch.mul, x, 1)
    return (
        call(torch.Tensor.item, call(torch.sum, x)),
        call(torch.equal, x, y),
        call(torch.equal, x, call(torch.neg, x)),
        call(torch.Tensor.tolist, x),
    )


@pytest.mark.parametrize("mesh", [Mesh(x=4), SOME, Mesh.from_ranks([2], "x")], ids=str)
def test_everyone_gets_the_same_answer(pool4, mesh):
    wanted = (X.sum().item(), True, False, X.tolist())
    assert pool4.run(answers, mesh) == [wanted] * 4


def shapes_that_depend_on_data(mesh):
    x = distribute(X.clone().requires_grad_(), mesh.layout(mesh.axes[0]), comm_here())
    places = call(torch.nonzero, x.detach())
    chosen = call(lambda x: x[x > 0] * 2, x)
    return places.local, chosen.local.detach()


@pytest.mark.parametrize("mesh", [Mesh(x=4), SOME], ids=str)
def test_what_depends_on_data_runs_on_the_whole(pool4, mesh):
    found = pool4.run(shapes_that_depend_on_data, mesh)
    for rank, (places, chosen) in enumerate(found):
        if rank in mesh.ranks:
            assert torch.equal(places, X.nonzero())
            assert torch.equal(chosen, X[X > 0] * 2)
        else:
            assert (places.numel(), chosen.numel()) == (0, 0)


def gradient_of_what_depends_on_data(mesh):
    leaf = X.clone().requires_grad_()
    x = distribute(leaf, mesh.layout(mesh.axes[0]), comm_here())
    call(lambda x: x[x > 0] ** 2, x).full().sum().backward()
    return leaf.grad


def test_what_depends_on_data_has_derivatives(pool4):
    for grad in pool4.run(gradient_of_what_depends_on_data, Mesh(x=4)):
        assert torch.equal(grad, 2 * X.relu())


def outside(mesh):
    x = distribute(X, mesh.layout("x"), comm_here())
    whole, parts = call(lambda x: (x.sum(), [x * 2, x.sum(0)]), x)
    return whole.local, [part.local for part in parts]


def test_a_rank_outside_gets_zeros_and_empty_tensors(pool4):
    for rank, (whole, parts) in enumerate(pool4.run(outside, SOME)):
        if rank in SOME.ranks:
            assert whole == X.sum()
            assert torch.equal(parts[1], X.sum(0))
        else:
            assert whole.shape == ()
            assert whole == 0
            assert [part.numel() for part in parts] == [0, 0]


def different(rank):
    """A call with a number that is not the same on one rank."""
    x = distribute(X, Mesh(x=4).layout("x"), comm_here())
    return call(lambda x, n: x.sum(0) * n, x, 2 + (dist.get_rank() == rank)).full()


def test_ranks_that_call_different_functions_are_told(pool4):
    with pytest.raises(WorkerError) as raised:
        pool4.run(different, 2)
    assert sorted(raised.value.failures) == [0, 1, 2, 3]
    for text in raised.value.failures.values():
        assert "CommError: the ranks do not agree" in text


def plain():
    x = distribute(X, Mesh(x=4).layout("x"), comm_here())
    return call(torch.add, x, X)


def test_a_plain_tensor_is_refused_on_every_rank(pool4):
    with pytest.raises(WorkerError) as raised:
        pool4.run(plain)
    assert sorted(raised.value.failures) == [0, 1, 2, 3]
    for text in raised.value.failures.values():
        assert "ValueTreeError: argument 1 is a plain tensor of shape (4, 3)" in text


def trained(steps):
    """The loss and weights after some steps of gradient descent."""
    comm, mesh = comm_here(), Mesh(dp=2, tp=2)
    torch.manual_seed(0)
    x, v, w = (torch.randn(s, dtype=torch.float64) for s in ((6, 4), (4, 5), (5, 3)))
    layouts = mesh.layout("dp"), mesh.layout(None, "tp"), mesh.layout("tp")
    x, v, w = (distribute(t, layout, comm) for t, layout in zip((x, v, w), layouts))
    f = spmd(descent)
    for _ in range(steps):
        loss, (v, w) = f((v, w), x)
    return loss.full(), v.full(), w.full()


def descent(params, x):
    def loss(params):
        v, w = params
        return ((torch.tanh(x @ v) @ w) ** 2).mean()

    grads, value = torch.func.grad_and_value(loss)(params)
    return value, tuple(p - 0.1 * g for p, g in zip(params, grads))


def test_training_goes_as_in_a_single_process(pool4):
    torch.manual_seed(0)
    x, v, w = (torch.randn(s, dtype=torch.float64) for s in ((6, 4), (4, 5), (5, 3)))
    for _ in range(5):
        loss, (v, w) = descent((v, w), x)
    for found in pool4.run(trained, 5):
        close(found, [loss, v, w])


def mistaken(rank):
    comm = comm_here()
    x = distribute(X, Mesh(x=4).layout("x"), comm)
    y = X if dist.get_rank() == rank else x
    try:
        spmd(lambda x, y: x + y)(x, y)
    except FdtensorError as error:
        return type(error).__name__, error.sentence
    return None


@pytest.mark.parametrize("rank", [0, 2])
def test_a_mistake_of_one_rank_fails_all(pool4, rank):
    found = pool4.run(mistaken, rank)
    assert found[rank][0] == "ValueTreeError"
    for kind, sentence in found[:rank] + found[rank + 1 :]:
        assert kind == "CommError"
        assert f"rank {rank}: argument 1 is a plain tensor" in sentence


def tracked_on(rank):
    x = distribute(X, Mesh(x=4).layout("x"), comm_here())
    x.local.requires_grad_(dist.get_rank() == rank)
    try:
        call(torch.mul, x, x)
    except FdtensorError as error:
        return type(error).__name__
    return None


def test_ranks_that_differ_in_what_autograd_tracks_fail_together(pool4):
    assert pool4.run(tracked_on, 1) == ["CommError"] * 4


def with_constant():
    scale = torch.full((3,), 2.0, dtype=torch.float64)
    x = distribute(X, Mesh(x=4).layout("x"), comm_here())
    x.local.requires_grad_()
    spmd(lambda x: x * scale)(x).full().sum().backward()
    return x.local.grad


def test_a_closed_over_constant_takes_part_in_local_derivatives(pool4):
    for grad in pool4.run(with_constant):
        assert torch.equal(grad, torch.full_like(grad, 2.0))


def attention_of_strided_rows():
    """What a rank gets for operands whose rows do not lie side by side, and its gradient."""
    comm = connect(Mesh(x=4))
    q, k, v = (torch.arange(32.0).reshape(4, 2, 2, 2).sin().double() * i for i in (1, 2, 3))
    given = []
    for t in (q, k, v):
        d = distribute(t, comm.mesh.layout("x"), comm)
        given.append(DTensor(laid_out(d.local, Strides((0, 2, 3, 1), gap=2)), d.type, comm))

    def f(q, k, v):
        return (F.scaled_dot_product_attention(q, k, v) ** 2).sum()

    found = spmd(torch.func.grad_and_value(f))(*given)
    expected = torch.func.grad_and_value(f)(q, k, v)
    graph = trace(f, *given).to_fx(comm.rank)
    (loss,) = graph(*[d.local for d in given])
    assert torch.allclose(loss, expected[1])
    return torch.allclose(found[0].full(), expected[0]), torch.allclose(
        found[1].full(), expected[1]
    )


def test_real_ranks_take_operands_of_any_strides(pool4):
    assert pool4.run(attention_of_strided_rows) == [(True, True)] * 4


def announced_and_held(program, given, comm) -> tuple[int, int]:
    """The most bytes that a program says this rank holds, and that it holds."""
    run(program, given, comm)
    announced = program.peak_bytes_at(comm.rank)
    with Memory(given, announced) as memory:
        run(program, given, comm)
    return announced, memory.most


def peaks_here(layers, dtype, budgets):
    """What programs announce of this rank and what a run of them holds, for each budget."""
    comm = comm_here()

    def loss(weights, x):
        for up, down in weights:
            x = x + F.gelu(F.layer_norm(x, x.shape[1:]) @ up) @ down
        return (x * x).sum()

    mesh = Mesh(dp=4)
    rows = mesh.layout("dp")
    typed = [TensorType(s, dtype, rows) for s in [(32, 64), (64, 32)] * layers + [(128, 32)]]
    types = list(zip(typed[:-1:2], typed[1::2], strict=False)), typed[-1]
    plain = trace(torch.func.grad(loss), *types)
    found = []
    for part in budgets:
        program = trace(torch.func.grad(loss), *types, max_bytes=int(part * plain.peak_bytes))
        given = [torch.ones(t.local_shape(comm.rank), dtype=dtype) for t in typed]
        found.append(announced_and_held(program, given, comm))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_holds_what_it_announces(pool4, dtype):
    for found in pool4.run(peaks_here, 4, dtype, [1, 0.7, 0.5]):
        assert [announced for announced, _ in found] == [most for _, most in found]


def peaks_of_largest_here():
    """What programs that reduce the largest of floats announce, and what this rank really holds."""
    comm = comm_here()
    mesh = Mesh(x=4)
    largest = mesh.layout(partial={"x": "max"})
    x, y = (TensorType(shape, torch.float32, largest) for shape in [(16, 8), (8, 8)])
    found = []
    for layout in (mesh.layout(), mesh.layout("x"), mesh.layout(None, "x")):
        for f, types in (
            (lambda x: x, [x]),
            (lambda x: x.exp().sin().tanh(), [x]),
            (lambda x, y: (x, y), [x, y]),
        ):
            program = trace(f, *types, out_layouts=layout)
            given = [torch.ones(t.shape) for t in types]
            found.append(announced_and_held(program, given, comm))
    return found


def test_the_largest_of_floats_hold_what_is_announced_alone_and_together(pool4):
    for found in pool4.run(peaks_of_largest_here):
        assert [announced for announced, _ in found] == [most for _, most in found]
