"""Tests of interop: beside torch.distributed.tensor, on real processes."""

import itertools
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fdtensor.layouts.errors import CommError, FdtensorError, LayoutError, MeshError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.strategies import layouts, meshes, shapes
from fdtensor.testing.values import full_tensor, scatter

pytestmark = pytest.mark.mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)


# --- layouts, without processes --------------------------------------------------------------


def device_mesh_of(mesh):
    """A DeviceMesh that has no process groups."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.tensor(mesh.ranks).view(mesh.sizes)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.axes, _init_backend=False, _rank=0)


def strided_and_shards(mesh, factors=(1, 2, 3, 4)):
    """All ways to cut dim 0 along every axis, with strided shards or without, or not to cut it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    one = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=f) for f in factors)]
    return itertools.product(one, repeat=mesh.ndim)


MESHES = (Mesh(x=4), Mesh(x=2, y=2), Mesh(x=3, y=2), Mesh(x=2, y=3), Mesh(x=2, y=1, z=3))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_strided_shards_are_decoded_as_torch_decodes_them(mesh):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import _StridedShard

    from fdtensor.io.interop import layout_from_torch

    device_mesh = device_mesh_of(mesh)
    for placements in strided_and_shards(mesh):
        layout = layout_from_torch(device_mesh, placements, (12,))
        expected = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, device_mesh)
        if expected is None:
            assert layout.cuts(0) == layout_from_torch(
                device_mesh, placements, (12,), use_strided_shard_as_shard_order=False
            ).cuts(0)
            assert StridedShard in map(type, layout.placements)
            assert any(isinstance(p, _StridedShard) for p in placements)
        else:
            axes = tuple(mesh.axes[i] for entry in expected for i in entry.mesh_dims)
            assert layout.cuts(0) == axes
            assert set(layout.placements) <= {R, S0}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 5, 7, 12])
def test_cuts_from_left_to_right_are_the_blocks_that_torch_computes(mesh, size):
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    from fdtensor.io.interop import layout_from_torch

    device_mesh = device_mesh_of(mesh)
    for placements in strided_and_shards(mesh, factors=(2, 3)):
        layout = layout_from_torch(
            device_mesh, placements, (size,), use_strided_shard_as_shard_order=False
        )
        held = TensorType((size,), torch.int64, layout)
        for rank in mesh.ranks:
            coord = list(mesh.coord(rank))
            shape, offset = _compute_local_shape_and_global_offset(
                (size,), mesh.sizes, coord, placements
            )
            assert held.local_shape(rank) == shape
            assert held.offset(rank) == offset or shape == (0,)


@given(st.data())
def test_what_torch_placements_can_say_reads_back_as_the_same_blocks(data):
    from fdtensor.io.interop import layout_from_torch, layout_to_torch

    mesh = data.draw(meshes().filter(lambda mesh: mesh.ndim > 0))
    shape = data.draw(shapes())
    type = TensorType(shape, torch.int64, data.draw(layouts(mesh, shape, partial=["sum", "max"])))
    try:
        placements, by_order = layout_to_torch(type)
    except LayoutError:
        assert {Ragged, StridedShard} & {*map(type_of, type.layout.placements)}
        return
    layout = layout_from_torch(
        device_mesh_of(mesh), placements, shape, use_strided_shard_as_shard_order=by_order
    )
    back = TensorType(shape, torch.int64, layout)
    assert back.layout.partial == type.layout.partial
    for rank in mesh.ranks:
        assert [*map(tuple, back.index(rank))] == [*map(tuple, type.index(rank))]
    if {Ragged, StridedShard}.isdisjoint(map(type_of, type.layout.placements)):
        assert layout == type.layout
    assert by_order == (StridedShard not in map(type_of, layout.placements))


def type_of(x):
    return type(x)


