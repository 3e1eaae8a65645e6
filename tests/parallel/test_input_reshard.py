"""Tests of parallel/resharded.py and fdtensor/runtime/replication.py."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fdtensor.layouts.errors import CommError, LayoutError, MeshError, TraceError
from fdtensor.layouts.mesh import Mesh
from fdtensor.ops.pins import constrain
from fdtensor.parallel import resharded as home
from fdtensor.parallel.kept import View, Whole
from fdtensor.parallel.resharded import input_reshard, remove_input_reshard
from fdtensor.runtime.replication import storage_of, watching
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.shard_map.collectives import axis_index, psum
from fdtensor.tensors.shard_map.mapped import shard_map
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import layouts

MESH = Mesh(dp=2, tp=3)
few = settings(max_examples=settings.default.max_examples // 6)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not watching()
    assert not home._HERE.running


def model():
    """Norms, products, an op that saves its result, a mask, views of weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(8),
        nn.Linear(8, 16),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Sequential(nn.Linear(16, 4), nn.Sigmoid()),
        nn.BatchNorm1d(7),
    )


def gradients(module, *inputs, times=1):
    """The result, and the gradients of parameters and inputs, with the same dropout each time."""
    torch.manual_seed(1)
    out = module(*inputs)
    sources = [p for p in (*module.parameters(), *inputs) if p.requires_grad]
    for _ in range(times):
        for source in sources:
            source.grad = None
        out.square().sum().backward(retain_graph=times > 1)
    return [out, *(source.grad for source in sources)]


def same(found, wanted):
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@contextlib.contextmanager
def kept(monkeypatch):
    """What `input_reshard` keeps, each once."""
    found = {}

    class Hooks(saved_tensors_hooks):
        def __init__(self, pack, unpack):
            def noted(tensor):
                made = pack(tensor)
                found[id(made)] = made
                return made

            super().__init__(noted, unpack)

    with monkeypatch.context() as patch:
        patch.setattr(home, "saved_tensors_hooks", Hooks)
        yield found


def blocks(found):
    return [*{id(k.block): k.block for k in views(found)}.values()]


def views(found):
    return [k for k in found.values() if isinstance(k, View)]


def wholes(found):
    return [k.tensor for k in found.values() if isinstance(k, Whole)]


def leaves(block):
    return block.value if isinstance(block.value, tuple) else (block.value,)


