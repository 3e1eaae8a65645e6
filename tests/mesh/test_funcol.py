"""The real mesh: gloo ranks give what the simulator gives, with the bytes and the peak announced.

Each call of the pool runs many examples. Values are small integers, so that every reduction is
exact in any order, and results are equal to the bit.
"""

import re
import warnings

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fdtensor import (
    GLOO,
    NCCL,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    CommError,
    CostModel,
    Exchange,
    Layout,
    Mesh,
    Partial,
    Plan,
    PlanError,
    ReduceScatter,
    Replicate,
    Shard,
    SimulatedComm,
    Step,
    TensorType,
    distribute,
    from_local,
    fuse,
    plan,
    run,
)
from fdtensor.layouts.dtypes import known, reducible
from fdtensor.layouts.placement import REDUCE_OPS
from fdtensor.plans.collectives import ReduceExchange, by_exchange, by_meetings, is_local
from fdtensor.plans.wire import reduces_as
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.runtime.interpreter import run_fused
from fdtensor.testing.strategies import redistributions
from fdtensor.testing.values import full_tensor, scatter
from tests.support.depth import times
from tests.support.memory import Memory

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

R, S, P = Replicate(), Shard, Partial
LINE, SQUARE = Mesh(x=4), Mesh(x=2, y=2)

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and known(d)}, key=str
)
Facts = tuple[bytes, tuple[int, ...], torch.dtype]
"""A tensor as its bytes, shape and dtype."""

STORED = ("plain", "strided", "reversed", "expanded", "offset")
"""How an input may lie in memory."""


@attrs.frozen
class Case:
    """A plan to run, the blocks it starts from, and how they lie in memory."""

    found: Plan
    blocks: tuple[torch.Tensor, ...]
    stored: str = "plain"

    def __reduce__(self):  # pickle does not know all dtypes
        return _case, (self.found, tuple(map(facts, self.blocks)), self.stored)


def _case(found: Plan, blocks: tuple[Facts, ...], stored: str) -> Case:
    return Case(found, tuple(map(tensor, blocks)), stored)


def tensor(known: Facts) -> torch.Tensor:
    data, shape, dtype = known
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def facts(tensor: torch.Tensor) -> Facts:
    return bits(tensor), tuple(tensor.shape), tensor.dtype


def case(found: Plan, seed: int = 0, stored: str = "plain") -> Case:
    """A case whose pending terms are split at random."""
    return Case(found, scatter(full_tensor(found.src, seed), found.src, seed), stored)


@st.composite
def cases(draw, world, dtype=None) -> Case:
    """Any redistribution, by any way to run it, from blocks that lie anyhow in memory."""
    src, dst = draw(redistributions(world, draw(st.booleans()), dtype=dtype))
    found = plan(src, dst, cost=draw(st.sampled_from((GLOO, NCCL))))
    way = draw(st.sampled_from((None, None, "peer_to_peer", "all_to_all")))
    if way:
        found = forced(found, way, draw(st.integers(1, 4)))
    return case(found, draw(st.integers(0, 99)), draw(st.sampled_from(STORED)))


def forced(found: Plan, way: str, pieces: int) -> Plan:
    """The same plan with every collective as an exchange of this way."""
    steps = [
        step
        if is_local(step) or isinstance(step.collective, ReduceExchange)
        else by_exchange(step.src, step.dst, way, pieces)
        for step in found.steps
    ]
    return Plan(found.src, found.dst, tuple(steps), found.cost)


def alone(collective, src: TensorType, dst: Layout | TensorType) -> Plan:
    """A plan of one step."""
    dst = dst if isinstance(dst, TensorType) else src.with_layout(dst)
    return Plan(src, dst, (Step(collective, src, dst),), GLOO)


def tight(src: TensorType, dst: TensorType, cost: CostModel) -> Plan:
    """The plan that holds least."""
    try:
        return plan(src, dst, cost=cost, max_bytes=0)
    except PlanError as error:
        least = int(re.search(r"the least is (\d+)", str(error)).group(1))
        return plan(src, dst, cost=cost, max_bytes=least)


def lying(block: torch.Tensor, stored: str) -> torch.Tensor:
    """The same values, lying in memory as said."""
    match stored:
        case "plain":
            return block.clone()
        case "strided":
            wide = block.new_zeros([2 * n for n in block.shape])
            wide[tuple([slice(None, None, 2)] * block.dim())] = block
            return wide[tuple([slice(None, None, 2)] * block.dim())]
        case "reversed":
            dims = tuple(reversed(range(block.dim())))
            return block.permute(dims).contiguous().permute(dims)
        case "expanded":  # only what is the same everywhere can be
            first = block[:1] if block.dim() else block
            same = block.dim() and len(block) and bits(block) == bits(first.expand(block.shape))
            return first.clone().expand(block.shape) if same else block.clone()
        case "offset":
            wide = torch.cat([block.new_zeros(3), block.reshape(-1)])
            return wide[3:].view(block.shape)
    raise AssertionError(stored)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