def test_a_shard_order_is_the_order_of_the_layout():
    from torch.distributed.tensor import Shard as TorchShard

    from fdtensor.io.interop import layout_from_torch

    mesh = Mesh(dp=3, tp=2)
    placements = [TorchShard(-1), TorchShard(1)]
    layout = layout_from_torch(device_mesh_of(mesh), placements, (4, 6), [(1, (1, 0))])
    assert layout == Layout(mesh, [S1, S1], {1: ("tp", "dp")})


def test_a_ragged_shard_of_even_blocks_is_a_shard_in_torch():
    from torch.distributed.tensor import Shard as TorchShard

    from fdtensor.io.interop import layout_to_torch

    type = TensorType((5,), torch.int64, Layout(Mesh(x=3), [Ragged(0, (2, 2, 1))]))
    assert layout_to_torch(type) == ((TorchShard(0),), True)


def test_uneven_strided_shards_that_look_like_an_order_are_told_apart():
    from fdtensor.io.interop import layout_to_torch

    cuts = TensorType((7,), torch.int64, Layout(Mesh(x=3, y=2), [StridedShard(0, 2), S0]))
    order = TensorType((7,), torch.int64, Layout(Mesh(x=3, y=2), [S0, S0], {0: ("y", "x")}))
    assert layout_to_torch(cuts)[0] == layout_to_torch(order)[0]
    assert (layout_to_torch(cuts)[1], layout_to_torch(order)[1]) == (False, True)


@pytest.fixture
def fake_rank():
    """Makes this process the given rank of six, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("by_order", [True, False])
def test_uneven_strided_shards_are_read_as_what_the_rank_holds(fake_rank, by_order):
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from fdtensor.io.interop import from_torch, to_device_mesh, to_torch

    fake_rank(4)
    mesh = Mesh(x=3, y=2)
    order = Layout(mesh, [S0, S0], {0: ("y", "x")})
    cuts = Layout(mesh, [StridedShard(0, 2), S0])
    held = TensorType((7,), torch.float32, order if by_order else cuts)
    assert held.local_shape(4) == ((0,) if by_order else (1,))
    local = torch.zeros(held.local_shape(4))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    theirs = DTensor.from_local(
        local, to_device_mesh(mesh), placements, shape=torch.Size((7,)), stride=(1,)
    )
    assert from_torch(theirs).type == held
    again = to_torch(from_torch(theirs))
    assert again._spec.use_strided_shard_as_shard_order is by_order
    assert from_torch(again).type == held
    wrong = DTensor.from_local(
        torch.zeros(3), to_device_mesh(mesh), placements, shape=torch.Size((7,)), stride=(1,)
    )
    with pytest.raises(LayoutError) as raised:
        from_torch(wrong)
    echo = "; rank 4 has shape (3,), expected (1,)"  # of the five other ranks
    assert str(raised.value).replace(echo, "") == NEITHER


def test_importing_the_library_leaves_what_it_needs_late_alone():
    script = (
        "import sys, fdtensor, fdtensor.runtime.funcol, fdtensor.io.interop; "
        "fdtensor.from_torch, fdtensor.to_torch; "
        "late = ('torch.distributed.tensor', 'torch.distributed.checkpoint', 'safetensors'); "
        "print([name for name in sys.modules if name.startswith(late)])"
    )
    env_path = [entry for entry in sys.path if entry]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {env_path!r}; {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"


# --- on four ranks ---------------------------------------------------------------------------


def quiet():
    """torch logs advice on meshes that these tests do not follow."""
    import logging

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def filled(layout, shape=(8, 6), dtype=torch.float64, seed=0):
    """A type, a full tensor and this rank's block of it, its pending terms split at random."""
    type = TensorType(shape, dtype, layout)
    full = full_tensor(type, seed)
    place = layout.mesh.position(dist.get_rank())
    return type, full, scatter(full, type, seed)[place]


def torch_dtensor(local, device_mesh, placements, full):
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, device_mesh, placements, shape=full.shape, stride=full.stride()
    )


