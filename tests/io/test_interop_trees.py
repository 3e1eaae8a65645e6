"""Tests of interop with pytrees: models and optimizers hand over and take back."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fdtensor.io.interop.layouts import widened
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.tensors.connect import connect, distribute, redistribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import meshes, types

pytestmark = pytest.mark.mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)


# --- types on sub-meshes, without processes --------------------------------------------------


@given(st.data())
def test_a_type_on_a_sub_mesh_has_the_same_blocks_on_the_mesh(data):
    mesh = data.draw(meshes().filter(lambda mesh: mesh.ndim > 0))
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), min_size=1, unique=True))
    coord = mesh.coord(data.draw(st.sampled_from(mesh.ranks)))
    ranks = torch.tensor(mesh.coset(axes, coord)).reshape([mesh.axis_size(a) for a in axes])
    type = data.draw(types(Mesh.from_ranks(ranks, axes)))
    wide = widened(type, mesh)
    assert wide.mesh is mesh
    assert wide.layout.partial == type.layout.partial
    for rank in type.mesh.ranks:
        assert wide.index(rank) == type.index(rank)


def test_what_is_no_sub_mesh_has_no_type_on_the_mesh():
    mesh = Mesh(dp=2, tp=2)
    for ranks, axes in (([0, 2], "tp"), ([0], "tp"), ([4, 5], "tp"), ([0, 1], "x"), ([1, 0], "tp")):
        sub = Mesh.from_ranks(ranks, axes)
        assert widened(TensorType((4,), torch.float32, sub.layout(axes)), mesh) is None


# --- models ----------------------------------------------------------------------------------


def quiet():
    """torch logs advice on meshes that these tests do not follow."""
    import logging

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def square():
    from tests.support.device_meshes import init_device_mesh

    quiet()
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def a_model(device_mesh, fsdp=False):
    """The same model in a single process and in parallel; its norm is not parallelized by tp."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)

    def make():
        return torch.nn.Sequential(
            torch.nn.Linear(6, 10), torch.nn.LayerNorm(10), torch.nn.Linear(10, 5)
        ).double()

    single, model = make(), make()
    model.load_state_dict(single.state_dict())
    styles = {"0": ColwiseParallel(output_layouts=gathered()), "2": RowwiseParallel()}
    styles["2"] = RowwiseParallel(input_layouts=gathered())
    parallelize_module(model, device_mesh["tp"], styles)
    if fsdp:
        fully_shard(model, mesh=device_mesh["dp"])
    return single, model


def gathered():
    from torch.distributed.tensor import Replicate

    return Replicate()


def memory(tensor):
    return getattr(tensor, "_local_tensor", tensor).data_ptr()


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_model_hands_its_parameters_over_and_takes_them_back(pool4, fsdp):
    def check():
        from torch.distributed.tensor import DTensor as TorchDTensor

        from fdtensor.io.interop import from_torch, to_torch

        single, model = a_model(square(), fsdp)
        whole = single.state_dict()
        params = dict(model.named_parameters())
        ours = from_torch(params)
        assert [*ours] == [*params]
        for name, param in params.items():
            if isinstance(param, TorchDTensor):
                assert memory(ours[name].local) == memory(param)
                assert torch.equal(ours[name].full(), whole[name])
            else:
                assert ours[name] is param
        assert sum(isinstance(x, DTensor) for x in ours.values()) == (6 if fsdp else 4)

        back = to_torch(ours, like=params)
        for name, param in params.items():
            assert memory(back[name]) == memory(param)
            if isinstance(param, TorchDTensor):
                assert back[name].placements == param.placements
                assert back[name].device_mesh == param.device_mesh
            else:
                assert back[name] is param
        x = torch.ones(3, 6, dtype=torch.float64)
        model.load_state_dict(to_torch(from_torch(model.state_dict()), like=params), assign=True)
        assert {n: memory(p) for n, p in model.named_parameters()} == {
            n: memory(p) for n, p in params.items()
        }
        torch.testing.assert_close(model(x), single(x))

    pool4.run(check)