@contextlib.contextmanager
def saved():
    """What autograd saves, each memory once."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        yield found


@given(
    st.integers(-3, 2), st.integers(1, 5), st.booleans(), st.sampled_from(["dp", "tp"]), st.data()
)
def test_gradients_are_the_same_to_the_bit(dim, batch, wanted, axis, data):
    x = torch.randn(batch + 1, 7, 8, generator=torch.Generator().manual_seed(3))
    if data.draw(st.booleans()):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x.requires_grad_(wanted)
    module = model()
    expected = gradients(copy.deepcopy(module), x)
    comm = SimulatedComm(MESH)
    assert input_reshard(module, comm, axis=axis, dim=dim, check=True) is module
    same(gradients(module, x, times=2), expected)
    assert sum(comm.received.values())


def test_each_rank_keeps_its_block_of_what_it_kept_before(monkeypatch):
    module, x = model(), torch.randn(6, 7, 8)
    with saved() as before:
        plain = copy.deepcopy(module)(x)
    activations = [t for t in before.values() if t.shape[0] in (6, 6 * 7)]
    input_reshard(module, SimulatedComm(MESH), axis="tp", dim=0)
    with kept(monkeypatch) as found:
        out = module(x)
    weights = [m.weight for m in module.modules() if isinstance(m, (nn.Linear, nn.LayerNorm))]
    assert {*map(storage_of, wholes(found))} > {*map(storage_of, weights)}
    cut = [b for b in blocks(found) if b.cut.shape != (7,)]
    assert len(cut) == len(activations) == 8
    for place in range(3):
        mine = sum(leaves(b)[place].nbytes for b in cut)
        assert mine == sum(t.nbytes for t in activations) // 3 > 1000
    del out, plain


def test_blocks_may_be_uneven_or_empty(monkeypatch):
    for size, sizes in ((5, [2, 2, 1]), (4, [2, 2, 0]), (2, [1, 1, 0]), (7, [3, 3, 1])):
        module, x = nn.Sigmoid(), torch.randn(size, 3, requires_grad=True)
        expected = gradients(nn.Sigmoid(), x)
        input_reshard(module, SimulatedComm(MESH), axis="tp", dim=0)
        with kept(monkeypatch) as found:
            same(gradients(module, x), expected)
        assert [len(leaf) for b in blocks(found) for leaf in leaves(b)] == sizes


@pytest.mark.parametrize(
    ("x", "dim"),
    [
        (torch.randn(3), 1),
        (torch.randn(3), -2),
        (torch.randn(()), 0),
        (torch.randn(1, 3), 0),
        (torch.randn(0, 3), 0),
        (torch.randn(1, 3).expand(4, 3), 0),
        (torch.randn(4, 1).expand(4, 8), 1),
        (torch.randn(64).as_strided((8, 8), (4, 1)), 0),
    ],
)
def test_what_cannot_be_cut_or_would_not_be_less_stays(monkeypatch, x, dim):
    module = nn.Module()
    module.forward = lambda x: x * module.w
    module.w = nn.Parameter(torch.tensor(2.0))
    expected = gradients(module, x)
    input_reshard(module, SimulatedComm(MESH), axis="tp", dim=dim)
    with kept(monkeypatch) as found:
        same(gradients(module, x), expected)
    assert not blocks(found)
    assert wholes(found)


def test_strides_are_what_they_were():
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return None, *[torch.ones_like(t) for t in ctx.saved_tensors[1:]]

    class Module(nn.Module):
        def forward(self, x):
            y = x + 1
            views = (
                y.mT,
                y[:, ::2],
                y[..., 1:4],
                y.sum(2, keepdim=True).expand(-1, -1, 9),
                y[1],
                y[2],
            )
            self.given = (y, *views)
            return Seen.apply(*self.given)

    module = input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=0)
    x = torch.randn(4, 5, 6, requires_grad=True)
    module(x).backward()
    for found, given_ in zip(seen, module.given, strict=True):
        assert torch.equal(found, given_)
        assert found.stride() == given_.stride()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_any_dtype(dtype):
    class Module(nn.Module):
        def forward(self, x, where):
            return torch.where(x.bool(), where, where * where).real.sum()

    x = torch.arange(15).reshape(5, 3).to(dtype)
    where = torch.randn(5, 3, dtype=dtype if dtype.is_complex else torch.float32)
    where.requires_grad_()
    expected = gradients(Module(), x, where)
    module = input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=0)
    same(gradients(module, x, where), expected)


class Derived(nn.Module):
    """Weights and buffers that reach the product as casts, sums and products of themselves."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.register_buffer("table", torch.randn(6, 6))

    def forward(self, x):
        weight = 2 * (self.a.bfloat16().float() + self.b) * self.table.cos()
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(F.linear(x, self.a), self.frozen).float()
        return F.normalize(y @ weight, dim=-1) * torch.ones(6, 6).t()


def test_what_is_made_of_parameters_alone_is_no_activation(monkeypatch):
    module, x = Derived(), torch.randn(6, 6)
    expected = gradients(module, x)
    input_reshard(module, SimulatedComm(MESH), axis="tp", dim=0)

    def other(tensor):  # what gathering another weight from each rank would give
        raise AssertionError(tensor)

    with kept(monkeypatch) as found:
        same(gradients(module, x), expected)
    made = [module.a, module.b, module.frozen, module.table, module.a.bfloat16()]
    for view in views(found):
        whole = view.whole()
        assert not any(torch.equal(whole, t) or torch.equal(whole.mT, t) for t in made)
    assert blocks(found)