def check_round_trip(device_mesh, placements, type, full, local):
    """Both ways, with shared memory, and back to the same mesh and placements."""
    from fdtensor.io.interop import from_torch, to_torch

    theirs = torch_dtensor(local, device_mesh, placements, full)
    ours = from_torch(theirs)
    rank = dist.get_rank()
    assert (ours.shape, ours.dtype) == (tuple(full.shape), full.dtype)
    assert ours.local.data_ptr() == theirs._local_tensor.data_ptr()
    assert [*map(tuple, ours.type.index(rank))] == [*map(tuple, type.index(rank))], ours.type
    assert ours.layout.partial == type.layout.partial
    assert torch.equal(ours.full(), full), ours.type
    again = to_torch(ours)
    assert again.device_mesh is device_mesh or again.device_mesh == device_mesh
    assert again.placements == theirs.placements
    assert again._local_tensor.data_ptr() == local.data_ptr()
    assert (again.shape, again.stride()) == (full.shape, full.stride())
    assert torch.equal(again.full_tensor(), theirs.full_tensor())
    assert torch.equal(again.full_tensor(), full), placements
    return ours


def all_placements(ndim, ops=("sum", "avg", "max")):
    """All placements of a matrix on a mesh of so many axes, here and in torch."""
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    one = [(R, TorchReplicate()), (S0, TorchShard(0)), (S1, TorchShard(-1))]
    one += [(Partial(op), TorchPartial(op)) for op in ops]
    for pairs in itertools.product(one, repeat=ndim):
        ours, theirs = zip(*pairs, strict=True)
        if len({p.reduce_op for p in ours if isinstance(p, Partial)}) < 2:
            yield ours, theirs