# --- results ---------------------------------------------------------------------------------


def outcomes(some: list[Case]) -> list[Facts | None]:
    """What this rank gets of each case; None where it is in neither mesh."""
    comm, rank = FuncolComm(Mesh(x=dist.get_world_size()), check="never"), dist.get_rank()
    found = []
    for one in some:
        src, dst = one.found.src.mesh, one.found.dst.mesh
        place = src.position(rank)
        if place is not None:
            given = lying(one.blocks[place], one.stored)
        else:  # of another dtype and shape: it is not looked at
            given = torch.ones(2, dtype=torch.float32 if rank % 2 else torch.int8)
        before = bits(given)
        out = run(one.found, given, comm)
        assert type(out) is torch.Tensor
        assert bits(given) == before
        if place is None and dst.position(rank) is None:
            assert bits(out) == before
            found.append(None)
            continue
        if out.numel():
            assert out.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        found.append(facts(out))
    return found


def check(pool, some: list[Case]) -> None:
    """Asserts that every rank gets what the simulator gives it."""
    simulated = SimulatedComm(Mesh(x=pool.n), check="never")
    expected = [run(one.found, one.blocks, simulated) for one in some]
    for rank, outs in enumerate(pool.run(outcomes, some)):
        for one, out, due in zip(some, outs, expected, strict=True):
            place = one.found.dst.mesh.position(rank)
            if place is not None:
                wanted = due[place]
            elif out is not None:  # it leaves
                wanted = torch.zeros([0] * len(one.found.dst.shape), dtype=one.found.dst.dtype)
            else:
                continue
            said = f"{one.found}\nrank {rank} has {tensor(out)}, simulated {wanted}"
            assert out == facts(wanted), said


@settings(max_examples=30)
@given(some=st.lists(cases(4), min_size=1, max_size=12))
def test_ranks_get_what_the_simulator_gives(pool4, some):
    check(pool4, some)


@settings(max_examples=15)
@given(some=st.lists(cases(4, dtype=None), min_size=1, max_size=12))
def test_ranks_get_what_the_simulator_gives_in_every_kind_of_dtype(pool4, some):
    check(pool4, some)


@settings(max_examples=times(4, 50))
@given(some=st.lists(cases(8), min_size=1, max_size=8))
def test_eight_ranks_get_what_the_simulator_gives(pool8, some):
    check(pool8, some)


@settings(max_examples=15)
@given(
    some=st.lists(redistributions(4, dtype=None), min_size=1, max_size=8), seed=st.integers(0, 9)
)
def test_plans_that_hold_least_give_the_same(pool4, some, seed):
    found = [tight(src, dst, cost) for src, dst in some for cost in (GLOO, NCCL)]
    check(pool4, [case(one, seed) for one in found])


def moves(dtype: torch.dtype) -> list[Plan]:
    """Each collective that only moves, by itself, over one axis and over two in either order."""

    def of(mesh, *placements, order=None):
        return TensorType((8, 4), dtype, Layout(mesh, placements, order))

    turned = {0: ("y", "x")}
    root = TensorType((8, 4), dtype, Layout(Mesh.from_ranks([2], "src"), [R]))
    others = Mesh.from_ranks([0, 3, 1], "y")
    found = [
        alone(AllGather(("x",), (0,)), of(LINE, S(0)), of(LINE, R)),
        alone(AllGather(("x",), (1,)), of(LINE, S(1)), of(LINE, R)),
        alone(AllGather(("x", "y"), (0, 1)), of(SQUARE, S(0), S(1)), of(SQUARE, R, R)),
        alone(
            AllGather(("y", "x"), (0, 0)), of(SQUARE, S(0), S(0), order=turned), of(SQUARE, R, R)
        ),
        alone(AllGather(("y",), (1,)), of(SQUARE, S(0), S(1)), of(SQUARE, S(0), R)),
        alone(AllToAll(("x",), 0, 1), of(LINE, S(0)), of(LINE, S(1))),
        alone(AllToAll(("x",), 1, 0), of(LINE, S(1)), of(LINE, S(0))),
        alone(
            AllToAll(("y", "x"), 0, 1),
            of(SQUARE, S(0), S(0), order=turned),
            of(SQUARE, S(1), S(1), order={1: ("y", "x")}),
        ),
        alone(Broadcast(2), root, of(LINE, R)),
        alone(Broadcast(2), root, of(others, R)),
        alone(
            Broadcast(2),
            TensorType((), dtype, root.layout),
            TensorType((), dtype, Layout(SQUARE, [R, R])),
        ),
    ]
    return found + [forced(one, way, 3) for one in found for way in ("peer_to_peer", "all_to_all")]


