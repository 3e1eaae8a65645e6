"""Tests of tensors/distribution.py, on simulated ranks and on real ones."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.layouts.errors import CommError, LayoutError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import connect, redistribute
from fdtensor.tensors.distribution import distribute, from_local, shards
from fdtensor.tensors.spmd import spmd
from fdtensor.tensors.transforms import grad
from fdtensor.testing.strategies import DTYPES, meshes, types
from fdtensor.testing.values import block, full_tensor, gather_full, scatter

R, S0, S1 = Replicate(), Shard(0), Shard(1)
few = settings(max_examples=settings.default.max_examples // 2)

dtypes = st.sampled_from(
    (*DTYPES, torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.float16, torch.complex128)
)
guises = st.sampled_from(("plain", "transposed", "strided", "expanded"))


def any_types(world=None):
    """Any type of any dtype, on any mesh, or on one of the ranks of a world."""
    return dtypes.flatmap(
        lambda dtype: meshes(world=world).flatmap(lambda mesh: types(mesh, dtype=dtype))
    )


def wide(dtype):
    """The widest dtype of a kind: torch compares and pickles it, which it does not every dtype."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def same(a, b):
    return a.dtype is b.dtype and torch.equal(a.to(wide(a.dtype)), b.to(wide(b.dtype)))


def in_guise(tensor, guise):
    """A tensor of the same shape and dtype that lies in memory in another way."""
    match guise:
        case "transposed":
            dims = tuple(reversed(range(tensor.dim())))
            return tensor.permute(dims).contiguous().permute(dims)
        case "strided":
            return torch.stack([tensor, torch.zeros_like(tensor)], -1).select(-1, 0)
        case "expanded" if tensor.numel():
            return tensor[(slice(0, 1),) * tensor.dim()].expand(tensor.shape)
    return tensor


def full_of(type, guise="plain"):
    return in_guise(full_tensor(type, 0), guise)


def comm_of(type):
    """A Comm that has more ranks than the type."""
    return SimulatedComm(Mesh(world=2 + max(type.mesh.ranks)))


def check_blocks(blocks, type, full):
    assert same(gather_full(blocks, type), full)
    if not type.layout.partial:
        for rank, held in zip(type.mesh.ranks, blocks, strict=True):
            assert same(held, block(full, type, rank))


# --- blocks ----------------------------------------------------------------------------------


@given(any_types(), guises)
def test_every_rank_cuts_its_own_block(type, guise):
    full = full_of(type, guise)
    comm = comm_of(type)
    x = distribute(full, type.layout, comm)
    assert x.type is type
    check_blocks(x.local, type, full)
    assert same(x.full(), full)
    check_blocks(shards(full, type.layout), type, full)


@given(any_types(), guises, st.data())
def test_one_rank_gives_every_rank_its_block(type, guise, data):
    full, comm = full_of(type, guise), comm_of(type)
    src_rank = data.draw(st.sampled_from(comm.mesh.ranks))
    x = distribute(full, type.layout, comm, src_rank=src_rank)
    assert x.type is type
    check_blocks(x.local, type, full)


@given(any_types(), st.booleans())
def test_blocks_share_no_memory_with_the_tensor(type, alone):
    full = full_of(type)
    x = distribute(full, type.layout, comm_of(type), src_rank=type.mesh.ranks[0] if alone else None)
    places = [t.untyped_storage().data_ptr() for t in (full, *x.local) if t.numel()]
    assert len(set(places)) == len(places)


@given(any_types())
def test_a_local_tensor_is_taken_as_it_is(type):
    full = full_of(type)
    local = scatter(full, type, 0)
    x = from_local(list(local), type, comm_of(type))
    assert isinstance(x.local, tuple)
    assert all(a is b for a, b in zip(x.local, local, strict=True))
    assert same(x.full(), full)


def distributed(type, guise, src_rank):
    """What this rank holds, from a tensor that all hold and from one that `src_rank` holds."""
    comm, full = connect(Mesh(world=4)), full_of(type, guise)
    here = full if dist.get_rank() == src_rank else None
    x = distribute(full, type.layout, comm)
    y = distribute(here, type.layout, comm, src_rank=src_rank)
    assert isinstance(comm, FuncolComm)
    assert x.type is y.type is type
    z = from_local(x.local, type, comm)
    found = (x.local, y.local, z.full())
    assert all(value.dtype is type.dtype for value in found)
    return [value.to(wide(type.dtype)) for value in found]