def test_a_buffer_that_holds_an_activation_is_a_buffer(monkeypatch):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(6, 4))
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.last.copy_(x)
            return self.last * self.w

    module = input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=0)
    with kept(monkeypatch) as found:
        module(torch.randn(6, 4)).sum().backward()
    assert storage_of(module.last) in map(storage_of, wholes(found))


def test_a_tensor_that_is_saved_twice_is_cut_once(monkeypatch):
    class Module(nn.Module):
        def forward(self, x):
            y = x + 1
            first = y.sin() * y.cos()
            with torch.no_grad():
                return first * y.exp()

    module, x = Module(), torch.randn(6, 4, requires_grad=True)
    input_reshard(module, SimulatedComm(MESH), axis="tp", dim=0)
    with kept(monkeypatch) as found:
        module(x)
    assert len(blocks(found)) == 3  # y, its sine and its cosine


def test_a_change_in_place_is_seen_or_does_not_matter():
    class Module(nn.Module):
        def forward(self, x, early):
            y = x + 1
            z = y.sin() + self.other(y) if early else y.sin()
            y.mul_(2)
            return z * y

        def other(self, y):
            return (y * y).sum()

    x = torch.randn(6, 4, requires_grad=True)
    reference = (x + 1).sin() * (2 * (x + 1))
    expected = torch.autograd.grad(reference.sum(), x)
    module = input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=0)
    same(torch.autograd.grad(module(x, False).sum(), x), expected)
    small = input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=7)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        small(x, False).sum().backward()

    linear = input_reshard(nn.Linear(4, 4), SimulatedComm(MESH), axis="tp", dim=0)
    out = linear(x)
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        out.sum().backward()


def test_double_backward():
    def twice(module):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4).requires_grad_()
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return [grad, *torch.autograd.grad(grad.square().sum(), [x, *module.parameters()])]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))
    plain = plain.double()
    expected = twice(plain)
    same(twice(input_reshard(plain, SimulatedComm(MESH), axis="tp", dim=0)), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_and_outside(reentrant):
    class Inside(nn.Module):
        def __init__(self, reshards):
            super().__init__()
            self.first, self.body = nn.Linear(8, 8), model()
            if reshards:
                input_reshard(self.body, SimulatedComm(MESH), axis="tp", dim=0)

        def forward(self, x):
            return checkpoint(self.body, self.first(x), use_reentrant=reentrant)

    torch.manual_seed(2)
    x, plain = torch.randn(6, 7, 8, requires_grad=True), Inside(False)
    outside = Inside(True)
    outside.load_state_dict(plain.state_dict())
    expected = gradients(copy.deepcopy(plain), x)
    same(gradients(outside, x), expected)
    same(gradients(input_reshard(plain, SimulatedComm(MESH), axis="tp", dim=0), x), expected)


def test_modules_in_modules_each_keep_their_own_way(monkeypatch):
    plain, x = model(), torch.randn(6, 7, 8)
    expected = gradients(copy.deepcopy(plain), x)
    input_reshard(plain, SimulatedComm(MESH), axis="tp", dim=0)
    input_reshard(plain[4], SimulatedComm(MESH), axis="dp", dim=1)
    with kept(monkeypatch) as found:
        same(gradients(plain, x), expected)
    axes = {b.cut.mesh.axes[0] for b in blocks(found)}
    assert axes == {"dp", "tp"}


def test_a_module_may_call_itself_and_be_in_flight_twice():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x, depth=3):
            y = self.inner(x).tanh()
            return self(y, depth - 1) * y if depth else y

    torch.manual_seed(0)
    module = Module()
    x, y = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    expected = [gradients(module, x), gradients(module, y)]
    input_reshard(module, SimulatedComm(MESH), axis="tp", dim=0)
    outs = [module(x), module(y)]
    for given_, out, wanted in zip((x, y), outs, expected):
        sources = [*module.parameters(), given_]
        same([out, *torch.autograd.grad(out.square().sum(), sources)], wanted)