def go_both_ways(sizes, shape):
    from tests.support.device_meshes import init_device_mesh

    quiet()
    device_mesh = init_device_mesh("cpu", sizes)
    mesh = Mesh.from_device_mesh(device_mesh)
    assert mesh.axes == tuple(f"dim_{i}" for i in range(len(sizes)))
    for seed, (ours, theirs) in enumerate(all_placements(len(sizes))):
        type, full, local = filled(Layout(mesh, ours), shape, seed=seed)
        got = check_round_trip(device_mesh, theirs, type, full, local)
        assert got.layout == type.layout


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (1, 3), (0, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_every_placement_goes_both_ways(pool4, sizes, shape):
    pool4.run(go_both_ways, sizes, shape)


def test_every_reduce_op_goes_both_ways(pool4):
    def check():
        from torch.distributed.tensor import Partial as TorchPartial

        from fdtensor.io.interop import from_torch, to_torch
        from tests.support.device_meshes import init_device_mesh

        device_mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
        mesh = Mesh.from_device_mesh(device_mesh)
        for op in ("sum", "product", "max", "min", "band", "bor", "bxor"):
            _, full, local = filled(Layout(mesh, [Partial(op)]), dtype=torch.int64)
            ours = from_torch(torch_dtensor(local, device_mesh, [TorchPartial(op)], full))
            assert torch.equal(ours.full(), full)
            assert to_torch(ours).placements == (TorchPartial(op),)

    pool4.run(check)


def test_strided_shards_and_orders_of_axes_go_both_ways(pool4):
    def check():
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        from tests.support.device_meshes import init_device_mesh

        quiet()
        dp_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        line = init_device_mesh("cpu", (4,))
        mesh, flat = Mesh.from_device_mesh(dp_tp), Mesh.from_device_mesh(line)
        order = Layout(mesh, [S0, S0], {0: ("tp", "dp")})
        for shape in ((8, 4), (7, 5), (3, 2), (1, 1)):
            strided = [_StridedShard(0, split_factor=2), Shard(0)]
            ours = check_round_trip(dp_tp, strided, *filled(order, shape))
            assert ours.layout == order
            for layout, placements in [
                (Layout(mesh, [StridedShard(0, 3), R]), [_StridedShard(0, split_factor=3), 0]),
                (
                    Layout(mesh, [S0, StridedShard(0, 2)]),
                    [Shard(0), _StridedShard(-2, split_factor=2)],
                ),
                (
                    Layout(mesh, [StridedShard(1, 3), S0]),
                    [_StridedShard(1, split_factor=3), Shard(0)],
                ),
                (Layout(flat, [StridedShard(0, 2)]), [_StridedShard(0, split_factor=2)]),
            ]:
                placements = [p or Replicate() for p in placements]
                device_mesh = dp_tp if layout.mesh is mesh else line
                type, full, local = filled(layout, shape)
                ours = check_round_trip(device_mesh, placements, type, full, local)
                assert ours.type == type

    pool4.run(check)


def test_a_shard_order_of_a_spec_is_read_and_written_so_that_ops_keep_it(pool4):
    def check():
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor
        from torch.distributed.tensor._dtensor_spec import (
            DTensorSpec,
            ShardOrderEntry,
            TensorMeta,
        )

        from fdtensor.io.interop import from_torch, to_torch
        from tests.support.device_meshes import init_device_mesh

        quiet()
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = Mesh.from_device_mesh(device_mesh)
        type, full, local = filled(Layout(mesh, [S0, S0], {0: ("tp", "dp")}), (7, 4))
        spec = DTensorSpec(
            device_mesh,
            (Shard(0), Shard(0)),
            tensor_meta=TensorMeta(full.shape, full.stride(), full.dtype),
            shard_order=(ShardOrderEntry(0, (1, 0)),),
        )
        theirs = DTensor(local.requires_grad_(), spec, requires_grad=True)
        ours = from_torch(theirs)
        assert ours.type == type
        ours.full().square().sum().backward()
        assert torch.equal(theirs.grad.full_tensor(), 2 * full)
        other = distribute_tensor(full, device_mesh, [Shard(0), Shard(0)])
        assert torch.equal((to_torch(ours.detach()) + other).full_tensor(), 2 * full)

    pool4.run(check)


def test_sub_meshes_and_other_arrangements_go_both_ways(pool4):
    def check():
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        from fdtensor.io.interop import from_torch, to_device_mesh, to_torch
        from tests.support.device_meshes import init_device_mesh

        quiet()
        rank = dist.get_rank()
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        across = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
        for device_mesh in (whole["tp"], whole["dp"], across):
            mesh = Mesh.from_device_mesh(device_mesh)
            assert rank in mesh.ranks
            type, full, local = filled(Layout(mesh, [S0, S1][: mesh.ndim]), (5, 3))
            placements = [Shard(0), Shard(1)][: mesh.ndim]
            check_round_trip(device_mesh, placements, type, full, local)

        # torch's groups ascend, its coordinates here do not: they disagree on who holds what
        permuted = DeviceMesh("cpu", [[3, 1], [0, 2]])
        mesh = Mesh.from_device_mesh(permuted)
        type, full, local = filled(Layout(mesh, [R, R]))
        with pytest.raises(LayoutError, match=r"^torch does not say which rank along mesh axis"):
            from_torch(distribute_tensor(full, permuted, [Shard(0), Replicate()]))
        ours = from_torch(torch_dtensor(local, permuted, [Replicate()] * 2, full))
        cut = ours.redistribute(Layout(mesh, [S0, S1]))
        with pytest.raises(LayoutError, match=r"^torch does not say which rank along mesh axis"):
            to_torch(cut, permuted)
        assert torch.equal(to_torch(cut).full_tensor(), full)
        good = to_device_mesh(mesh)
        assert good is to_device_mesh(mesh)
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
            theirs = distribute_tensor(full, good, placements)
            assert torch.equal(from_torch(theirs).full(), full)
            assert torch.equal(theirs.redistribute(placements=[Replicate()] * 2).to_local(), full)

    pool4.run(check)


def test_a_tensor_made_here_gets_a_device_mesh_with_groups_for_its_axes(pool4):
    def check():
        from torch.distributed.tensor import Replicate, Shard

        import fdtensor as fd

        quiet()
        for mesh in (Mesh(a=2, b=2), Mesh(b=1, c=4), Mesh.from_ranks([1, 3], "x")):
            comm = fd.connect(mesh)
            full = torch.arange(15.0).view(5, 3)
            layout = Layout(mesh, [S0, S1][: mesh.ndim])
            theirs = fd.to_torch(fd.distribute(full, layout, comm))
            assert theirs.device_mesh.mesh.flatten().tolist() == list(mesh.ranks)
            assert theirs.device_mesh.mesh_dim_names == mesh.axes
            assert theirs.placements == (Shard(0), Shard(1))[: mesh.ndim]
            if mesh.coord(dist.get_rank()) is None:
                assert theirs.to_local().numel() == 0
                continue
            assert torch.equal(theirs.full_tensor(), full)
            total = theirs.sum().redistribute(placements=[Replicate()] * mesh.ndim)
            assert total.to_local().item() == full.sum().item()
            mm = theirs.t() @ theirs
            assert torch.equal(fd.from_torch(mm).full(), full.t() @ full)

    pool4.run(check)


def test_strides_of_the_full_tensor_follow_the_local_one(pool4):
    def check():
        from torch.distributed.tensor import Shard, distribute_tensor

        from fdtensor.io.interop import from_torch, to_torch
        from tests.support.device_meshes import init_device_mesh

        device_mesh = init_device_mesh("cpu", (4,))
        image = torch.randn(8, 4, 6, 5).contiguous(memory_format=torch.channels_last)
        for full in (image, torch.randn(8, 6).t(), torch.randn(8, 1, 4), torch.randn(6, 4)):
            for dim in range(full.dim()):
                theirs = distribute_tensor(full, device_mesh, [Shard(dim)], src_data_rank=None)
                local = theirs.to_local()
                again = to_torch(from_torch(theirs))
                assert again.to_local().stride() == local.stride()
                assert again.stride() == theirs.stride() or min(local.shape) < 2
        even = distribute_tensor(image, device_mesh, [Shard(0)], src_data_rank=None)
        local = even.to_local().contiguous(memory_format=torch.channels_last)
        theirs = torch_dtensor(local, device_mesh, [Shard(0)], image)
        assert to_torch(from_torch(theirs)).stride() == image.stride()

    pool4.run(check)


def test_results_of_torch_ops_are_read_as_they_are(pool4):
    def check():
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        from fdtensor.io.interop import from_torch, to_torch
        from tests.support.device_meshes import init_device_mesh

        quiet()
        device_mesh = init_device_mesh("cpu", (2, 2))
        full = torch.arange(24.0).view(2, 3, 4).requires_grad_()
        x = distribute_tensor(full, device_mesh, [Shard(2), Shard(0)])
        flat = x.view(6, 4).view(24)
        assert _StridedShard in map(type_of, flat.placements)
        assert torch.equal(from_torch(flat).full(), full.view(24))
        assert torch.equal(to_torch(from_torch(flat)).full_tensor(), full.view(24))
        under_way = x.redistribute(placements=[Replicate(), Replicate()], async_op=True)
        arrived = from_torch(under_way)
        assert type_of(arrived.local) is torch.Tensor
        (arrived.full() ** 2).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * full)
        assert x.grad.placements == x.placements

    pool4.run(check)