@pytest.mark.mesh
@few
@given(any_types(4), guises, st.integers(0, 3))
def test_real_ranks_hold_their_blocks(pool4, type, guise, src_rank):
    full = full_of(type, guise)
    wides = pool4.run(distributed, type, guise, src_rank)
    found = [[value.to(type.dtype) for value in values] for values in wides]
    for i in range(2):
        check_blocks([found[rank][i] for rank in type.mesh.ranks], type, full)
    for rank, values in enumerate(found):
        assert same(values[2], full), "every rank of the Comm is told"
        if rank not in type.mesh.ranks:
            assert {tuple(v.shape) for v in values[:2]} == {(0,) * len(type.shape)}


# --- refusals --------------------------------------------------------------------------------

TYPE = TensorType((5,), torch.float32, Layout(Mesh(dp=2, tp=2), [S0, R]))

UNFIT = {
    "rank 2 has shape (3,), expected (2,)": lambda: torch.ones(3),
    "rank 2 has shape (2, 1), expected (2,)": lambda: torch.ones(2, 1),
    "rank 2 has dtype torch.float64, expected torch.float32": lambda: torch.ones(2).double(),
    "rank 2 has device meta, expected cpu": lambda: torch.ones(2, device="meta"),
    "rank 2 has a torch.sparse_coo tensor, expected a strided one": lambda: torch.ones(
        2
    ).to_sparse(),
    "rank 2 has a list, expected a tensor of shape (2,)": lambda: [1.0, 1.0],
    "rank 2 has None, expected a tensor of shape (2,)": lambda: None,
}
unfit = pytest.mark.parametrize("mistake", UNFIT)


def with_mistake(mistake, rank):
    if rank == 2:
        return UNFIT[mistake]()
    return torch.ones(TYPE.local_shape(rank))


@unfit
def test_a_local_tensor_that_does_not_fit_is_refused(mistake):
    blocks = tuple(with_mistake(mistake, rank) for rank in range(4))
    with pytest.raises(CommError) as raised:
        from_local(blocks, TYPE, SimulatedComm(TYPE.mesh))
    assert raised.value.sentence == f"from_local cannot start: {mistake}."


def test_a_refusal_says_what_to_do():
    with pytest.raises(CommError) as raised:
        from_local((torch.ones(3),) * 4, TYPE, SimulatedComm(TYPE.mesh))
    blocks = (torch.ones(3), torch.ones(3), torch.ones(2))
    assert str(raised.value) == WRONG_SHAPE.replace("rank 0 has", "rank 2 has")
    with pytest.raises(CommError, match="a simulated value is a tuple of 4 tensors, one a rank"):
        from_local(blocks, TYPE, SimulatedComm(TYPE.mesh))


def with_mistakes(mistake, type, check):
    rank = dist.get_rank()
    comm = connect(Mesh(world=4))
    for _ in range(2):  # refused every time, not only at the first
        try:
            from_local(with_mistake(mistake, rank), type, comm, check=check)
        except CommError as error:
            text = error.sentence
    fine = from_local(torch.ones(type.local_shape(rank)), type, comm)
    return text, fine.full().tolist()


@pytest.mark.mesh
@unfit
def test_all_ranks_refuse_a_local_tensor_that_does_not_fit(pool4, mistake):
    for text, fine in pool4.run(with_mistakes, mistake, TYPE, None):
        assert text == f"from_local cannot start: {mistake}."
        assert fine == [1] * 5


def caught(call, *args):
    """The kind and the sentence of what a call with this rank's argument raises."""
    comm, rank = connect(Mesh(world=4)), dist.get_rank()
    try:
        call(comm, args[rank])
    except (CommError, LayoutError) as error:
        return type(error).__name__, error.sentence
    return None


def from_typed(comm, type):
    from_local(torch.ones(type.local_shape(comm.rank)), type, comm)


def from_same(comm, tensor):
    distribute(tensor, Layout(Mesh(dp=2, tp=2), [S0, S1]), comm)


def from_zero(comm, tensor):
    distribute(tensor, Layout(Mesh(dp=2, tp=2), [S0, S1]), comm, src_rank=0)


@pytest.mark.mesh
def test_ranks_that_differ_fail_together(pool4):
    other = TYPE.with_layout(Layout(TYPE.mesh, [R, R]))
    for found in pool4.run(caught, from_typed, TYPE, TYPE, other, TYPE):
        assert found == ("CommError", "the ranks do not agree on from_local.")
    a, b = torch.ones(4, 4), torch.ones(4, 2)
    for wrong in (b, a.double(), a.clone().requires_grad_()):
        for found in pool4.run(caught, from_same, a, a, a, wrong):
            assert found == ("CommError", "the ranks do not agree on distribute.")


