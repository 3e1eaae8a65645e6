"""Tests of optim: each optimizer of torch on any layouts, beside torch on one process."""

import inspect
import pickle
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import optim
from fdtensor.io.checkpoint import load_checkpoint, save_checkpoint
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors import optim as kinds
from fdtensor.tensors.blockwise import NOT_BY_ELEMENT
from fdtensor.tensors.call import call
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.grad_norms import clip_grad_norm, gradients
from fdtensor.tensors.optim import states
from fdtensor.tensors.optim.numbers import Numbers, greatest, least
from fdtensor.tensors.scaling import LossScale
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import meshes, types
from fdtensor.testing.values import gather_full, scatter

R, S = Replicate(), Shard
MESH = Mesh(dp=3, tp=2)
COMM = SimulatedComm(MESH)
ROWS, COLUMNS = MESH.layout("dp"), MESH.layout(None, "tp")
BOTH = MESH.layout("dp", "tp")
fewer = settings(max_examples=settings.default.max_examples // 8)

TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}

REFUSED = {"LBFGS", "SparseAdam"}

OPTIONS = {
    "ASGD": [{}, {"t0": 1, "lambd": 0.1, "weight_decay": 0.1, "maximize": True}],
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}, {"capturable": True}],
    "Adafactor": [{}, {"weight_decay": 0.1, "maximize": True, "eps": (1e-6, 1e-2), "d": 2.0}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adam": [{}, {"weight_decay": 0.1, "amsgrad": True, "maximize": True, "betas": (0.8, 0.9)}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"capturable": True}],
    "Adamax": [{}, {"weight_decay": 0.1, "maximize": True}, {"capturable": True}],
    "Muon": [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"capturable": True}],
    "RAdam": [{}, {"weight_decay": 0.1, "betas": (0.9, 0.99)}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True}],
    "Rprop": [{}, {"etas": (0.6, 1.3), "step_sizes": (1e-3, 0.1)}, {"capturable": True}],
    "SGD": [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "dampening": 0.5},
    ],
}
"""Options of each optimizer that steps on DTensors; those of a kind change other lines of it."""

BY_ELEMENT = sorted(OPTIONS.keys() - set(NOT_BY_ELEMENT))

SHAPE = (7, 5)


@pytest.fixture(autouse=True)
def _only_programs(monkeypatch):
    """No step may run on replicated operands because torch's code asks for a value."""
    monkeypatch.setattr(Spmd, "_on_replicas", lambda *_: pytest.fail("no program"))


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "SGD", "Adam"])
def test_the_first_step_may_have_another_rate_than_the_option(name):
    mesh = Mesh(b=2)
    comm = SimulatedComm(mesh)
    plain = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    reference = getattr(torch.optim, name)([plain], lr=0.5)
    opt = getattr(optim, name)(lr=0.5)
    params = [distribute(plain.detach().clone(), mesh.layout("b"), comm)]
    state = opt.init(params)
    for rate in (0.25, 0.125):
        plain.grad = plain.detach() * 2
        grads = [distribute(plain.grad, mesh.layout("b"), comm)]
        reference.param_groups[0]["lr"] = rate
        reference.step()
        params, state = opt.step(params, grads, state, lr=rate)
        assert torch.allclose(params[0].full(), plain.detach(), rtol=1e-6)


def test_every_optimizer_of_torch_is_in_the_table():
    assert set(TORCH) == OPTIONS.keys() | REFUSED
    assert {name for name in kinds.__all__ if name != "Optimizer"} == set(TORCH)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_is_refused_by_name(name):
    with pytest.raises(FdtensorError) as error:
        getattr(optim, name)()
    assert error.value.sentence.startswith(f"{name} cannot step on DTensors: ")
    assert error.value.hint


def spread(full, layout, seed=0):
    """A DTensor, its pending terms split at random."""
    type = TensorType(tuple(full.shape), full.dtype, layout)
    return DTensor(scatter(full, type, seed), type, COMM)


def fulls(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()}