def test_fsdp_over_tensor_parallel_parameters_go_both_ways(pool4):
    def check():
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        from fdtensor.io.interop import from_torch, to_torch
        from tests.support.device_meshes import init_device_mesh

        quiet()
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        seen = {}
        for name, param in model.named_parameters():
            ours = from_torch(param)
            seen[name] = str(ours.type)
            assert ours.local.data_ptr() == param._local_tensor.data_ptr()
            assert torch.equal(ours.full(), param.full_tensor())
            assert torch.equal(ours.full(), whole[name])
            again = to_torch(ours)
            assert (again.placements, again.shape) == (param.placements, param.shape)
            assert again.device_mesh == param.device_mesh
            assert torch.equal(again.full_tensor(), param.full_tensor())
        assert seen == {
            "0.weight": "f32[10@(tp,dp),6]",
            "0.bias": "f32[10@(tp,dp)]",
            "2.weight": "f32[5@dp,10@tp]",
            "2.bias": "f32[5@dp]",
        }
        model(torch.ones(2, 6)).square().sum().backward()
        for param in model.parameters():
            assert torch.equal(from_torch(param.grad).full(), param.grad.full_tensor())
            before = param.grad.full_tensor()
            from_torch(param).full().square().sum().backward()
            assert type(param.grad) is type(param.data)
            assert param.grad.placements == param.placements
            total = before + 2 * param.detach().full_tensor()
            torch.testing.assert_close(param.grad.full_tensor(), total)

    pool4.run(check)