def test_after_an_exception_nothing_is_left():
    class Module(nn.Module):
        def forward(self, x, inner=None):
            y = x.sin()
            if inner is not None:
                with contextlib.suppress(ValueError):
                    inner(y)
                return y.cos()
            raise ValueError("no")

    x = torch.randn(6, 4, requires_grad=True)
    for check in (False, True):
        module = input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=0, check=check)
        with pytest.raises(ValueError, match="no"):
            module(x)
        assert not home._HERE.running
        outer = input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=0)
        outer(x, module).sum().backward()
        module.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
        with pytest.raises(ZeroDivisionError):
            module(x)
        outer.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            outer(x, module)


def test_what_is_interrupted_inside_ends_with_what_is_around_it():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = input_reshard(Interrupted(), SimulatedComm(MESH), axis="tp", dim=0)

        def forward(self, x):
            with contextlib.suppress(KeyboardInterrupt):
                self.inner(x)
            return x.sin()

    x = torch.randn(6, 4, requires_grad=True)
    input_reshard(Module(), SimulatedComm(MESH), axis="tp", dim=0)(x).sum().backward()


def test_what_is_kept_dies_with_the_graph(monkeypatch):
    module = input_reshard(model(), SimulatedComm(MESH), axis="tp", dim=0)
    with kept(monkeypatch) as found:
        out = module(torch.randn(6, 7, 8))
    held = [weakref.ref(b) for b in blocks(found)]
    way = next(iter(module._forward_hooks.values())).way
    assert len(way.held) == len(held) > 3
    found.clear()
    gc.disable()
    try:
        del out
        assert not any(ref() for ref in held)
        assert not way.held
    finally:
        gc.enable()


def test_it_comes_off_and_a_second_replaces_the_first():
    module, x = model(), torch.randn(6, 7, 8)
    comm = SimulatedComm(MESH)
    input_reshard(module, comm, axis="tp", dim=0)
    input_reshard(module, comm, axis="dp", dim=1)
    assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
    out = module(x)
    assert remove_input_reshard(module) is module
    for name, hooks in vars(module).items():
        assert "forward" not in name or not hooks
    out.sum().backward()
    moved = comm.received.total()
    assert moved
    module(x).sum().backward()
    assert comm.received.total() == moved


def test_no_dim_or_one_rank_changes_nothing():
    module = model()
    assert input_reshard(module, SimulatedComm(MESH), axis="tp", dim=None) is module
    assert input_reshard(module, SimulatedComm(Mesh(tp=1)), axis="tp", dim=0) is module
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_without_gradients_nothing_is_kept(monkeypatch):
    module = input_reshard(model(), SimulatedComm(MESH), axis="tp", dim=0)
    with kept(monkeypatch) as found, torch.no_grad():
        module(torch.randn(6, 7, 8))
    with kept(monkeypatch) as found, torch.inference_mode():
        module(torch.randn(6, 7, 8))
    assert not found


def test_a_copy_of_a_module_keeps_its_own(monkeypatch):
    module = input_reshard(model(), SimulatedComm(MESH), axis="tp", dim=0)
    x = torch.randn(6, 7, 8)
    other = copy.deepcopy(module)
    same(gradients(other, x), gradients(module, x))


# --- DTensors --------------------------------------------------------------------------------


class Block(nn.Module):
    """A tensor parallel MLP of DTensors, between norms."""

    def __init__(self, comm, layout):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def made(*shape, to):
            full = torch.randn(shape, generator=generator, dtype=torch.float64)
            return distribute(full, to, comm).requires_grad_()

        mesh = comm.mesh
        self.norm = made(8, to=mesh.layout())
        self.up = made(8, 12, to=mesh.layout(None, "tp"))
        self.down = made(12, 8, to=mesh.layout("tp"))
        self.x = made(6, 8, to=layout)

    def forward(self, x):
        y = call(torch.mul, call(F.layer_norm, x, (8,)), self.norm)
        h = call(torch.sigmoid, call(torch.matmul, y, self.up))
        z = call(torch.matmul, h, self.down, out_layouts=x.layout)
        return call(torch.mul, z, x)