def beside_torch(name, options, params, grads, layouts, grad_layouts, **numbers):
    """Parameters after a step for each of `grads`: torch's on one process, and ours."""
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    launch = {k: v for k, v in options.items() if k != "capturable"}  # for accelerators only
    theirs = TORCH[name](leaves.values(), **launch)
    opt = getattr(optim, name)(**options)
    ours = {k: spread(p, layouts[k]) for k, p in params.items()}
    state = opt.init(ours)
    for seed, step in enumerate(grads):
        for k, leaf in leaves.items():
            leaf.grad = step[k].clone()
        theirs.step()
        given = {k: spread(g, grad_layouts[k], seed) for k, g in step.items()}
        ours, state = opt.step(ours, given, state, **numbers)
    assert all(ours[k].layout is layouts[k] for k in ours)
    for k, held in state.items():
        for x in held.values():
            assert x.layout is (layouts[k] if x.shape == ours[k].shape else x.layout)
    return {k: leaf.detach() for k, leaf in leaves.items()}, ours, state


CASES = [(name, options) for name, several in OPTIONS.items() for options in several]
PENDING = MESH.layout(None, "dp", partial={"tp": "sum"})
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def doubles():
    """torch counts steps in the default dtype, and forgets digits of float64 in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.few(16)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_steps_are_those_of_one_process(name, options, doubles):
    """In float64, where only what is computed otherwise could differ."""
    x, *grads = (fulls({"x": SHAPE}, torch.float64, seed) for seed in range(7))
    plain, ours, _ = beside_torch(name, options, x, grads, {"x": BOTH}, {"x": PENDING})
    found = gather_full(ours["x"].local, ours["x"].type)
    torch.testing.assert_close(found, plain["x"], **TIGHT)


OTHERS = {
    "cut by both, the inner first": (SHAPE, MESH.layout(None, ("tp", "dp"))),
    "strided": (SHAPE, Layout(MESH, [S(1), StridedShard(1, 2)])),
    "ragged, an empty block": (SHAPE, Layout(MESH, [Ragged(0, (4, 0, 3)), R])),
    "one number": ((), MESH.layout()),
    "three dims": ((2, 3, 4), MESH.layout(None, "dp", "tp")),
    "vector": ((5,), MESH.layout("tp")),
    "empty": ((0, 3), BOTH),
}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_float32_is_within_a_millionth_and_by_element_the_same(name):
    """The empty one is left out where torch divides by its size, and others where it takes none."""
    usable = {"Muon": 3, "Adafactor": 6}.get(name, len(OTHERS))
    turn = sorted(OPTIONS).index(name) % usable
    places = {"both": (SHAPE, BOTH), **dict([list(OTHERS.items())[turn]])}
    shapes, layouts = ({k: place[i] for k, place in places.items()} for i in range(2))
    params, *grads = (fulls(shapes, torch.float32, seed) for seed in range(4))
    plain, ours, state = beside_torch(name, {}, params, grads, layouts, layouts)
    for k, full in plain.items():
        found = gather_full(ours[k].local, ours[k].type)
        torch.testing.assert_close(found, full, rtol=1e-6, atol=1e-6)
        if name not in NOT_BY_ELEMENT:
            assert torch.equal(found, full)
    counts = [x for held in state.values() for n, x in held.items() if n == "step"]
    assert all(x.full() == 3 and x.type == TensorType((), x.dtype, MESH.layout()) for x in counts)


@st.composite
def problems(draw):
    """An optimizer, a parameter and a gradient of any types on one mesh."""
    name = draw(st.sampled_from(sorted(OPTIONS)))
    mesh = draw(meshes(max_axes=2))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    param = draw(types(mesh, shape, torch.float32))
    return name, param, draw(types(mesh, shape, torch.float32, partial=("sum", "avg")))


@fewer
@given(problems())
def test_any_layouts_step_as_one_process(problem):
    name, param, grad = problem
    comm = SimulatedComm(param.mesh)
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(-9, 9, param.shape, generator=generator).float()
    leaf = full.clone().requires_grad_()
    theirs, opt = TORCH[name]([leaf]), getattr(optim, name)()
    x = DTensor(scatter(full, param, 0), param, comm)
    state = opt.init(x)
    for seed in range(2):
        leaf.grad = torch.randint(-9, 9, param.shape, generator=generator).float()
        theirs.step()
        x, state = opt.step(x, DTensor(scatter(leaf.grad, grad, seed), grad, comm), state)
        assert x.type is param.cotangent()
    found = gather_full(x.local, x.type)
    torch.testing.assert_close(found, leaf.detach(), rtol=1e-6, atol=1e-6)


# --- programs --------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """The steps that were traced: one entry each."""
    found = []
    original = states.stepped
    monkeypatch.setattr(states, "stepped", lambda *a: found.append(a[0]) or original(*a))
    states.step_program.cache_clear()
    return found


def test_a_hundred_learning_rates_take_one_trace_for_each_type(traces):
    mesh = Mesh(x=2)
    comm = SimulatedComm(mesh)
    params = [distribute(torch.randn(4, 4), mesh.layout(*dims), comm) for dims in ("x", "x", ())]
    opt = optim.SGD(momentum=0.9)
    state = opt.init(params)
    for i in range(100):
        params, state = opt.step(params, params, state, lr=1e-3 / (i + 1))
    assert len(traces) == 2
    optim.SGD(lr=0.5, momentum=0.9).step(params, params, state)
    assert len(traces) == 2


def test_other_numbers_may_change_too_and_zero_switches_them_off(traces):
    x = spread(torch.randn(SHAPE), BOTH)
    leaf = x.full().requires_grad_()
    theirs, opt = torch.optim.SGD([leaf], momentum=0.9, weight_decay=0.1), optim.SGD(momentum=0.9)
    state = opt.init(x)
    for decay in (0.1, 0.2, 0.0, 0.3, 0.0):
        leaf.grad = leaf.detach() + 1
        theirs.param_groups[0]["weight_decay"] = decay
        theirs.step()
        grad = call(torch.add, x, 1.0)
        x, state = opt.step(x, grad, state, lr=torch.tensor(1e-3), weight_decay=decay)
    assert len(traces) == 2
    torch.testing.assert_close(x.full(), leaf.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_what_works_by_element_sends_nothing(name):
    x = spread(torch.randn(SHAPE), BOTH)
    opt = getattr(optim, name)()
    state = opt.init(x)
    before = COMM.calls.total()
    for _ in range(2):
        x, state = opt.step(x, x, state)
    assert COMM.calls.total() == before


def test_muon_gathers_each_matrix_once_in_half_precision():
    comm = SimulatedComm(MESH)
    x = distribute(torch.randn(12, 8), BOTH, comm)
    opt = optim.Muon()
    opt.step(x, x, opt.init(x))
    assert max(comm.received.values()) == 12 * 8 * 2 * 5 // 6


def test_muon_may_cut_its_matrices_where_that_is_asked_for():
    type = TensorType(SHAPE, torch.float32, BOTH)
    held = {"param": type, "state": {"momentum_buffer": type}}
    numbers = {"lr": TensorType((), torch.float64, MESH.layout())}
    for exact in (True, False):
        program = states.step_program(torch.optim.Muon, (("exact", exact),))
        text = str(program.trace(held, type, numbers))
        assert ("orthogonalized" in text) == exact
        assert ("addmm" in text) != exact


@pytest.mark.parametrize("layout", [ROWS, COLUMNS, BOTH, MESH.layout()], ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_scales_a_momentum_in_bfloat16_as_torch_does_in_every_layout(shape, layout):
    whole = torch.randn(shape).bfloat16()
    plain = whole.clone().requires_grad_()
    other = torch.optim.Muon([plain], nesterov=False)
    opt, x = optim.Muon(nesterov=False), distribute(whole, layout, COMM)
    state = opt.init(x)
    for _ in range(2):
        plain.grad = torch.randn(shape).bfloat16()
        x, state = opt.step(x, distribute(plain.grad, layout, COMM), state)
        other.step()
        assert torch.equal(state["momentum_buffer"].full(), other.state[plain]["momentum_buffer"])


def test_gradients_that_are_elsewhere_move_together():
    params = [spread(torch.randn(SHAPE), BOTH) for _ in range(9)]
    grads = [spread(torch.randn(SHAPE), PENDING) for _ in range(9)]
    opt = optim.SGD()
    before = COMM.calls.total()
    opt.step(params, grads, opt.init(params))
    assert COMM.calls.total() <= before + 2


# --- training --------------------------------------------------------------------------------

OTHER = Mesh.from_ranks([[4, 1], [0, 5]], ("a", "b"))


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD"])
def test_training_goes_on_from_files_on_another_mesh_to_the_bit(name):
    opt = getattr(optim, name)(**({"momentum": 0.9} if name == "SGD" else {}))
    full, *grads = (fulls({"w": SHAPE, "b": (5,)}, torch.float32, seed) for seed in range(7))

    def trained(params, state, steps):
        for step in steps:
            given = {k: distribute(g, params[k].layout, COMM) for k, g in step.items()}
            params, state = opt.step(params, given, state)
        return params, state

    params = {k: distribute(f, BOTH if k == "w" else ROWS, COMM) for k, f in full.items()}
    straight, _ = trained(params, opt.init(params), grads)
    params, state = trained(params, opt.init(params), grads[:3])
    with tempfile.TemporaryDirectory() as path:
        save_checkpoint({"model": params, "optim": state}, path, COMM)
        to = {"w": OTHER.layout(None, ("b", "a")), "b": OTHER.layout()}
        types = {k: TensorType(f.shape, f.dtype, to[k]) for k, f in full.items()}
        wanted = {"model": types, "optim": opt.init(types)}
        loaded = load_checkpoint(path, wanted, COMM)
    assert loaded["model"]["w"].mesh is OTHER
    params, state = trained(loaded["model"], loaded["optim"], grads[3:])
    for k, x in straight.items():
        assert torch.equal(params[k].full(), x.full())
    for held in state.values():
        assert all(x.mesh is OTHER for x in held.values())


def model_and_batch():
    full = fulls({"w": SHAPE, "b": (5,)}, torch.float32)
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(9))
    return full, x


def loss_of(params, x):
    return (x @ params["w"] + params["b"]).tanh().square().sum()


def test_inside_of_a_traced_function_the_step_is_traced_along():
    full, x = model_and_batch()
    opt = optim.AdamW(weight_decay={"w": 0.1, "b": 0.0})

    def train(params, state, x, lr):
        grads, loss = torch.func.grad_and_value(loss_of)(params, x)
        params, state = opt.step(params, grads, state, lr=lr)
        return params, state, loss

    params = {"w": distribute(full["w"], BOTH, COMM), "b": distribute(full["b"], ROWS, COMM)}
    ours, state, batch = params, opt.init(params), distribute(x, ROWS, COMM)
    plain, kept = full, opt.init(full)
    step = spmd(train)
    for i in range(3):
        lr = torch.tensor(0.1 / (i + 1))
        ours, state, loss = step(ours, state, batch, lr)
        plain, kept, expected = train(plain, kept, x, lr)
        torch.testing.assert_close(loss.full(), expected)
    assert len(step.programs) == 1
    for k in full:
        assert ours[k].layout is params[k].layout
        assert state[k]["exp_avg"].layout is params[k].layout
        torch.testing.assert_close(ours[k].full(), plain[k])


def test_clipping_scaling_and_accumulating_are_those_of_torch():
    full, x = model_and_batch()
    params = {"w": distribute(full["w"], BOTH, COMM), "b": distribute(full["b"], ROWS, COMM)}
    leaves = {k: f.clone().requires_grad_() for k, f in full.items()}
    opt, theirs = optim.Adam(lr=0.1), torch.optim.Adam(leaves.values(), lr=0.1)
    state, scale = opt.init(params), LossScale(256.0)
    grad = spmd(torch.func.grad(lambda params, x, s: loss_of(params, x) * s))
    for i in range(4):
        bad = i == 1
        halves = [distribute(half, ROWS, COMM) for half in x.chunk(2)]
        first, second = (grad(params, h, float("inf") if bad else scale.value) for h in halves)
        total = {k: call(torch.add, first[k], second[k]) for k in first}
        grads, skip = scale.unscaled(total)
        scale = scale.after(skip)
        assert skip == bad
        if not skip:
            grads, _ = clip_grad_norm(grads, 1.0)
            params, state = opt.step(params, grads, state)
            theirs.zero_grad()
            loss_of(leaves, x).backward()
            torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
            theirs.step()
    assert state["w"]["step"].full() == 3
    for k, leaf in leaves.items():
        torch.testing.assert_close(params[k].full(), leaf.detach())


def test_options_may_be_pytrees_like_groups_of_parameters():
    full = {"norm": [torch.ones(5), torch.ones(3)], "mlp": torch.ones(5, 3)}
    leaves = {k: [f.clone().requires_grad_() for f in [*v]] for k, v in full.items() if k == "norm"}
    mlp = full["mlp"].clone().requires_grad_()
    groups = [
        {"params": leaves["norm"], "weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"params": [mlp], "lr": 0.3},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.2)
    opt = optim.AdamW(
        lr={"norm": 0.1, "mlp": 0.3},
        weight_decay={"norm": [0.0, 0.0], "mlp": 0.2},
        betas={"norm": (0.5, 0.9), "mlp": [0.9, 0.999]},
    )
    params = {"norm": [spread(f, ROWS) for f in full["norm"]], "mlp": spread(full["mlp"], BOTH)}
    state = opt.init(params)
    for i in range(2):
        for leaf in (*leaves["norm"], mlp):
            leaf.grad = leaf.detach() * 2
        theirs.step()
        for group in theirs.param_groups:
            group["lr"] /= 2
        grads = spmd(lambda ps: {"norm": [2 * p for p in ps["norm"]], "mlp": 2 * ps["mlp"]})(params)
        rates = {"norm": 0.1 / 2**i, "mlp": 0.3 / 2**i}
        params, state = opt.step(params, grads, state, lr=rates)
    for found, leaf in zip([*params["norm"], params["mlp"]], [*leaves["norm"], mlp]):
        torch.testing.assert_close(found.full(), leaf.detach(), rtol=1e-6, atol=1e-6)


def test_a_scheduler_of_torch_gives_the_learning_rates():
    stand_in = torch.optim.SGD([torch.zeros(())], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(stand_in, 5)
    leaf = torch.ones(SHAPE).requires_grad_()
    theirs = torch.optim.SGD([leaf], lr=0.1)
    other = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 5)
    x, opt = spread(torch.ones(SHAPE), BOTH), optim.SGD()
    state = opt.init(x)
    for _ in range(4):
        leaf.grad = torch.ones(SHAPE)
        theirs.step()
        other.step()
        x, state = opt.step(x, spread(leaf.grad, BOTH), state, lr=scheduler.get_last_lr()[0])
        stand_in.step()
        scheduler.step()
    torch.testing.assert_close(x.full(), leaf.detach())


def test_a_parameter_without_a_gradient_stays():
    params = {"a": spread(torch.ones(SHAPE), BOTH), "b": spread(torch.ones(5), ROWS)}
    opt = optim.AdamW()
    state = opt.init(params)
    after, held = opt.step(params, {"a": params["a"], "b": None}, state)
    assert after["b"] is params["b"]
    assert held["b"] is state["b"]
    assert held["a"]["step"].full() == 1
    assert opt.step(params, {"a": None, "b": None}, state) == (params, state)
    assert opt.step({}, {}, opt.init({})) == ({}, {})


def test_parameters_may_be_on_several_meshes():
    comm = SimulatedComm(Mesh(world=6))
    full = torch.randn(SHAPE)
    params = [distribute(full, layout, comm) for layout in (BOTH, OTHER.layout("b"))]
    opt = optim.AdamW(lr=0.1)
    params, _ = opt.step(params, params, opt.init(params))
    assert torch.equal(params[0].full(), params[1].full())


def test_parameters_that_require_grad_do_so_after_a_step():
    full, x = model_and_batch()
    params = {"w": distribute(full["w"], BOTH, COMM), "b": distribute(full["b"], ROWS, COMM)}
    params = {k: p.detach().requires_grad_() for k, p in params.items()}
    opt, step = optim.AdamW(), spmd(loss_of)
    state = opt.init(params)
    for _ in range(2):
        step(params, distribute(x, ROWS, COMM)).full().backward()
        before = params
        params, state = opt.step(params, gradients(params), state)
        assert not torch.equal(params["w"].full(), before["w"].full())
    assert all(t.is_leaf and t.requires_grad for p in params.values() for t in p.local)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "RMSprop", "SGD"])
def test_a_step_that_is_differentiable_has_the_derivatives_of_torch(name, doubles):
    full, by = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    leaves = [full.clone().requires_grad_(), by.clone().requires_grad_()]
    param = leaves[0].clone()
    options = {"momentum": 0.9} if name == "SGD" else {}
    theirs = TORCH[name]([param], differentiable=True, **options)
    if name == "SGD":  # torch detaches its first momentum, which is the gradient
        theirs.state[param]["momentum_buffer"] = torch.zeros(SHAPE)
    param.grad = leaves[1] * leaves[0].sin()
    theirs.step()
    expected = torch.autograd.grad(param.square().sum(), leaves)
    opt = getattr(optim, name)(differentiable=True, **options)
    x, y = (distribute(f, BOTH, COMM).detach().requires_grad_() for f in (full, by))
    after, _ = opt.step(x, call(lambda x, y: y * x.sin(), x, y), opt.init(x))
    call(lambda x: x.square().sum(), after).full().backward()
    for found, grad in zip(gradients([x, y]), expected):
        torch.testing.assert_close(found.full(), grad, rtol=1e-6, atol=1e-6)


class Signs(torch.optim.Optimizer):
    """An optimizer that is not torch's, and makes its state in its first step."""

    def __init__(self, params, lr, decay=0.0):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(state["mean"].sign(), alpha=-group["lr"])