@pytest.mark.parametrize("fsdp", [False, True])
def test_training_goes_on_in_torch_after_a_step_here(pool4, fsdp):
    def check():
        from fdtensor.io.interop import from_torch, to_torch

        single, model = a_model(square(), fsdp)
        mesh = Mesh(dp=2, tp=2)
        x = torch.randn(4, 6, dtype=torch.float64)

        def loss(params, x):
            return torch.func.functional_call(single, params, (x,)).square().sum()

        state = model.state_dict()
        params = from_torch(state, mesh=mesh)
        comm = next(p.comm for p in params.values() if isinstance(p, DTensor))
        params = {
            name: p if isinstance(p, DTensor) else distribute(p, mesh.layout(), comm)
            for name, p in params.items()
        }
        grads = spmd(torch.func.grad(loss))(params, distribute(x, mesh.layout("dp"), comm))
        stepped = spmd(lambda p, g: {n: p[n] - 0.01 * g[n] for n in p})(params, grads)
        model.load_state_dict(to_torch(stepped, like=state), assign=True)

        def train(module):
            module.zero_grad()
            optimizer = torch.optim.SGD(module.parameters(), 0.01)
            loss = module(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        train(single)
        for rest in range(2):
            torch.testing.assert_close(train(model), train(single), msg=f"step {rest + 1}")

    pool4.run(check)


def test_an_optimizer_state_goes_both_ways(pool4):
    def check():
        from fdtensor.io.interop import from_torch, to_torch

        _, model = a_model(square(), fsdp=True)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        ours = from_torch(state)
        assert ours["param_groups"] == state["param_groups"]
        assert ours["state"][0]["step"] is state["state"][0]["step"]
        moment = ours["state"][0]["exp_avg"]
        assert str(moment.type) == "f64[10@(tp,dp),6]"
        optimizer.load_state_dict(to_torch(ours, like=state))
        again = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(again.full_tensor(), moment.full())
        assert again.placements == state["state"][0]["exp_avg"].placements

    pool4.run(check)


def test_gradients_of_a_tree_come_back_to_the_parameters(pool4):
    def check():
        from fdtensor.io.interop import from_torch

        _, model = a_model(square(), fsdp=True)
        params = dict(model.named_parameters())
        sum(x.full().square().sum() for x in from_torch(params).values()).backward()
        for param in params.values():
            assert param.grad.placements == param.placements
            assert torch.equal(param.grad.full_tensor(), 2 * param.detach().full_tensor())

    pool4.run(check)


def test_other_layouts_become_those_of_the_counterparts(pool4):
    def check():
        from fdtensor.io.interop import from_torch, to_torch

        single, model = a_model(square(), fsdp=True)
        state = model.state_dict()
        mesh = Mesh(dp=2, tp=2)
        ours = from_torch(state, mesh=mesh)
        tree = {
            "a": redistribute(ours, Layout(mesh, [StridedShard(0, 3), R])),
            "b": [redistribute(ours, Mesh.from_ranks([3, 1], "x").layout("x"))["0.weight"]],
            "c": ours["0.weight"],
            "step": 3,
        }
        whole = torch.zeros(10, 6, dtype=torch.float64)
        like = {"a": state, "b": [state["0.weight"]], "c": whole, "step": None, "more": 1}
        back = to_torch(tree, like=like)
        assert back["step"] == 3
        for name, tensor in single.state_dict().items():
            assert back["a"][name].placements == state[name].placements
            assert memory(back["a"][name]) != memory(state[name])
            assert torch.equal(back["a"][name].full_tensor(), tensor)
        assert torch.equal(back["b"][0].full_tensor(), single.state_dict()["0.weight"])
        assert type(back["c"]) is torch.Tensor
        assert torch.equal(back["c"], single.state_dict()["0.weight"])

    pool4.run(check)


# --- sub-meshes ------------------------------------------------------------------------------


def test_tensors_on_sub_meshes_are_on_them_or_on_the_whole_mesh(pool4):
    def check():
        from torch.distributed.tensor import Shard, distribute_tensor

        from fdtensor.io.interop import from_torch, to_torch

        device_mesh = square()
        rank = dist.get_rank()
        full = torch.arange(15.0).view(5, 3)
        tree = {
            axis: distribute_tensor(full, device_mesh[axis], [Shard(i)])
            for i, axis in enumerate(("dp", "tp"))
        }
        ours = from_torch(tree)
        assert ours["tp"].mesh.ranks == ((0, 1) if rank < 2 else (2, 3))
        assert ours["dp"].mesh.ranks == (rank % 2, rank % 2 + 2)
        mesh = Mesh.from_device_mesh(device_mesh)
        wide = from_torch(tree, mesh=mesh)
        assert {axis: str(x.type) for axis, x in wide.items()} == {
            "dp": "f32[5@dp,3]",
            "tp": "f32[5,3@tp]",
        }
        for x in (*ours.values(), *wide.values()):
            assert torch.equal(x.full(), full)
        turned = redistribute(wide, mesh.layout("tp"))
        for found in (to_torch(ours), to_torch(wide, like=tree), to_torch(turned, like=tree)):
            for axis, x in found.items():
                assert x.device_mesh == tree[axis].device_mesh
                assert x.placements == tree[axis].placements
                assert torch.equal(x.full_tensor(), full)
        assert memory(to_torch(wide, like=tree)["tp"]) == memory(tree["tp"])
        assert to_torch(wide)["tp"].device_mesh == device_mesh

    pool4.run(check)


def test_slices_and_flattened_meshes_go_both_ways(pool4):
    def check():
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        from fdtensor.io.interop import from_torch, to_torch
        from tests.support.device_meshes import init_device_mesh

        quiet()
        cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        flat, line = cube["dp", "cp"]._flatten("dp_cp"), cube._flatten("all")
        full = torch.arange(35.0).view(7, 5)
        tree = {
            "slice": distribute_tensor(full, cube["cp", "tp"], [Replicate(), Shard(1)]),
            "flat": distribute_tensor(full, flat, [Shard(0)]),
            "all": distribute_tensor(full, line, [Shard(0)]),
        }
        ours = from_torch(tree)
        axes = {name: x.mesh.axes for name, x in ours.items()}
        assert axes == {"slice": ("cp", "tp"), "flat": ("dp_cp",), "all": ("all",)}
        assert ours["all"].mesh.ranks == (0, 1, 2, 3)
        back = to_torch(ours, like=tree)
        for name, x in tree.items():
            assert torch.equal(ours[name].full(), full)
            assert back[name].device_mesh == x.device_mesh
            assert memory(back[name]) == memory(x)
            assert torch.equal((back[name] + x).full_tensor(), 2 * full)

    pool4.run(check)


def test_ranks_agree_once_for_all_tensors_of_a_mesh(pool4):
    def check():
        from fdtensor.io.interop import from_torch
        from fdtensor.runtime.funcol import FuncolComm

        _, model = a_model(square(), fsdp=True)
        agreed = []
        agree = FuncolComm.agree

        def counted(self, about, *args):
            agreed.append(about)
            agree(self, about, *args)

        FuncolComm.agree = counted
        try:
            from_torch(dict(model.named_parameters()))
        finally:
            FuncolComm.agree = agree
        return agreed

    assert pool4.run(check) == [["from_torch"] * 2] * 4  # norms are on dp alone


# --- what is refused -------------------------------------------------------------------------


def refusals():
    """What each mistake says, by name, on this rank."""
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _MaskPartial

    from fdtensor.io.interop import from_torch, to_torch

    device_mesh = square()
    comm = connect(Mesh(dp=2, tp=2))
    full = torch.arange(8.0)
    good = distribute_tensor(full, device_mesh, [Shard(0), Replicate()])
    masked = _MaskPartial(reduce_op="sum", offset_shape=torch.Size([8]), offset_dim=0)
    odd = TorchDTensor.from_local(full, device_mesh, [masked, Replicate()])
    short = full[dist.get_rank() % 2 :]
    wrong = TorchDTensor.from_local(
        short, device_mesh, [Replicate()] * 2, shape=full.shape, stride=(1,)
    )
    ours = from_torch(good)
    ragged = distribute(full, Layout(comm.mesh, [Ragged(0, (3, 5)), S0]), comm)
    tree = {"a": ours, "b": ours, "c": ours, "d": full, "e": ours}
    like = {"a": good, "b": torch.zeros(3), "c": 1, "d": good}
    attempts = {
        "placements": lambda: from_torch({"good": good, "odd": [odd]}),
        "local tensors": lambda: from_torch({"good": good, "wrong": wrong}),
        "a mesh": lambda: from_torch([good], mesh=Mesh(tp=4)),
        "a module": lambda: from_torch(torch.nn.Linear(1, 1)),
        "counterparts": lambda: to_torch(tree, like=like),
        "a plain tensor": lambda: to_torch(full),
        "a model as like": lambda: to_torch({"x": ours}, like=torch.nn.Linear(1, 1)),
        "blocks": lambda: to_torch({"x": [ragged]}),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except FdtensorError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_every_rank_refuses_all_leaves_at_once(pool4):
    first, *others = pool4.run(refusals)
    assert all(said == first for said in others)
    assert first == REFUSALS


REFUSALS = {
    "placements": """\
ValueTreeError: 1 of 2 torch DTensors have no meaning here.

  tree['odd'][0]: _MaskPartial(reduce_op=sum, offset_shape=torch.Size([8]), offset_dim=0) has no \
counterpart here: its local tensors alone do not say what the tensor is.

Redistribute it in torch first, to Replicate or Shard.""",
    "local tensors": """\
CommError: from_torch cannot start: tree['wrong'] of rank 1 has shape (7,), expected (8,); \
tree['wrong'] of rank 3 has shape (7,), expected (8,).

Give every rank a tensor of the shape, dtype and device that its type says: \
type.local_shape(rank), type.dtype.""",
    "a mesh": """\
ValueTreeError: 1 of 1 torch DTensors have no meaning here.

  tree[0]: Mesh(dp=2, tp=2) is no sub-mesh of Mesh(tp=4).

A sub-mesh has axes of the same names, and all ranks along them.""",
    "a module": """\
LayoutError: got a Linear, not a torch DTensor.

Pass a torch.distributed.tensor.DTensor or a pytree that has some, such as \
dict(model.named_parameters()); for plain tensors there are distribute and from_local.""",
    "counterparts": """\
ValueTreeError: 4 of 5 leaves cannot become tensors of torch.

  tree['b']: it is f32[8], but like has f32[3].
  tree['c']: like has int at this place.
  tree['d']: it is a plain tensor, but like has a torch DTensor.
  tree['e']: like has nothing at this place.

Let like have a tensor of the same shape and dtype at every place.""",
    "a plain tensor": """\
LayoutError: got a Tensor, not a DTensor of this library.

Pass a DTensor or a pytree that has some.""",
    "a model as like": """\
LayoutError: like is a Linear, not a tensor or a pytree that has some.

Pass model.state_dict() for a model.""",
    "blocks": """\
ValueTreeError: 1 of 1 leaves cannot become tensors of torch.

  tree['x'][0]: no placements of torch describe the blocks of f32[8@(dp:3:5,tp)].

Redistribute it first, to Layout(Mesh(dp=2, tp=2), (Shard(0), Shard(0))).""",
}