# --- derivatives -----------------------------------------------------------------------------


def cotangents(placements):
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if p.is_partial() else p for p in placements)


@pytest.mark.parametrize("shape", [(8, 4), (7, 5)], ids=str)
def test_gradients_flow_from_here_to_a_torch_dtensor(pool4, shape):
    def check():
        from fdtensor.io.interop import from_torch
        from tests.support.device_meshes import init_device_mesh

        quiet()
        device_mesh = init_device_mesh("cpu", (2, 2))
        mesh = Mesh.from_device_mesh(device_mesh)
        for ours, theirs in all_placements(2, ops=("sum", "avg")):
            _, full, local = filled(Layout(mesh, ours), shape)
            x = torch_dtensor(local, device_mesh, theirs, full)
            x = torch.nn.Parameter(x)
            weight = torch.arange(float(full.numel()), dtype=full.dtype).view(shape)
            got = from_torch(x)
            assert got.local.requires_grad
            assert not got.local.is_leaf
            (got.redistribute(Layout(mesh, [S1, S0])).full() * weight).sum().backward()
            assert x.grad.placements == cotangents(x.placements)
            assert (x.grad.shape, x.grad.stride()) == (full.shape, full.stride())
            assert torch.equal(x.grad.full_tensor(), weight)
            with torch.no_grad():
                assert not from_torch(x).local.requires_grad
            assert not from_torch(x.detach()).local.requires_grad

    pool4.run(check)


@pytest.mark.parametrize("shape", [(8, 4), (7, 5)], ids=str)
def test_gradients_flow_from_a_torch_dtensor_back_here(pool4, shape):
    def check():
        from torch.distributed.tensor import Replicate, distribute_tensor

        import fdtensor as fd

        quiet()
        mesh = Mesh(a=2, b=2)
        comm = fd.connect(mesh)
        for ours, theirs in all_placements(2, ops=("sum", "avg")):
            type, full, local = filled(Layout(mesh, ours), shape)
            local.requires_grad_()
            x = fd.to_torch(fd.DTensor(local, type, comm))
            assert x.requires_grad
            assert x.placements == tuple(
                p if not p.is_shard() or p.dim >= 0 else type_of(p)(1) for p in theirs
            )
            weight = torch.arange(float(full.numel()), dtype=full.dtype).view(shape)
            spread = distribute_tensor(weight, x.device_mesh, [Replicate(), Replicate()])
            (x.redistribute(placements=[Replicate()] * 2) * spread).sum().backward()
            cut = fd.distribute(weight, type.cotangent().layout, comm)
            assert torch.equal(local.grad, cut.local)
            with torch.no_grad():
                assert not fd.to_torch(fd.DTensor(local, type, comm)).requires_grad

    pool4.run(check)