def test_an_optimizer_of_your_own_steps_too():
    full = torch.randn(SHAPE)
    leaf = full.clone().requires_grad_()
    theirs, opt = Signs([leaf], 0.1, 0.1), optim.Optimizer(Signs, {"lr": 0.1, "decay": 0.1})
    x = spread(full, BOTH)
    state = opt.init(x)
    for seed in range(3):
        leaf.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
        theirs.step()
        x, state = opt.step(x, spread(leaf.grad, PENDING), state)
    torch.testing.assert_close(x.full(), leaf.detach(), rtol=1e-6, atol=1e-6)
    assert state["mean"].layout is BOTH
    assert repr(opt) == "Signs(lr=0.1, decay=0.1)"


def test_an_optimizer_is_a_value_that_prints_and_pickles():
    opt = optim.AdamW(lr=0.1, weight_decay={"a": 0.0, "b": torch.tensor(0.5)})
    assert repr(opt) == "AdamW(lr=0.1, weight_decay={'a': 0.0, 'b': 0.5})"
    assert repr(pickle.loads(pickle.dumps(opt))) == repr(opt)
    assert pickle.loads(pickle.dumps(optim.AdamW)) is optim.AdamW
    assert inspect.signature(optim.SGD).parameters["momentum"].default == 0
    assert "exact" in (optim.Muon.__doc__ or "")