def told(tensors):
    """The facts of what a call with this rank's tensor raises."""
    comm, rank = connect(Mesh(world=4)), dist.get_rank()
    try:
        distribute(tensors[rank], comm.mesh.layout("world"), comm)
    except CommError as error:
        return error.facts
    return None


@pytest.mark.mesh
def test_ranks_that_differ_are_told_what_each_has(pool4):
    a, b = torch.ones(4, 4), torch.ones(4, 2, requires_grad=True)
    for facts in pool4.run(told, [a, a, b, a]):
        assert re.match(r"distribute .*\(4, 4\), torch.float32, .* at call", facts["rank 1"])
        assert re.match(r"distribute .*\(4, 2\), .* that requires grad at call", facts["rank 2"])
    many = [torch.ones(n, 2) for n in range(1, 20)]  # too many to be told whole
    for facts in pool4.run(told, [many, many, many, many[1:]]):
        for rank, rows in [(0, 1), (3, 2)]:
            first = rf"distribute TensorType\(\({rows}, 2\), .* \.\.\. at call"
            assert re.match(first, facts[f"rank {rank}"])


@pytest.mark.mesh
def test_what_one_rank_alone_can_see_fails_on_all(pool4):
    a = torch.ones(4, 4)
    own = [
        (torch.ones(4), "mesh axis 'tp' shards dim 1 of a tensor that has 1 dims."),
        (None, "None is not a tensor."),
    ]
    for wrong, sentence in own:
        *others, last = pool4.run(caught, from_same, a, a, a, wrong)
        assert last == ("LayoutError", sentence)
        assert others == [("CommError", f"distribute cannot start: rank 3: {sentence}")] * 3
    for found in pool4.run(caught, from_same, a, a, a, a.to("meta")):
        assert found == (
            "CommError",
            "distribute cannot start: rank 3 has device meta, expected cpu.",
        )


@pytest.mark.mesh
@pytest.mark.parametrize(
    "wrong", [None, [1.0], torch.ones(4, 4, device="meta"), torch.ones(4, 4).to_sparse()], ids=repr
)
def test_a_source_without_a_tensor_is_refused_by_all(pool4, wrong):
    for found in pool4.run(caught, from_zero, wrong, None, torch.ones(4, 4), None):
        assert found == ("CommError", "rank 0 has no tensor that can be distributed.")


@pytest.mark.mesh
def test_all_ranks_see_that_the_tensor_of_the_source_cannot_be_laid_out(pool4):
    for found in pool4.run(caught, from_zero, torch.ones(4), None, None, None):
        assert found == ("LayoutError", "mesh axis 'tp' shards dim 1 of a tensor that has 1 dims.")


def test_a_simulated_source_is_refused_alike():
    comm = SimulatedComm(Mesh(dp=2))
    layout = Layout(comm.mesh, [S0])
    with pytest.raises(CommError, match="rank 1 has no tensor that can be distributed"):
        distribute(None, layout, comm, src_rank=1)
    with pytest.raises(CommError, match="rank 2 is not in the mesh of this Comm"):
        distribute(torch.ones(3), layout, comm, src_rank=2)
    with pytest.raises(CommError, match="rank 2 is not in the mesh of this Comm"):
        distribute(torch.ones(3), Layout(Mesh(dp=3), [S0]), comm, src_rank=0)
    with pytest.raises(CommError, match="uses rank 2, which this Comm does not have"):
        distribute(torch.ones(3), Layout(Mesh(dp=3), [S0]), comm)
    with pytest.raises(LayoutError, match="None is not a tensor"):
        distribute(None, layout, comm)
    with pytest.raises(LayoutError, match="shards dim 0 of a tensor that has 0 dims"):
        distribute(torch.ones(()), layout, comm)
    with pytest.raises(LayoutError, match="is not a Layout"):
        distribute(torch.ones(4), [S0], comm)
    with pytest.raises(LayoutError, match="is not a TensorType"):
        from_local((torch.ones(4),) * 2, layout, comm)


@pytest.mark.parametrize("check", ["first", "always", "never"])
def test_mistakes_are_seen_whatever_the_check(check):
    comm = SimulatedComm(TYPE.mesh, check=check)
    with pytest.raises(CommError):
        from_local((torch.ones(3),) * 3, TYPE, comm)
    with pytest.raises(LayoutError):
        distribute(None, TYPE.layout, comm)