def test_a_cotangent_of_other_placements_becomes_that_of_the_type(pool4):
    def check():
        from torch.distributed.tensor import Partial, Replicate, Shard

        import fdtensor as fd
        from fdtensor.io.interop import layout_from_torch

        quiet()
        mesh = Mesh(a=2, b=2)
        comm = fd.connect(mesh)
        for layout in (Layout(mesh, [R, R]), Layout(mesh, [S1, S1], {1: ("b", "a")})):
            x = fd.distribute(torch.zeros(7, 5), layout, comm).requires_grad_()
            theirs = fd.to_torch(x)
            device_mesh = theirs.device_mesh
            for placements in (
                [Shard(0), Shard(0)],
                [Partial(), Shard(1)],
                [Partial(), Replicate()],
                [Replicate(), Replicate()],
            ):
                given = layout_from_torch(device_mesh, placements, (7, 5))
                _, full, term = filled(given, (7, 5), torch.float32)
                x.local.grad = None
                theirs.backward(
                    torch_dtensor(term, device_mesh, placements, full), retain_graph=True
                )
                assert torch.equal(x.local.grad, fd.distribute(full, layout, comm).local)

    pool4.run(check)


def test_second_derivatives_flow_through_both_doors(pool4):
    def check():
        from torch.distributed.tensor import Partial, Shard

        import fdtensor as fd
        from fdtensor.io.interop import from_torch, to_torch
        from tests.support.device_meshes import init_device_mesh

        quiet()
        device_mesh = init_device_mesh("cpu", (4,))
        mesh = Mesh.from_device_mesh(device_mesh)
        for ours, theirs in ((S0, Shard(0)), (fd.Partial(), Partial())):
            _, full, local = filled(Layout(mesh, [ours]), (7, 2))
            local.requires_grad_()
            x = torch_dtensor(local, device_mesh, [theirs], full)
            y = to_torch(from_torch(x))
            cube = from_torch(y).full() ** 3
            (first,) = torch.autograd.grad(cube.sum(), y, create_graph=True)
            assert torch.equal(first.full_tensor(), 3 * full**2)
            (second,) = torch.autograd.grad(from_torch(first).full().sum(), y)
            assert torch.equal(second.full_tensor(), 6 * full)

    pool4.run(check)


# --- what is refused -------------------------------------------------------------------------