def reductions(dtype: torch.dtype) -> list[Plan]:
    """Each collective that reduces, by itself, with each reduction that the dtype has."""
    found = []
    for op in REDUCE_OPS:
        if not reducible(dtype, op):
            continue
        pending = TensorType((8, 4), dtype, Layout(LINE, [P(op)]))
        square = TensorType((8, 4), dtype, Layout(SQUARE, [P(op), P(op)]))
        number = TensorType((), dtype, Layout(SQUARE, [P(op), R]))
        turned = Layout(SQUARE, [S(0), S(0)], {0: ("y", "x")})
        found += [
            alone(AllReduce(("x",), op), pending, Layout(LINE, [R])),
            alone(AllReduce(("x", "y"), op), square, Layout(SQUARE, [R, R])),
            alone(AllReduce(("x",), op), number, Layout(SQUARE, [R, R])),
            alone(ReduceScatter(("x",), (0,), op), pending, Layout(LINE, [S(0)])),
            alone(ReduceScatter(("x",), (1,), op), pending, Layout(LINE, [S(1)])),
            alone(ReduceScatter(("x", "y"), (1, 0), op), square, Layout(SQUARE, [S(1), S(0)])),
            alone(ReduceScatter(("y", "x"), (0, 0), op), square, turned),
            *at_owners(dtype, op),
        ]
        scattered = alone(ReduceScatter(("y", "x"), (0, 0), op), square, turned)
        found += [forced(scattered, way, 3) for way in ("peer_to_peer", "all_to_all")]
    return found


def at_owners(dtype: torch.dtype, op) -> list[Plan]:
    """Terms that meet at owners: to another axis, to other ranks, into new terms."""
    crossed = TensorType((8, 4), dtype, Layout(SQUARE, [S(0), P(op)]))
    ends = [
        Layout(SQUARE, [R, S(0)]),
        Layout(Mesh.from_ranks([3, 1, 0], ("z",)), [R]),
        Layout(SQUARE, [P("max"), R]),
    ]
    ends = ends if reducible(dtype, "max") else ends[:2]
    steps = [by_meetings(crossed, crossed.with_layout(end)) for end in ends]
    return [Plan(step.src, step.dst, (step,), GLOO) for step in steps]


def test_every_collective_moves_every_dtype(pool4):
    check(pool4, [case(one, 1) for dtype in DTYPES for one in moves(dtype)])


@pytest.mark.few(2)
@pytest.mark.parametrize("stored", STORED[1:])
def test_every_collective_takes_any_strides(pool4, stored):
    dtypes = torch.int64, torch.int16, torch.complex64
    some = [one for dtype in dtypes for one in (*moves(dtype), *reductions(dtype))]
    check(pool4, [case(one, 1, stored) for one in some])


def test_every_collective_reduces_every_dtype_in_every_way_it_has(pool4):
    check(pool4, [case(one, 2) for dtype in DTYPES for one in reductions(dtype)])


def test_terms_are_added_in_their_order(pool4):
    """Sums of numbers of very different size, which no two orders give alike."""
    generator = torch.Generator().manual_seed(7)
    some = []
    for to in (S(0), S(1), R):
        src = TensorType((9, 5), torch.float32, Layout(LINE, [P("sum")]))
        owned = [S(0)] if to == R else [to]
        steps = [by_exchange(src, src.with_layout(Layout(LINE, owned)))]
        if to == R:
            steps.append(by_exchange(steps[0].dst, src.with_layout(Layout(LINE, [R]))))
        found = Plan(src, steps[-1].dst, tuple(steps), GLOO)
        exponents = torch.randint(-20, 20, (4, 9, 5), generator=generator)
        terms = torch.rand((4, 9, 5), generator=generator) * 2.0**exponents
        in_order = terms[0] + terms[1] + terms[2] + terms[3]
        for way in ("peer_to_peer", "all_to_all"):
            for pieces in (1, 2, 3, 5):
                some.append(Case(forced(found, way, pieces), tuple(terms)))
        [whole] = {
            bits(full)
            for one in some[-8:]
            for full in [
                run(
                    plan(one.found.dst, src.with_layout(Layout(LINE, [R]))),
                    run(one.found, one.blocks, SimulatedComm(LINE)),
                    SimulatedComm(LINE),
                )[0]
            ]
        }
        assert whole == bits(in_order)
    check(pool4, some)


def test_nan_is_kept_by_max_and_min(pool4):
    some = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in ("max", "min", "sum", "product"):
            src = TensorType((8, 4), dtype, Layout(LINE, [P(op)]))
            blocks = [torch.full((8, 4), float(rank), dtype=dtype) for rank in range(4)]
            blocks[2][3:6] = float("nan")
            for to in (R, S(0), S(1)):
                for cost in (GLOO, NCCL):
                    some.append((plan(src, Layout(LINE, [to]), cost=cost), tuple(blocks)))
            some.append((alone(AllReduce(("x",), op), src, Layout(LINE, [R])), tuple(blocks)))
    outs = pool4.run(outcomes, [Case(*one) for one in some])
    for i, (found, blocks) in enumerate(some):
        simulated = run(found, blocks, SimulatedComm(LINE))
        for rank in range(4):
            assert torch.equal(tensor(outs[rank][i]).isnan(), simulated[rank].isnan()), found


