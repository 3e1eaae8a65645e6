"""Functions that run op by op: sums stay pending between ops, and nobody can tell but by bytes."""

import copy
import pickle

import attrs
import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import Plan
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.tensors.dtensor import due
from fdtensor.testing.values import scatter

MESH = Mesh(x=4)
ROWS, COLUMNS, WHOLE = MESH.layout("x"), MESH.layout(None, "x"), MESH.layout()


def ints(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


class Counting(SimulatedComm):
    """Simulated ranks that list the plans that are run."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.plans = []

    def watched(self, found, go):
        if isinstance(found, Plan):
            self.plans.append(found)
        return super().watched(found, go)


def product(comm, seed=0):
    """`a @ b` where both are cut along what is summed, and its operands."""
    a, b = ints(8, 12, seed=seed), ints(12, 4, seed=seed + 1)
    operands = distribute(a, COLUMNS, comm), distribute(b, ROWS, comm)
    return operands[0] @ operands[1], a @ b


# --- results ---------------------------------------------------------------------------------


def test_a_product_owes_its_sum_and_prints_so():
    y, _ = product(SimulatedComm(MESH))
    assert repr(y) == "DTensor(f64[8,4] on Mesh(x=4), owes the sum over x)"
    assert y.layout is WHOLE
    assert y.plan_to(ROWS).src.layout.partial == {"x": "sum"}
    assert y.plan_to(ROWS).received_bytes == 3 * 8 * 4 * 8 // 4
    y.full()
    assert repr(y) == "DTensor(f64[8,4] on Mesh(x=4))"


def test_what_is_moved_next_is_reduced_on_its_way():
    y, wanted = product(SimulatedComm(MESH))
    moved = y.redistribute(ROWS)
    assert torch.equal(moved.full(), wanted)
    assert due(y) is not y, "its own sum is still to be taken"
    trees = redistribute({"y": y, "n": 3}, ROWS)
    assert torch.equal(trees["y"].full(), wanted)
    assert due(y) is not y


@pytest.mark.parametrize(
    "linear",
    [
        lambda y: y * 2,
        lambda y: 2 * y,
        lambda y: -y.mT,
        lambda y: y + y,
        lambda y: y.reshape(2, 16),
        lambda y: y[1:3],
        lambda y: torch.cat([y, y]),
        lambda y: y + distribute(ints(4), WHOLE, y.comm),
        lambda y: y.sum(0),
    ],
)
def test_what_is_linear_leaves_it_pending(linear):
    y, wanted = product(SimulatedComm(MESH))
    out = linear(y)
    assert due(out) is not out
    assert due(y) is not y
    assert torch.equal(out.redistribute(WHOLE).full(), out.full())
    assert torch.equal(y.full(), wanted)


@pytest.mark.parametrize("other", [torch.relu, lambda y: y * y, lambda y: y.square().sum()])
def test_what_is_not_reduces_it_once_for_all_readers(other):
    comm = SimulatedComm(MESH)
    y, wanted = product(comm)
    first = other(y)
    assert due(y) is y
    assert torch.equal(first.full(), other(wanted))
    assert torch.equal(other(y).full(), other(wanted))


def test_numbers_and_halves_are_never_pending():
    comm = SimulatedComm(MESH)
    total = call(torch.sum, distribute(ints(8), ROWS, comm))
    assert due(total) is total
    a, b = (distribute(ints(4, 4).bfloat16(), p, comm) for p in (COLUMNS, ROWS))
    assert due(a @ b).dtype is torch.bfloat16
    assert not due(a @ b).layout.partial


def test_other_reductions_than_sums_are_never_pending():
    largest = distribute(ints(8, 6), ROWS, SimulatedComm(MESH)).amax(0)
    assert due(largest) is largest
    assert torch.equal(largest.full(), ints(8, 6).amax(0))


def test_what_was_asked_is_what_is_given():
    comm = SimulatedComm(MESH)
    a, b = distribute(ints(8, 12), COLUMNS, comm), distribute(ints(12, 4), ROWS, comm)
    pending = MESH.layout(None, None, partial={"x": "sum"})
    for layout in (WHOLE, ROWS, pending):
        y = call(torch.mm, a, b, out_layouts=layout)
        assert y.layout == layout
        assert due(y) is y
    y = call(torch.neg, a @ b, out_layouts=ROWS)
    assert y.layout == ROWS
    assert torch.equal(y.full(), -(ints(8, 12) @ ints(12, 4)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        torch.relu,
        torch.zeros_like,
        torch.ones_like,
        lambda x: x.new_full((2, 2), 3.0),
        lambda x: x.gather(1, distribute(torch.zeros(8, 2).long(), WHOLE, x.comm)),
        lambda x: x @ x.mT,
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (8,)),
    ],
)
def test_of_replicated_operands_results_are_replicated(function):
    x = distribute(ints(8, 8), WHOLE, SimulatedComm(MESH))
    assert due(function(x)).layout is WHOLE


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, torch.empty_like])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
@pytest.mark.parametrize("kwargs", [{}, {"dtype": torch.int32}])
def test_what_is_like_an_operand_is_laid_out_like_it(like, layout, kwargs):
    x = distribute(ints(8, 8), layout, SimulatedComm(MESH))
    assert call(like, x, **kwargs).layout is layout


def test_it_is_a_value_like_any_other():
    y, wanted = product(SimulatedComm(MESH))
    assert torch.equal((y * 2).detach().full(), wanted * 2)
    for kept in (pickle.loads(pickle.dumps(y * 2)), copy.copy(y * 2), copy.deepcopy(y * 2)):
        assert torch.equal(kept.full(), wanted * 2)
    again = y * 2
    assert torch.equal(attrs.evolve(again).full(), wanted * 2)
    blocks, spec = optree.tree_flatten(y * 2, namespace="fdtensor")
    assert torch.equal(blocks[0], wanted * 2)
    assert torch.equal(optree.tree_unflatten(spec, blocks).full(), wanted * 2)
    assert spec == optree.tree_structure(again.redistribute(WHOLE), namespace="fdtensor")
    assert optree.tree_paths(y, namespace="fdtensor")[0] == ("local", 0)


def test_a_picture_shows_the_terms_and_moves_nothing():
    y, _ = product(SimulatedComm(MESH))
    assert "f64[8,4]{sum:x}" in str(fd.show(y))
    assert "{sum:x}" in y._repr_html_()
    assert due(y) is not y


def test_other_functions_get_its_sum():
    y, wanted = product(SimulatedComm(MESH))
    assert torch.equal(fd.spmd(lambda y: y * 2)(y * 2).full(), wanted * 4)
    assert torch.equal(y.to_local()[0], wanted)
    assert fd.spmd(lambda y: y * 2).trace(y).in_types == (y.type,)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_looked_at_in_other_modes_keeps_its_graph(mode):
    comm = SimulatedComm(MESH)
    a, b = distribute(ints(8, 12), COLUMNS, comm), distribute(ints(12, 4), ROWS, comm)
    y = a.requires_grad_() @ b
    with mode():
        y.full()
    torch.relu(y).sum().backward()
    plain = ints(8, 12).requires_grad_()
    torch.relu(plain @ ints(12, 4)).sum().backward()
    assert torch.equal(a.grad.full(), plain.grad)


def test_what_is_gathered_may_be_read_first_within_inference_mode():
    x = distribute(ints(8, 4), ROWS, SimulatedComm(MESH)).requires_grad_()
    h = x.redistribute(WHOLE)
    with torch.inference_mode():
        h.full()
        assert h.local[0].shape == (8, 4)
    sum((leaf * leaf).sum() / 4 for leaf in h.local).backward()
    assert torch.equal(x.grad.full(), ints(8, 4) / 2)
    h = x.redistribute(WHOLE)
    fd.func.grad(lambda w: (w * h).sum())(distribute(ints(8, 4), ROWS, x.comm))
    assert torch.autograd.grad((h * h).sum(), h)[0].full().equal(ints(8, 4) * 2)


# --- cotangents --------------------------------------------------------------------------------


def layer(x, w, v, bias, enter, leave):
    """What enters, what is pending, and the loss of a layer with two readers of what enters."""
    h = enter(x)
    y = F.linear(F.linear(h, w).square() + F.linear(h, -w), v)
    return h, y, (leave(y) + bias).square().sum() + (h * 3).sum()


SHAPES = ((8, 6), (12, 6), (6, 12), (6,))


def parameters(comm):
    layouts = (ROWS, ROWS, COLUMNS, WHOLE)
    pairs = zip(SHAPES, layouts, strict=True)
    return [
        distribute(ints(*s, seed=i), p, comm).requires_grad_() for i, (s, p) in enumerate(pairs)
    ]


def plain_parameters():
    return [ints(*s, seed=i).requires_grad_() for i, s in enumerate(SHAPES)]


def whole(x):
    return x.redistribute(WHOLE)


def rows(x):
    return x.redistribute(ROWS)


@pytest.mark.parametrize("peek", [False, True])
def test_gradients_are_those_of_torch_also_by_what_is_in_between(peek):
    plain, own = plain_parameters(), parameters(SimulatedComm(MESH))
    h, y, loss = layer(*plain, lambda x: x, lambda x: x)
    h2, y2, loss2 = layer(*own, whole, rows)
    if peek:
        y2.full()
        assert h2.local[0].requires_grad
    for some in ([0, 1, 2, 3, 4, 5], [4], [5], [0], [1], [4, 1]):
        wanted = torch.autograd.grad(loss, [[*plain, h, y][i] for i in some], retain_graph=True)
        given = torch.autograd.grad(loss2, [[*own, h2, y2][i] for i in some], retain_graph=True)
        assert all(torch.equal(a, b.full()) for a, b in zip(wanted, given, strict=True)), some


def test_second_derivatives_are_those_of_torch():
    plain, own = plain_parameters(), parameters(SimulatedComm(MESH))
    _, _, loss = layer(*plain, lambda x: x, lambda x: x)
    _, _, loss2 = layer(*own, whole, rows)
    wanted = torch.autograd.grad(loss, plain, create_graph=True)
    given = torch.autograd.grad(loss2, own, create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in wanted), plain)
    again = torch.autograd.grad(sum((g.square().sum() for g in given), 0 * loss2), own)
    assert all(torch.equal(a, b.full()) for a, b in zip(twice, again, strict=True))


def test_a_backward_that_fails_leaves_nothing_behind():
    plain, own = plain_parameters(), parameters(SimulatedComm(MESH))
    h = own[0].redistribute(WHOLE)
    stop = [True]

    def refused(grad):
        if stop[0]:
            raise RuntimeError("no")
        return grad

    blocks = [leaf * 1 for leaf in h.local]
    for leaf in blocks:
        leaf.register_hook(refused)
    other = attrs.evolve(h, local=tuple(blocks))
    loss = F.linear(h, own[1]).square().sum() + other.sum()
    with pytest.raises(RuntimeError, match="no"):
        loss.backward(retain_graph=True)
    stop[0] = False
    loss.backward()
    (F.linear(plain[0], plain[1]).square().sum() + plain[0].sum()).backward()
    assert torch.equal(own[0].grad.full(), plain[0].grad)


@pytest.mark.parametrize(("enter", "there"), [(whole, ROWS), (lambda x: whole(whole(x)), WHOLE)])
def test_readers_that_leave_terms_have_them_reduced_together(enter, there):
    comm = Counting(MESH)
    _, _, loss = layer(*parameters(comm), enter, rows)
    del comm.plans[:]
    loss.backward()
    (reduced,) = (p for p in comm.plans if p.src.shape == (8, 6) and p.src.layout.partial)
    assert reduced.dst.layout is there


# --- all of it ---------------------------------------------------------------------------------

OPS = (
    lambda a, b: a + b,
    lambda a, b: a * 2 - b,
    lambda a, b: a @ b,
    lambda a, b: a @ b.mT,
    lambda a, b: a * b,
    lambda a, _: torch.relu(a),
    lambda a, _: a.mT,
    lambda a, _: a - a.sum(0),
    lambda a, b: torch.cat([a, b])[2:6],
    lambda a, b: torch.where(a > 0, a, b),
)
PEEKS = (
    lambda x: x.full(),
    lambda x: x.local,
    repr,
    lambda x: x.detach().full(),
    lambda x: optree.tree_leaves(x, namespace="fdtensor"),
)


@st.composite
def journeys(draw):
    """A mesh, layouts of two tensors, and steps: ops, moves and looks at what there is."""
    mesh = draw(st.sampled_from([Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2)]))
    placements = st.sampled_from([Replicate(), Shard(0), Shard(1)])
    layouts = st.tuples(*[placements] * len(mesh.axes)).map(lambda p: fd.Layout(mesh, p))
    place = st.integers(0, 9)
    steps = st.one_of(
        st.tuples(st.just("op"), st.sampled_from(OPS), place, place),
        st.tuples(st.just("move"), layouts, place),
        st.tuples(st.just("look"), st.sampled_from(PEEKS), place, st.booleans()),
    )
    pending = draw(st.booleans())
    first = draw(layouts)
    if pending:
        first = fd.Layout(mesh, [Partial("sum"), *first.placements[1:]])
    return mesh, first, draw(layouts), draw(st.lists(steps, min_size=2, max_size=8)), draw(place)


@given(journeys())
def test_any_order_of_ops_moves_and_looks_gives_what_torch_gives(journey):
    mesh, first, second, steps, between = journey
    comm = SimulatedComm(mesh)
    a, b = ints(4, 4), ints(4, 4, seed=1)
    type = TensorType((4, 4), torch.float64, first)
    own = [from_local(scatter(a, type, 0), type, comm), distribute(b, second, comm)]
    plain = [a.requires_grad_(), b.requires_grad_()]
    own = [x.requires_grad_() for x in own]
    leaves = [*own], [*plain]
    for kind, what, place, *rest in steps:
        i = place % len(own)
        if kind == "op":
            k = rest[0] % len(own)
            own.append(what(own[i], own[k]))
            plain.append(what(plain[i], plain[k]))
        elif kind == "move":
            own.append(own[i].redistribute(what))
            plain.append(plain[i] * 1)
        else:
            with torch.set_grad_enabled(rest[0]):
                what(own[i])
    loss, plain_loss = (sum((x.sum() for x in some), 0 * some[0].sum()) for some in (own, plain))
    assert torch.equal(loss.full(), plain_loss)
    assert all(torch.equal(x.full(), y) for x, y in zip(own, plain, strict=True))
    asked = [*leaves[0], own[between % len(own)]], [*leaves[1], plain[between % len(own)]]
    for given_, wanted in zip(
        torch.autograd.grad(loss, asked[0], retain_graph=True),
        torch.autograd.grad(plain_loss, asked[1], retain_graph=True),
        strict=True,
    ):
        assert torch.equal(given_.full(), wanted)
    loss.backward()
    plain_loss.backward()
    for x, y in zip(*leaves, strict=True):
        assert torch.equal(x.grad.full(), y.grad)