def grads_of(block, twice=False):
    comm = block.x.comm
    tensors = (block.x, block.norm, block.up, block.down)
    out = block(block.x)
    sources = [leaf for t in tensors for leaf in comm.leaves(t.local)]
    total = call(torch.sum, call(torch.square, out)).full()
    grads = torch.autograd.grad(total, sources, create_graph=twice)
    if twice:
        total = sum(g.square().sum() for g in grads)
        grads = torch.autograd.grad(total, sources)
    return [out, *grads]


@few
@given(layouts(MESH, (6, 8), partial=False), st.booleans(), st.integers(0, 1))
def test_dtensors_are_cut_where_they_are_replicated(layout, twice, dim):
    comm = SimulatedComm(MESH)
    block = Block(comm, layout)
    expected = grads_of(block, twice)
    input_reshard(block, comm, axis="tp", dim=dim, check=True)
    found = grads_of(block, twice)
    same(found[0].local, expected[0].local)
    same(found[1:], expected[1:])


def test_of_dtensors_only_what_is_replicated_is_cut(monkeypatch):
    comm = SimulatedComm(MESH)
    block = Block(comm, MESH.layout("dp"))
    input_reshard(block, comm, axis="tp", dim=0)
    with kept(monkeypatch) as found:
        block(block.x)
    assert {v.shape for v in views(found)} <= {(3, 8), (3, 1), (3,)}
    shapes = {tuple(t.shape) for t in wholes(found)}
    assert {(3, 4), (8, 4), (4, 8), (8,)} <= shapes
    assert (3, 8) not in shapes


class Raw(nn.Module):
    """Plain ops on the local tensors of DTensors, moved or not."""

    def __init__(self, to=None):
        super().__init__()
        self.to = to

    def forward(self, x):
        if self.to is not None:
            x = x.redistribute(self.to) if callable(getattr(x, "redistribute", None)) else x
        return [(leaf + 1).sin() for leaf in x.local]


@pytest.mark.parametrize(
    ("src", "to", "cut"),
    [
        (MESH.layout("dp"), None, True),
        (MESH.layout("tp"), None, False),
        (MESH.layout("dp"), MESH.layout("tp"), False),
        (MESH.layout("tp"), MESH.layout("dp"), True),
    ],
)
def test_local_tensors_are_what_their_type_says(monkeypatch, src, to, cut):
    comm = SimulatedComm(MESH)
    x = distribute(torch.randn(6, 8), src, comm).requires_grad_()
    module = input_reshard(Raw(to), comm, axis="tp", dim=0)
    with kept(monkeypatch) as found:
        module(x)
    assert bool(blocks(found)) == cut


def test_what_is_made_of_a_cut_and_a_whole_tensor_is_cut(monkeypatch):
    class Module(nn.Module):
        def forward(self, x, w):
            return [(a + b).sin() for a, b in zip(x.local, w.local)]

    comm = SimulatedComm(MESH)
    x = distribute(torch.randn(6, 8), MESH.layout("tp"), comm).requires_grad_()
    w = distribute(torch.randn(2, 8), MESH.layout(), comm)
    module = input_reshard(Module(), comm, axis="tp", dim=0)
    with kept(monkeypatch) as found:
        module(x, w)
    assert wholes(found)
    assert not blocks(found)