def lazy_bits() -> list[bool]:
    """Whether conjugate and negative views arrive as what they read, each way."""
    comm, rank = FuncolComm(LINE, check="never"), dist.get_rank()
    full = torch.complex(torch.arange(32.0).view(8, 4), torch.arange(32.0).view(8, 4) - 9)
    right = []
    for lazy in (full.conj(), full.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        src = TensorType((8, 4), lazy.dtype, Layout(LINE, [S(0)]))
        mine = lazy[2 * rank : 2 * rank + 2]
        for cost in (GLOO, NCCL):
            for to in (R, S(0), S(1), P("sum")):
                found = plan(src, Layout(LINE, [to]), cost=cost)
                for one in (found, forced(found, "all_to_all", 1)):
                    out = run(one, mine, comm)
                    back = run(plan(found.dst, Layout(LINE, [R])), out, comm)
                    right.append(torch.equal(back, lazy.resolve_conj().resolve_neg()))
    return right


def test_lazy_conjugates_and_negatives_travel_as_what_they_read(pool4):
    for right in pool4.run(lazy_bits):
        assert len(right) == 32
        assert all(right)


def fused(some: list[Case]) -> list[Facts]:
    rank, given = dist.get_rank(), []
    for one in some:
        place = one.found.src.mesh.position(rank)
        given.append(None if place is None else lying(one.blocks[place], one.stored))
    found = fuse([one.found for one in some])
    return [
        None if out is None else facts(out)
        for out in run_fused(found, given, FuncolComm(Mesh(x=4)), check="never")
    ]


@settings(max_examples=15)
@given(some=st.lists(cases(4, dtype=None), min_size=1, max_size=6))
def test_plans_that_run_together_give_what_they_give_in_one_process(pool4, some):
    found = fuse([one.found for one in some])
    expected = run_fused(found, [one.blocks for one in some], SimulatedComm(Mesh(x=4)))
    for rank, outs in enumerate(pool4.run(fused, some)):
        for one, out, due in zip(some, outs, expected, strict=True):
            place = one.found.dst.mesh.position(rank)
            assert place is None or out == facts(due[place]), str(one.found)


# --- bytes and memory ------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts what arrives from and leaves for other ranks, by messages and by collectives."""

    def __init__(self, comm: FuncolComm) -> None:
        super().__init__()
        self.received, self.sent, self.calls = 0, 0, []
        self.around, self.plane, self.tag = comm.around, comm.plane, 7
        self.groups = self  # stands for the groups of the plane too

    def __enter__(self):
        self.around.plane = self
        return super().__enter__()

    def __exit__(self, *error):
        self.around.plane = self.plane
        return super().__exit__(*error)

    def handle(self, ranks, peers):
        self.all = self.plane.groups.handle(ranks, peers)
        return self

    def group(self, ranks):
        return self.plane.groups.group(ranks)

    def meet(self, name):
        self.plane.groups.meet(name)

    def recv(self, tensors, peer, tag):
        self.received += sum(t.nbytes for t in tensors)
        return self.all.recv(tensors, peer, tag)

    def send(self, tensors, peer, tag):
        self.sent += sum(t.nbytes for t in tensors)
        return self.all.send(tensors, peer, tag)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.namespace != "_c10d_functional":
            return out
        name, k = op._opname.removesuffix("_"), None
        group = (
            torch._C._distributed_c10d._resolve_process_group(args[-1])
            if name != "wait_tensor"
            else None
        )
        k = group.size() if group else 1
        match name:
            case "all_gather_into_tensor":
                received, sent = out.nbytes - args[0].nbytes, (k - 1) * args[0].nbytes
            case "reduce_scatter_tensor":
                received = sent = args[0].nbytes * (k - 1) // k
            case "all_reduce":
                received = sent = args[0].nbytes * 2 * (k - 1) // k
            case "all_to_all_single":
                row = args[0].nbytes // max(1, args[0].shape[0]) or out.nbytes // max(
                    1, out.shape[0]
                )
                received = row * (sum(args[1]) - args[1][group.rank()])
                sent = row * (sum(args[2]) - args[2][group.rank()])
            case "broadcast":
                root = group.rank() == args[1]
                received, sent = (0, (k - 1) * out.nbytes) if root else (out.nbytes, 0)
            case _:
                return out
        self.received, self.sent = self.received + received, self.sent + sent
        self.calls.append(name)
        return out


def traffic(some: list[Case]) -> list[tuple[int, int, list[str]]]:
    comm, rank = FuncolComm(Mesh(x=4), check="never"), dist.get_rank()
    found = []
    for one in some:
        place = one.found.src.mesh.position(rank)
        with Traffic(comm) as counted:
            run(one.found, None if place is None else one.blocks[place], comm)
        found.append((counted.received, counted.sent, counted.calls))
    return found