def refusals():
    """What each mistake says, by name, on this rank."""
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _MaskPartial

    import fdtensor as fd
    from fdtensor.io.interop import layout_from_torch, to_device_mesh
    from tests.support.device_meshes import init_device_mesh

    quiet()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = Mesh(dp=2, tp=2)
    comm = fd.connect(mesh)
    full = torch.arange(8.0)
    theirs = distribute_tensor(full, device_mesh, [Shard(0), Replicate()])
    ours = fd.from_torch(theirs)
    masked = _MaskPartial(reduce_op="sum", offset_shape=torch.Size((8, 2)), offset_dim=0)
    mixed = torch_dtensor(full, device_mesh, [TorchPartial("sum"), TorchPartial("avg")], full)
    wrong = torch_dtensor(full, device_mesh, [Shard(0), Replicate()], full)
    simulated = fd.distribute(full, Layout(mesh, [S0, R]), SimulatedComm(mesh))
    ragged = fd.distribute(full, Layout(mesh, [Ragged(0, (3, 5)), S0]), comm)
    attempts = {
        "a plain tensor": lambda: fd.from_torch(full),
        "a simulated comm": lambda: fd.from_torch(theirs, SimulatedComm(mesh)),
        "a simulated tensor": lambda: fd.to_torch(simulated),
        "a masked partial": lambda: layout_from_torch(device_mesh, [masked, Replicate()], (8, 2)),
        "a dim out of range": lambda: layout_from_torch(device_mesh, [Shard(-2), Shard(0)], (8,)),
        "mixed reduce ops": lambda: fd.from_torch(mixed),
        "a wrong local shape": lambda: fd.from_torch(wrong),
        "a ragged shard": lambda: fd.to_torch(ragged),
        "another mesh": lambda: fd.to_torch(ours, to_device_mesh(Mesh(dp=4))),
        "other names": lambda: fd.to_torch(ours, to_device_mesh(Mesh(tp=2, dp=2))),
        "no axes": lambda: to_device_mesh(Mesh()),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except FdtensorError as error:
            said[name] = (type(error), str(error))
    return said


def test_every_rank_refuses_and_says_what_to_do(pool4):
    first, *others = pool4.run(refusals)
    assert all(said == first for said in others)
    assert {name: text for name, (_, text) in first.items()} == REFUSALS
    kinds = {name: kind for name, (kind, _) in first.items()}
    assert {name for name, kind in kinds.items() if kind is MeshError} == {
        "another mesh",
        "other names",
        "no axes",
    }
    assert {name for name, kind in kinds.items() if kind is CommError} == {
        "a simulated comm",
        "a simulated tensor",
        "a wrong local shape",
    }


NEITHER = """\
the blocks of this torch DTensor cannot be written: its uneven strided shards fit neither as an \
order of axes nor as cuts from left to right.

  order:   f32[7@(y,x)]
  cuts:    f32[7@(x/2,y)]
  problem: from_torch cannot start: rank 4 has shape (3,), expected (1,).

Redistribute it in torch first, to placements without _StridedShard."""

REFUSALS = {
    "a plain tensor": """\
got a Tensor, not a torch DTensor.

Pass a torch.distributed.tensor.DTensor or a pytree that has some, such as \
dict(model.named_parameters()); for plain tensors there are distribute and from_local.""",
    "a simulated comm": """\
a torch DTensor has the local tensor of one rank, but a value of this Comm has those of all.

  comm: SimulatedComm(Mesh(dp=2, tp=2))

Use a FuncolComm: connect(mesh) where a process group is up.""",
    "a simulated tensor": """\
a torch DTensor has the local tensor of one rank, but a value of this Comm has those of all.

  comm: SimulatedComm(Mesh(dp=2, tp=2))

Use a FuncolComm: connect(mesh) where a process group is up.""",
    "a masked partial": """\
_MaskPartial(reduce_op=sum, offset_shape=torch.Size([8, 2]), offset_dim=0) has no counterpart \
here: its local tensors alone do not say what the tensor is.

  placements: (_MaskPartial(reduce_op=sum, offset_shape=torch.Size([8, 2]), offset_dim=0), \
Replicate())
  mesh:       Mesh(dp=2, tp=2)

Redistribute it in torch first, to Replicate or Shard.""",
    "a dim out of range": """\
Shard(dim=-2) cuts dim -2 of a tensor that has 1 dims.

  placements: (Shard(dim=-2), Shard(dim=0))
  mesh:       Mesh(dp=2, tp=2)

A torch placement counts dims from the front, or from the back below 0.""",
    "mixed reduce ops": """\
mesh axes 'dp' and 'tp' have different reduce ops pending, sum and avg: the result would depend \
on which comes first.

  layout: (dp=P(sum), tp=P(avg))

Reduce one of them before the other becomes partial.""",
    "a wrong local shape": """\
from_torch cannot start: rank 0 has shape (8,), expected (4,); rank 1 has shape (8,), expected \
(4,); rank 2 has shape (8,), expected (4,); rank 3 has shape (8,), expected (4,).

Give every rank a tensor of the shape, dtype and device that its type says: \
type.local_shape(rank), type.dtype.""",
    "a ragged shard": """\
no placements of torch describe the blocks of f32[8@(dp:3:5,tp)].

  layout: (dp=S(0, [3,5]), tp=S(0))
  mesh:   Mesh(dp=2, tp=2)

Redistribute it first, to Layout(Mesh(dp=2, tp=2), (Shard(0), Shard(0))).""",
    "another mesh": """\
this DeviceMesh is not the mesh of the tensor.

  given:  Mesh(dp=4)
  tensor: Mesh(dp=2, tp=2)

Redistribute the tensor to the other mesh first, or leave device_mesh out.""",
    "other names": """\
this DeviceMesh is not the mesh of the tensor.

  given:  Mesh(tp=2, dp=2)
  tensor: Mesh(dp=2, tp=2)

Redistribute the tensor to the other mesh first, or leave device_mesh out.""",
    "no axes": """\
torch has no mesh without axes.

Use a mesh of one axis of one rank.""",
}