def test_a_module_inside_knows_what_that_around_it_knows(monkeypatch):
    comm = SimulatedComm(MESH)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = input_reshard(nn.Sigmoid(), comm, axis="tp", dim=0)

        def forward(self, x):
            return [self.inner(leaf + 1) for leaf in x.local]

    module = input_reshard(Module(), comm, axis="dp", dim=0)
    x = distribute(torch.randn(6, 8), MESH.layout("tp"), comm).requires_grad_()
    with kept(monkeypatch) as found:
        module(x)
    assert {b.cut.mesh.axes for b in blocks(found)} <= {("dp",)}
    assert wholes(found)


def test_what_a_program_gathers_is_cut_again(monkeypatch):
    comm = SimulatedComm(MESH)

    class Module(nn.Module):
        def forward(self, x):
            return spmd(lambda x: self.product(constrain(x.sin(), MESH.layout())))(x)

        def product(self, y):
            return y @ y.T

    module = input_reshard(Module(), comm, axis="tp", dim=0)
    x = distribute(torch.randn(6, 8), MESH.layout("tp"), comm).requires_grad_()
    with kept(monkeypatch) as found:
        module(x)
    assert (6, 8) in {b.cut.shape for b in blocks(found)}


def test_shard_map_inside(monkeypatch):
    def f(x):
        y = (x * (1 + axis_index("tp"))).sin()
        return psum(y, "tp")

    class Module(nn.Module):
        def forward(self, x):
            return shard_map(f, MESH, MESH.layout(), MESH.layout())(x)

    comm = SimulatedComm(MESH)
    x = distribute(torch.randn(6, 8), MESH.layout(), comm).requires_grad_()
    expected = torch.autograd.grad(Module()(x).full().sum(), x.local)
    module = input_reshard(Module(), comm, axis="tp", dim=0)
    same(torch.autograd.grad(module(x).full().sum(), x.local), expected)


def test_where_a_function_is_traced_the_module_is_itself():
    comm = SimulatedComm(MESH)
    module = input_reshard(nn.LayerNorm(8), comm, axis="tp", dim=0)
    x = distribute(torch.randn(6, 8), MESH.layout("dp"), comm).requires_grad_()
    out = spmd(functional(module))(x)
    assert isinstance(out, DTensor)
    out.full().sum().backward()


def functional(module):
    params = {name: p.detach() for name, p in module.named_parameters()}
    return lambda x: torch.func.functional_call(module, params, (x,))


# --- mistakes --------------------------------------------------------------------------------


def test_an_axis_that_is_not_there():
    with pytest.raises(MeshError) as error:
        input_reshard(nn.ReLU(), SimulatedComm(MESH), axis="sp", dim=0)
    assert str(error.value) == NO_AXIS


def test_a_mesh_is_no_comm():
    with pytest.raises(CommError) as error:
        input_reshard(nn.ReLU(), MESH, axis="tp", dim=0)
    assert str(error.value) == "Mesh(dp=2, tp=3) is not a Comm.\n\nPass connect(mesh)."


def test_a_dim_that_is_none():
    with pytest.raises(LayoutError) as error:
        input_reshard(nn.ReLU(), SimulatedComm(MESH), axis="tp", dim="0")
    assert str(error.value) == "dim '0' is not an int.\n\nName the dim to cut, or None."


def test_what_is_no_module():
    with pytest.raises(LayoutError, match=r"is not a torch\.nn\.Module"):
        input_reshard(torch.relu, SimulatedComm(MESH), axis="tp", dim=0)


def test_transforms_around_are_refused():
    module = input_reshard(nn.Linear(3, 3), SimulatedComm(MESH), axis="tp", dim=0)
    with pytest.raises(TraceError) as error:
        torch.func.grad(lambda x: module(x).sum())(torch.randn(3, 3))
    assert str(error.value) == TRANSFORM


NO_AXIS = """\
the Comm has no axis 'sp'.

  mesh: Mesh(dp=2, tp=3)

Name the axis whose ranks hold the same activations."""

TRANSFORM = """\
a transform of torch.func surrounds Linear, whose activations are kept as shards.

Use saved_as in a function that spmd traces, or .backward()."""