def native(found: Plan) -> bool:
    """Whether gloo has the reductions of the named collectives of a plan."""
    return all(
        reduces_as(step.src.dtype, step.collective.reduce_op, "gloo")
        for step in found.steps
        if isinstance(step.collective, AllReduce | ReduceScatter)
    )


@settings(max_examples=25)
@given(some=st.lists(cases(4, dtype=None), min_size=1, max_size=12))
def test_the_bytes_announced_are_those_that_move(pool4, some):
    some = [one for one in some if native(one.found)]
    for rank, counts in enumerate(pool4.run(traffic, some)):
        for one, (received, sent, _) in zip(some, counts, strict=True):
            assert received == one.found.received_bytes_at(rank), f"{one.found}\nrank {rank}"
            if not any(isinstance(step.collective, Broadcast) for step in one.found.steps):
                assert sent == one.found.sent_bytes_at(rank), f"{one.found}\nrank {rank}"


def test_each_step_is_the_collective_that_it_says(pool4):
    some = [one for dtype in (torch.int64, torch.complex64) for one in moves(dtype)[:11]]
    some += [
        one
        for one in reductions(torch.int64)
        if not isinstance(one.steps[0].collective, Exchange | ReduceExchange)
    ]
    names = {
        AllGather: "all_gather_into_tensor",
        AllToAll: "all_to_all_single",
        AllReduce: "all_reduce",
        ReduceScatter: "reduce_scatter_tensor",
        Broadcast: "broadcast",
    }
    for rank, counts in enumerate(pool4.run(traffic, [case(one) for one in some])):
        for found, (_, _, calls) in zip(some, counts, strict=True):
            assert calls == [names[type(found.steps[0].collective)]], f"{found}\nrank {rank}"


def peaks(some: list[Case]) -> list[int]:
    comm, rank = FuncolComm(Mesh(x=4), check="never"), dist.get_rank()
    found = []
    for one in some:
        place = one.found.src.mesh.position(rank)
        given = (
            None
            if place is None
            else one.blocks[place].clone(memory_format=torch.contiguous_format)
        )
        announced = one.found.peak_bytes_at(rank)
        run(one.found, given, comm)  # what is made once, such as groups
        with Memory([given], announced) as memory:
            run(one.found, given, comm)
        found.append(memory.most)
    return found


def check_peaks(pool, plans: list[Plan]) -> None:
    plans = [found for found in plans if native(found)]
    for rank, found in enumerate(pool.run(peaks, [case(one) for one in plans])):
        for one, most in zip(plans, found, strict=True):
            assert most == one.peak_bytes_at(rank), f"{one}\nrank {rank}"


@settings(max_examples=20)
@given(
    some=st.lists(
        st.booleans().flatmap(lambda cross: redistributions(4, cross, dtype=None)),
        min_size=1,
        max_size=6,
    )
)
def test_the_peak_announced_is_the_most_that_a_rank_holds(pool4, some):
    check_peaks(pool4, [plan(src, dst, cost=cost) for src, dst in some for cost in (GLOO, NCCL)])


@settings(max_examples=15)
@given(some=st.lists(redistributions(4, dtype=None), min_size=1, max_size=6))
def test_a_budget_is_kept(pool4, some):
    check_peaks(pool4, [tight(src, dst, cost) for src, dst in some for cost in (GLOO, NCCL)])


def test_the_peak_of_each_collective_is_announced(pool4):
    check_peaks(pool4, [*moves(torch.int64), *moves(torch.complex64)])
    check_peaks(pool4, [p for dtype in (torch.int64, torch.float32) for p in reductions(dtype)])


# --- agreement -------------------------------------------------------------------------------

SRC = TensorType((8, 4), torch.float32, Layout(LINE, [S(0)]))
FOUND = plan(SRC, Layout(LINE, [S(1)]), cost=GLOO)