# --- ranks outside ---------------------------------------------------------------------------


def outside(layout, has_tensor):
    """What this rank holds, on a Comm of the layout's mesh only."""
    comm, rank = connect(layout.mesh), dist.get_rank()
    inside = layout.mesh.position(rank) is not None
    full = torch.arange(6.0).reshape(2, 3)
    x = distribute(full, layout, comm)
    y = from_local(x.local if inside else None, x.type, comm)
    root = layout.mesh.ranks[0]
    given = full if rank == root or has_tensor else None
    try:
        z = distribute(given, layout, comm, src_rank=root)
    except LayoutError as error:
        return error.sentence
    shapes = [tuple((v.full() if inside else v.local).shape) for v in (x, y, z)]
    return shapes + [v.type == x.type for v in (y, z)]


@pytest.mark.mesh
@pytest.mark.parametrize("op", ["sum", None])
def test_a_rank_outside_calls_the_same_functions(pool4, op):
    mesh = Mesh.from_ranks([3, 1], "x")
    layout = Layout(mesh, [Partial(op) if op else S1])
    for rank, found in enumerate(pool4.run(outside, layout, True)):
        assert found == [(2, 3) if rank in (1, 3) else (0, 0)] * 3 + [True] * 2
    for rank, found in enumerate(pool4.run(outside, layout, False)):
        if rank not in (1, 3):  # it is not told the shape
            assert found == "None is not a tensor."


# --- connect ---------------------------------------------------------------------------------