def test_half_precision_is_rounded_once():
    """As kernels do with Python numbers: 0-d tensors would be rounded to bfloat16 before."""
    half, rate = torch.tensor([1.0, 3.0]).bfloat16(), torch.tensor(1e-3, dtype=torch.float64)
    with Numbers():
        found = [half * rate, half.clone().mul_(rate), half.add(half, alpha=-rate)]
        found += [half.clone().addcdiv_(half, half, value=rate), half.lerp(half * 2, rate)]
    wide = half.float()
    expected = [wide * 1e-3, wide * 1e-3, wide * (1 - 1e-3), wide + 1e-3, wide * (1 + 1e-3)]
    assert all(f.dtype is torch.bfloat16 for f in found)
    assert all(torch.equal(f, e.bfloat16()) for f, e in zip(found, expected, strict=True))


@given(st.lists(st.floats(-9, 9), min_size=2, max_size=4), st.data())
def test_the_extremes_of_numbers_and_tensors_are_those_of_python(values, data):
    mixed = [
        torch.tensor(v, dtype=torch.float64) if data.draw(st.booleans()) else v for v in values
    ]
    assert float(least(*mixed)) == min(values)
    assert float(greatest(*mixed)) == max(values)


# --- mistakes --------------------------------------------------------------------------------