class Calls(TorchDispatchMode):
    """The collectives that run, with the bytes of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "_c10d_functional" and op._opname != "wait_tensor":
            self.found.append((op._opname, args[0].nbytes))
        return op(*args, **(kwargs or {}))


def refusals(act, odd: int) -> tuple[str, bool]:
    """What a rank is told where rank `odd` acts differently, and whether a run works afterwards."""
    rank, comm = dist.get_rank(), FuncolComm(LINE)
    try:
        act(comm, rank == odd)
        text = ""
    except CommError as error:
        text = str(error)
    full = torch.arange(32.0).view(8, 4)
    out = run(FOUND, full[2 * rank : 2 * rank + 2], comm)
    return text, torch.equal(out, full[:, rank : rank + 1])


def another_plan(comm, odd):
    local = torch.zeros(2, 4)
    run(plan(SRC, Layout(LINE, [R]), cost=GLOO) if odd else FOUND, local, comm)


def another_cost(comm, odd):
    run(plan(SRC, Layout(LINE, [S(1)]), cost=NCCL if odd else GLOO), torch.zeros(2, 4), comm)


def another_call(comm, odd):
    local = torch.zeros(2, 4)
    from_local(local, SRC, comm) if odd else run(FOUND, local, comm)


def another_type(comm, odd):
    other = SRC.with_layout(Layout(LINE, [P()]))
    from_local(torch.zeros(8, 4) if odd else torch.zeros(2, 4), other if odd else SRC, comm)


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("act", [another_plan, another_cost, another_call, another_type])
def test_a_rank_with_another_plan_is_an_error_on_all(pool4, act, odd):
    told = pool4.run(refusals, act, odd)
    assert [works for _, works in told] == [True] * 4
    texts = [text for text, _ in told]
    if act is another_call:
        odd_one, rest = f"rank {odd} is at `from_local`", "at `this plan`"
        assert len(set(texts)) == 1
        assert re.match(f"the ranks do not agree on call \\d+: {odd_one}.*{rest}", texts[0])
        return
    assert all(re.search("the ranks do not agree on (this plan|from_local)", t) for t in texts)
    facts = [dict(re.findall(r"(rank \d): +(.+?) at call \d", text)) for text in texts]
    assert facts == facts[:1] * 4
    assert list(facts[0]) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    others = {fact for rank, fact in facts[0].items() if rank != f"rank {odd}"}
    assert len(others) == 1
    assert facts[0][f"rank {odd}"] not in others
    if act is another_plan:
        assert others == {"f32[8@x,4] -> f32[8,4@x] on Mesh(x=4)"}
    if act is another_cost:
        assert not any(fact.startswith("fingerprint") for fact in facts[0].values())
    if act is another_type:
        assert "(Partial('sum'),)" in facts[0][f"rank {odd}"]


ODD = {
    "rank 2 has shape (3, 4), expected (2, 4)": lambda: torch.zeros(3, 4),
    "rank 2 has shape (8,), expected (2, 4)": lambda: torch.zeros(8),
    "rank 2 has dtype torch.float64, expected torch.float32": lambda: torch.zeros(2, 4).double(),
    "rank 2 has device meta, expected cpu": lambda: torch.zeros(2, 4, device="meta"),
    "rank 2 has a torch.sparse_coo tensor, expected a strided one": lambda: torch.zeros(
        2, 4
    ).to_sparse(),
    "rank 2 has None, expected a tensor of shape (2, 4)": lambda: None,
    "rank 2 has a list, expected a tensor of shape (2, 4)": lambda: [torch.zeros(2, 4)],
}


@pytest.mark.parametrize("mistake", ODD)
@pytest.mark.parametrize("verb", ["run", "run_fused", "from_local"])
def test_a_local_tensor_that_does_not_fit_is_an_error_on_all(pool4, mistake, verb):
    make = ODD[mistake]

    def act(comm, odd):
        local = make() if odd else torch.zeros(2, 4)
        if verb == "run":
            run(FOUND, local, comm)
        elif verb == "run_fused":
            run_fused(fuse([FOUND, FOUND]), [torch.zeros(2, 4), local], comm)
        else:
            from_local(local, SRC, comm)

    told = pool4.run(refusals, act, 2)
    about = {"run": "this plan", "run_fused": "this fused plan"}.get(verb, verb)
    for text, works in told:
        assert text.startswith(f"{about} cannot start: {mistake}.\n")
        assert works


def test_all_mistakes_are_told(pool4):
    def act(comm, odd):
        run(FOUND, torch.zeros(2, 4) if odd else torch.zeros(comm.rank, 4), comm)

    for text, works in pool4.run(refusals, act, 3):
        assert "rank 0 has shape (0, 4)" in text
        assert "rank 1 has shape (1, 4)" in text
        assert "rank 3" not in text  # and rank 2 holds 2 rows
        assert works


TINY = ("all_gather_into_tensor", 24)
"""The call number, the fingerprint up to it, and whether something is wrong."""


def agreements(check: str) -> list[list[tuple[str, int]]]:
    """The agreements of three runs of a plan, of two of another one, and of two of from_local."""
    comm, local = FuncolComm(LINE, check=check), torch.zeros(2, 4)
    other = plan(SRC, Layout(LINE, [R]), cost=GLOO)
    acts = [lambda: run(FOUND, local, comm)] * 3 + [lambda: run(other, local, comm)] * 2
    acts += [lambda: from_local(local, SRC, comm)] * 2
    found = []
    for act in acts:
        with Calls() as calls:
            act()
        found.append([call for call in calls.found if call == TINY])
    return found


def test_ranks_agree_once_and_trust_the_plan_then(pool4):
    tiny = [TINY]
    for found in pool4.run(agreements, "first"):
        assert found == [tiny, [], [], tiny, [], tiny, tiny]
    for found in pool4.run(agreements, "always"):
        assert found == [tiny] * 7
    for found in pool4.run(agreements, "never"):
        assert found == [[]] * 7


def later(check: str) -> str:
    """What a rank alone is told of a tensor that does not fit, where it trusts the plan."""
    comm = FuncolComm(LINE)
    run(FOUND, torch.zeros(2, 4), comm)
    try:
        run(FOUND, torch.zeros(3, 4), comm, check=check)
    except CommError as error:
        return error.sentence
    return ""


@pytest.mark.parametrize("check", ["first", "never"])
def test_a_rank_sees_its_own_mistake_without_the_others(pool4, check):
    for rank, text in enumerate(pool4.run(later, check)):
        assert text == f"this plan cannot start: rank {rank} has shape (3, 4), expected (2, 4)."


def impossible() -> list[str]:
    """What is said of Comms and plans that cannot be here."""
    small = Mesh.from_ranks([0, 1], "x")
    src = TensorType((8, 4), torch.float32, Layout(small, [S(0)]))
    acts = [
        lambda: FuncolComm(Mesh(x=5)),
        lambda: FuncolComm(LINE, "meta"),
        lambda: run(FOUND, torch.zeros(2, 4), FuncolComm(small)),
        lambda: run(plan(src, Layout(LINE, [S(0)])), torch.zeros(4, 4), FuncolComm(small)),
    ]
    found = []
    for act in acts:
        try:
            act()
        except CommError as error:
            found.append(error.sentence)
    return found


def test_what_cannot_run_here_is_refused_on_every_rank(pool4):
    for found in pool4.run(impossible):
        assert found == [
            "the mesh has rank 4, but there are 4 processes.",
            "the process group has no backend for meta tensors.",
            "this plan uses rank 2, which this Comm does not have.",
            "this plan uses rank 2, which this Comm does not have.",
        ]


# --- ranks outside ---------------------------------------------------------------------------


def visit(mesh: Mesh, everyone: bool) -> list[bool]:
    """A walk on a mesh of a few ranks, which the others make too if `everyone` says so."""
    rank = dist.get_rank()
    inside = mesh.position(rank) is not None
    if not inside and not everyone:
        return [True]
    comm = FuncolComm(mesh)
    full = torch.arange(32.0).view(8, 4)
    src = TensorType((8, 4), torch.float32, Layout(mesh, [S(0)]))
    rows = range(0) if not inside else src.index(rank)[0]
    mine = full[list(rows)] if inside else full.clone()
    x = from_local(mine, src, comm)
    right = []
    for to in (R, S(1), Partial(), S(0)):
        moved = run(plan(src, Layout(mesh, [to]), cost=comm.cost), mine, comm)
        right.append(inside or moved is mine)
        x = x.redistribute(Layout(mesh, [to]))
    y = distribute(full, Layout(mesh, [S(1)]), comm)
    if inside:
        right += [torch.equal(x.full(), full), torch.equal(y.full(), full)]
    else:
        for tensor in (x, y):  # rather than an empty tensor in place of the full one
            with pytest.raises(CommError, match="a Comm that it is not in"):
                tensor.full()
        right.append(torch.equal(mine, full))
    return right


@pytest.mark.parametrize("everyone", [True, False])
@pytest.mark.parametrize("ranks", [[1, 3], [3, 0], [2], [3, 1, 0]])
def test_a_rank_outside_may_call_along_or_not_at_all(pool4, ranks, everyone):
    for right in pool4.run(visit, Mesh.from_ranks(ranks, "x"), everyone):
        assert all(right)


def halves() -> list:
    """Two halves of the world that do different things, then send the tensor across and back."""
    rank, full = dist.get_rank(), torch.arange(24.0).view(4, 6)
    left, right = Mesh.from_ranks([0, 1], "a"), Mesh.from_ranks([3, 2], "b")
    comm = FuncolComm(LINE)
    own = left if rank < 2 else right
    src = TensorType((4, 6), torch.float32, Layout(own, [S(0)]))
    mine = full[list(src.index(rank)[0])]
    if rank < 2:  # the halves do different things, different numbers of times
        for _ in range(3):
            mine = run(plan(src, Layout(own, [S(1)])), mine, comm)
            mine = run(plan(src.with_layout(Layout(own, [S(1)])), src.layout), mine, comm)
    else:
        whole = run(plan(src, Layout(own, [R])), mine, comm)
        mine = run(plan(src.with_layout(Layout(own, [R])), src.layout), whole, comm)
    across = plan(
        TensorType((4, 6), torch.float32, Layout(left, [S(0)])),
        TensorType((4, 6), torch.float32, Layout(right, [S(1)])),
    )
    there = run(across, mine if rank < 2 else None, comm)
    back = run(across.transpose(), there, comm)
    return [torch.equal(mine, full[list(src.index(rank)[0])]), list(there.shape), list(back.shape)]


def test_parts_of_the_world_work_by_themselves_and_together(pool4):
    found = pool4.run(halves)
    assert found == [[True, [0, 0], [2, 6]]] * 2 + [[True, [4, 3], [0, 0]]] * 2


def numbers(dtype: torch.dtype) -> list[Facts]:
    """What each rank has of a 0-d tensor that goes from rank 1 to ranks 2 and 3."""
    rank, comm = dist.get_rank(), FuncolComm(LINE)
    src = TensorType((), dtype, Layout(Mesh.from_ranks([1], "x"), [R]))
    dst = TensorType((), dtype, Layout(Mesh.from_ranks([2, 3], "x"), [R]))
    given = torch.tensor(5).to(dtype) if rank == 1 else None
    return [
        None if out is None else facts(out)
        for out in (run(plan(src, dst, cost=cost), given, comm) for cost in (GLOO, NCCL))
    ]


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64, torch.bool, torch.float8_e5m2])
def test_a_rank_that_leaves_has_a_zero_of_no_dims(pool4, dtype):
    five, zero = facts(torch.tensor(5).to(dtype)), facts(torch.zeros((), dtype=dtype))
    assert pool4.run(numbers, dtype) == [[None] * 2, [zero] * 2, [five] * 2, [five] * 2]


def vacant() -> list:
    """Cross-mesh plans of tensors without elements, on ranks that come without a tensor."""
    rank, comm = dist.get_rank(), FuncolComm(LINE)
    left, right = Mesh.from_ranks([0, 1], "a"), Mesh.from_ranks([1, 2], "b")
    found = []
    for shape in ((0, 3), (3, 0), (0,)):
        src = TensorType(shape, torch.int16, Layout(left, [S(0)]))
        dst = TensorType(shape, torch.int16, Layout(right, [R]))
        given = torch.empty(src.local_shape(rank), dtype=torch.int16) if rank < 2 else None
        out = run(plan(src, dst), given, comm)
        found.append(out if out is None else (list(out.shape), out.dtype))
    return found


def test_a_rank_that_comes_in_gets_its_block_of_nothing(pool4):
    i16 = torch.int16
    leaves = [([0, 0], i16), ([0, 0], i16), ([0], i16)]
    holds = [([0, 3], i16), ([3, 0], i16), ([0], i16)]
    assert pool4.run(vacant) == [leaves, holds, holds, [None] * 3]


# --- surroundings ----------------------------------------------------------------------------


def surroundings() -> list[str]:
    """What goes wrong in unusual modes, each of which must change nothing. Warnings are errors."""
    rank, full = dist.get_rank(), torch.arange(32.0).view(8, 4)
    float64 = full.double()

    def walk(context, full):
        comm = FuncolComm(LINE)
        src = TensorType((8, 4), full.dtype, Layout(LINE, [S(0)]))
        mine, out = full[2 * rank : 2 * rank + 2], []
        with context:
            for cost in (GLOO, NCCL):
                for to in (S(0), S(1), R, P(), P("avg")):
                    there = run(plan(src, Layout(LINE, [to]), cost=cost), mine, comm)
                    back = run(plan(src.placed("x", to), Layout(LINE, [R]), cost=cost), there, comm)
                    out += [there, back]
            y = distribute(full if rank == 1 else None, Layout(LINE, [S(1)]), comm, src_rank=1)
            out.append(run_fused(fuse([plan(y.type, Layout(LINE, [R]))]), [y.local], comm)[0])
            x = from_local(mine, src, FuncolComm(LINE, check="always"))
            out.append(x.full())
        assert all(type(t) is torch.Tensor and t.is_contiguous() for t in out)
        return out

    expected = walk(torch.enable_grad(), full)
    assert not any(t.is_inference() or t.requires_grad for t in expected)
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, context in {
            "no_grad": torch.no_grad(),
            "inference_mode": torch.inference_mode(),
            "default device": torch.device("meta"),
            "deterministic": torch.autograd.set_multithreading_enabled(False),
        }.items():
            found = walk(context, full)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(name)
        torch.set_default_dtype(torch.float16)
        try:
            found = walk(torch.enable_grad(), float64)
        finally:
            torch.set_default_dtype(torch.float32)
        if not all(torch.equal(a, b.double()) for a, b in zip(found, expected, strict=True)):
            wrong.append("default dtype")
        with torch.inference_mode():
            inner = full.clone()
        if not all(map(torch.equal, walk(torch.enable_grad(), inner), expected)):
            wrong.append("inference tensors")
    return wrong


def test_modes_change_nothing_and_nothing_warns(pool4):
    assert pool4.run(surroundings) == [[]] * 4


def versions() -> list[int]:
    """How often inputs were written to."""
    rank, comm = dist.get_rank(), FuncolComm(LINE, check="never")
    found = []
    for one in (*moves(torch.float32), *reductions(torch.float32)):
        place = one.src.mesh.position(rank)
        given = None if place is None else torch.ones(one.src.local_shape(rank))
        run(one, given, comm)
        found.append(0 if given is None else given._version)
    return found


def test_no_input_is_written_to(pool4):
    for found in pool4.run(versions):
        assert set(found) == {0}