def test_without_processes_connect_simulates(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    mesh = Mesh(dp=2, tp=4)
    comm = connect(mesh, check="always")
    assert isinstance(comm, SimulatedComm)
    assert comm.mesh is mesh
    assert comm.check == "always"
    assert not dist.is_initialized()


WRONG_SHAPE = """\
from_local cannot start: rank 0 has shape (3,), expected (2,).

Give every rank a tensor of the shape, dtype and device that its type says: \
type.local_shape(rank), type.dtype."""


# --- pytrees --------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "batch"


class Exported:
    """An array of another library, which gives its memory by DLPack alone."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@given(st.lists(types(Mesh(a=2, b=2), partial=False), min_size=1, max_size=4), st.data())
def test_a_pytree_is_distributed_by_a_prefix_of_layouts(all_types, data):
    comm = SimulatedComm(Mesh(a=2, b=2))
    full = [full_tensor(type, i) for i, type in enumerate(all_types)]
    kinds = [data.draw(st.sampled_from(KINDS)) for _ in full]
    given = [_as_given(t, kind) for t, kind in zip(full, kinds, strict=True)]
    tree = {"a": given, "b": (given[0], 3, "text", None)}
    layouts = {"a": [t.layout for t in all_types], "b": all_types[0].layout}
    out = distribute(tree, layouts, comm)
    assert [x.type for x in out["a"]] == [*all_types]
    assert out["b"][1:] == (3, "text", None)
    for x, t in zip([*out["a"], out["b"][0]], [*full, full[0]], strict=True):
        assert torch.equal(x.full(), t)
        assert all(a.data_ptr() != t.data_ptr() for a in x.local if a.numel())


def _as_given(tensor, kind):
    if kind in ("numpy", "reversed", "swapped") and tensor.dtype in NUMPYS:
        array = tensor.numpy()
        if kind == "swapped":
            return array.astype(array.dtype.newbyteorder(">"))
        back = (slice(None, None, -1),) * array.ndim
        return array[back].copy()[back] if kind == "reversed" else array
    if kind == "dlpack" and tensor.dtype in NUMPYS and tensor.dtype != torch.bool:
        return Exported(tensor)
    return tensor


KINDS = ("torch", "numpy", "reversed", "swapped", "dlpack")
NUMPYS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def test_dataclasses_go_in_and_out_of_functions():
    mesh = Mesh(a=2)
    comm = SimulatedComm(mesh)
    batch = Batch(torch.arange(6.0).reshape(2, 3), torch.arange(2))
    given = distribute(batch, Batch(mesh.layout("a"), mesh.layout(), mesh.layout()), comm)
    assert type(given) is Batch
    assert (given.x.type, given.y.layout, given.name) == (
        TensorType((2, 3), torch.float32, mesh.layout("a")),
        mesh.layout(),
        "batch",
    )
    out = spmd(lambda b: Batch(b.x * 2, b.y + 1, b.name))(given)
    assert torch.equal(out.x.full(), batch.x * 2)
    assert torch.equal(out.y.full(), batch.y + 1)


def test_a_pytree_is_agreed_on_once():
    mesh = Mesh(a=2)
    comm = SimulatedComm(mesh)
    told = []
    comm.agree = lambda *args: told.append(args)  # type: ignore[method-assign]
    distribute({"a": torch.ones(2), "b": [torch.ones(3), torch.ones(4)]}, mesh.layout("a"), comm)
    assert len(told) == 1


def test_what_a_dtensor_holds_goes_out_by_dlpack():
    mesh = Mesh(a=2)
    x = distribute(torch.arange(5), mesh.layout("a"), SimulatedComm(mesh))
    assert torch.equal(torch.from_dlpack(x), torch.arange(5))
    assert np.from_dlpack(x).tolist() == [0, 1, 2, 3, 4]


def from_one(tree, layouts, src_rank, absent):
    comm = connect(Mesh(world=4))
    own = tree if comm.rank == src_rank or not absent else None
    out = distribute(own, layouts, comm, src_rank=src_rank)
    return [x.full() for x in (out["a"], *out["b"])]


@pytest.mark.mesh
def test_a_pytree_of_one_rank_goes_to_all(pool4):
    mesh = Mesh(x=2, y=2)
    tree = {"a": torch.arange(6).reshape(2, 3), "b": [torch.arange(4.0), torch.ones(2, 2)]}
    layouts = {"a": mesh.layout("x"), "b": [mesh.layout("y"), mesh.layout(None, "x")]}
    for absent in (True, False):
        for got in pool4.run(from_one, tree, layouts, 2, absent):
            for x, t in zip(got, (tree["a"], *tree["b"]), strict=True):
                assert torch.equal(x, t)


@pytest.mark.mesh
def test_a_pytree_that_differs_in_one_leaf_fails_on_all_ranks(pool4):
    same = {"a": torch.ones(2, 2), "b": torch.ones(3, 2)}
    other = {"a": torch.ones(2, 2), "b": torch.ones(4, 2)}
    for kind, sentence in pool4.run(caught, from_same, same, same, same, other):
        assert kind == "CommError"
        assert "do not agree" in sentence


# --- in a traced function --------------------------------------------------------------------


@pytest.mark.parametrize("cut", [(), ("x",)])
@pytest.mark.parametrize("way", ["spmd", "call", "grad"])
def test_a_traced_function_may_distribute(way, cut):
    mesh, full, w = Mesh(x=2), torch.arange(4.0), torch.arange(4.0) + 1
    comm = SimulatedComm(mesh)
    x = distribute(full, mesh.layout("x"), comm)

    def f(x):
        return (x * distribute({"w": w}, mesh.layout(*cut), comm)["w"]).sum()

    if way == "grad":
        assert torch.equal(grad(f)(x).full(), w)
    else:
        result = spmd(f)(x) if way == "spmd" else call(f, x)
        assert result.full() == (full * w).sum()


# --- tensors without dims -----------------------------------------------------------------------

STATE = {"w": torch.ones(4, 2), "state": {"step": torch.tensor(3.0), "average": torch.zeros(4)}}


def test_a_number_stays_whole_under_a_layout_for_all():
    mesh = Mesh(a=2, b=2)
    comm, rows = SimulatedComm(mesh), mesh.layout("a")
    for layouts in (rows, {"w": rows, "state": rows}):
        laid = distribute(STATE, layouts, comm)
        assert laid["state"]["step"].layout is mesh.layout()
        assert laid["state"]["average"].layout is laid["w"].layout is rows
        moved = redistribute(laid, mesh.layout("b"))
        assert moved["state"]["step"].item() == 3
        assert moved["state"]["average"].layout is mesh.layout("b")
    pending = distribute(STATE, mesh.layout("a", partial={"b": "sum"}), comm)
    assert pending["state"]["step"].layout is mesh.layout(partial={"b": "sum"})
    assert distribute({}, rows, comm) == {}


def test_a_number_whose_own_layout_cuts_it_is_refused():
    mesh = Mesh(a=2)
    comm, rows = SimulatedComm(mesh), mesh.layout("a")
    own = {"w": rows, "state": {"step": rows, "average": rows}}
    with pytest.raises(LayoutError, match=r"tree\['state'\]\['step'\]: .* shards dim 0"):
        distribute(STATE, own, comm)
    with pytest.raises(LayoutError, match="shards dim 0"):
        distribute(STATE["state"]["step"], rows, comm)
    with pytest.raises(ValueTreeError, match="1 of 3 DTensors"):
        redistribute(distribute(STATE, rows, comm), own)