def mistakes():
    x = distribute(torch.ones(SHAPE), BOTH, COMM)
    adam = optim.AdamW()
    state = adam.init({"w": x})
    return {
        "refused": lambda: optim.LBFGS(lr=1.0),
        "unknown": lambda: optim.Muon(beta=0.9),
        "launch": lambda: optim.SGD(fused=True),
        "value": lambda: optim.AdamW(lr={"a": 0.1, "b": -1.0}, eps=1e-6),
        "derivative": lambda: optim.ASGD(differentiable=True),
        "params": lambda: adam.init({"a": torch.ones(3), "b": x, "c": 3}),
        "muon": lambda: optim.Muon().init([x, distribute(torch.ones(3), ROWS, COMM)]),
        "whole numbers": lambda: adam.init(distribute(torch.arange(3), ROWS, COMM)),
        "structure": lambda: adam.step({"w": x}, {"v": x}, state),
        "prefix": lambda: optim.AdamW(weight_decay={"v": 0.1}).init({"w": x}),
        "fit": lambda: adam.step(
            {"w": x}, {"w": distribute(torch.ones(3), ROWS, COMM)}, {"w": {"step": x}}
        ),
        "other state": lambda: adam.step(torch.ones(2), torch.ones(2), {"step": torch.ones(())}),
        "changing": lambda: adam.step({"w": x}, {"w": x}, state, betas=(0.9, 0.99)),
    }


@pytest.mark.parametrize("name", mistakes())
def test_mistakes_are_told(name):
    with pytest.raises(FdtensorError) as error:
        mistakes()[name]()
    assert str(error.value) == TEXTS[name]


TEXTS = {
    "refused": """\
LBFGS cannot step on DTensors: it calls the loss as often as the values of losses tell it to.

Write its loop around spmd(torch.func.grad_and_value(loss)), or replicate the parameters and give \
torch.optim.LBFGS their local tensors.""",
    "unknown": """\
Muon has no option 'beta'.

  options: lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn, \
exact

Parameters are not among them: opt.init(params) takes those.""",
    "launch": """\
fused=True is not for SGD on DTensors: a program is made of ops that say what they compute.

Leave fused out.""",
    "value": """\
AdamW(eps=1e-06, lr=-1.0) cannot be: Invalid learning rate: -1.0.

Give it the values that torch.optim.AdamW takes.""",
    "derivative": """\
differentiable=True is not for ASGD on DTensors: torch overwrites the rate that derivatives need.

Leave differentiable out.""",
    "params": """\
2 of 3 parameters cannot be those of AdamW.

  params['a']: is a plain tensor of shape (3,) beside DTensors
  params['c']: is of type int

Parameters are DTensors, or inside of a traced function plain tensors, of floating point or \
complex numbers.""",
    "muon": """\
1 of 2 parameters cannot be those of Muon.

  params[1]: Muon only supports 2D parameters whereas we found a parameter with size: \
torch.Size([3])

Parameters are DTensors, or inside of a traced function plain tensors, of floating point or \
complex numbers.""",
    "whole numbers": """\
1 of 1 parameters cannot be those of AdamW.

  params: is of torch.int64, which has no gradients

Parameters are DTensors, or inside of a traced function plain tensors, of floating point or \
complex numbers.""",
    "structure": """\
grads does not have the structure of the parameters.

  grads: different keys: lacks 'w', has 'v' beside

Pass a pytree like that of the parameters.""",
    "prefix": """\
weight_decay is no prefix of the pytree of parameters.

  weight_decay: different keys: lacks 'w', has 'v' beside

Give one value, or a pytree of values like the parameters or a prefix of them.""",
    "fit": """\
gradients or state do not fit the parameters of AdamW.

  grads['w']: is f32[3@dp], expected f32[7@dp,5@tp]
  state['w']: has step, expected exp_avg, exp_avg_sq, step

Gradients have the shape, dtype and mesh of their parameters; state is what init or the step \
before returned, with the same options.""",
    "other state": """\
this is no state of AdamW.

  has:   step
  needs: exp_avg, step

Pass what init returned, or the step before, with the same options.""",
    "changing": """\
betas of AdamW cannot change from step to step.

  given:   (0.9, 0.99)
  numbers: lr, eps, weight_decay

Give it to AdamW(...): another optimizer goes on with the state of this one.""",
}
