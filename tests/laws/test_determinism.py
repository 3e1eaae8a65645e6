"""What is the same to the bit: run after run, on all ranks that hold it, in every layout.

Tensors are larger than elsewhere, and not integers: with a handful of elements sums would come out
the same in any order. `deterministic` is what makes sums the same on every mesh; the last test of
all shows that without it they are not, so that these tests can fail.
"""

import itertools
from collections.abc import Callable, Sequence

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import Layout, Mesh, Replicate, SimulatedComm, connect, distribute, spmd
from fdtensor.programs.deterministic import EXACT
from fdtensor.testing.strategies import layouts, meshes
from tests.support.depth import times

SIZE = 20

EXACTLY: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y.sign(),
    "div": lambda x, y: x / (1 + y.abs()),
    "where": lambda x, y: torch.where(x > y, x, y.sqrt()),
    "clamp": lambda x, y: x.clamp(min=y, max=2 * y),
    "cast": lambda x, y: x.to(torch.float16).to(x.dtype) - y,
    "relu": lambda x, y: torch.relu(x).maximum(y.neg()),
}
"""Elementwise functions of two tensors of which IEEE 754 says the bits."""

MOVING: dict[str, Callable[..., torch.Tensor]] = {
    "t": lambda x, y: x.t(),
    "flip": lambda x, y: x.flip(0),
    "reshape": lambda x, y: x.reshape(2, -1).t().reshape(SIZE, SIZE),
    "slices": lambda x, y: torch.cat([x[:, 7:], y[:, :7]], 1),
    "roll": lambda x, y: y.roll(3, 1),
}

ROUNDING: dict[str, Callable[..., torch.Tensor]] = {
    "mm": lambda x, y: x @ y / SIZE,
    "mm.t": lambda x, y: x.t() @ y / SIZE,
    "softmax": lambda x, y: x.softmax(0) * SIZE,
    "sum": lambda x, y: x - y.sum(1, keepdim=True),
    "mean": lambda x, y: x * y.mean(),
    "norm": lambda x, y: x / (1 + torch.linalg.vector_norm(y)),
    "layer_norm": lambda x, y: F.layer_norm(x, (SIZE,)) + y,
    "gelu": lambda x, y: F.gelu(x) + torch.sigmoid(y),
    "logsumexp": lambda x, y: x + y.logsumexp(0),
    "cumsum": lambda x, y: x.cumsum(1) / SIZE + y,
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.3),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None])[0],
}
"""Functions that round according to how a kernel goes through its operands."""

Steps = Sequence[tuple[str, int, int]]


@attrs.frozen
class Graph:
    """A function of three tensors: each step makes a tensor of two that are there."""

    steps: Steps

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        known = list(tensors)
        for name, i, j in self.steps:
            f = (EXACTLY | MOVING | ROUNDING)[name]
            known.append(f(known[i % len(known)], known[j % len(known)]))
        return known[-3:]

    def grads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The derivatives of the mean of what it gives."""
        return torch.func.grad(lambda x, y, z: sum(out.mean() for out in self(x, y, z)), (0, 1, 2))(
            *tensors
        )


def graphs(names) -> st.SearchStrategy[Graph]:
    step = st.tuples(st.sampled_from(sorted(names)), st.integers(0, 9), st.integers(0, 9))
    return st.builds(Graph, st.lists(step, min_size=1, max_size=6).map(tuple))


@st.composite
def laid(draw, mesh: Mesh) -> tuple[Layout, ...]:
    """Layouts of three tensors."""
    one = layouts(mesh=mesh, shape=(SIZE, SIZE), partial=False)
    return tuple(draw(one) for _ in range(3))


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, SIZE, generator=generator) for _ in range(3)]


def bits(x: torch.Tensor) -> bytes:
    """The bits of a tensor; a nan is one, whatever its sign."""
    return torch.where(x.isnan(), torch.inf, x).contiguous().numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same to the bit."""
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and bits(a) == bits(b)


def outcome(graph: Graph, given_layouts: Sequence[Layout], seed: int, **options) -> list[list]:
    """What each rank of this process has of the whole results, and again of a second run."""
    mesh = given_layouts[0].mesh
    comm = connect(mesh)
    xs = [distribute(x, to, comm) for x, to in zip(tensors(seed), given_layouts, strict=True)]
    whole = Layout(mesh, [Replicate()] * mesh.ndim)
    f = spmd(graph, out_layouts=whole, **options)
    runs = [f(*xs), f(*xs)]
    return [[list(comm.leaves(out.local)) for out in outs] for outs in runs]


def check(graph: Graph, runs: Sequence[Sequence[Sequence]], seed: int | None) -> None:
    """All ranks have the same in both runs; with a seed it is what one process has."""
    wanted = [None] * len(runs[0]) if seed is None else graph(*tensors(seed))
    for first, again, whole in zip(*runs, wanted, strict=True):
        expected = first[0] if whole is None else whole
        assert all(same(block, expected) for block in (*first, *again))


MESHES = meshes(max_axes=2, max_size=4, max_ranks=8)


@given(st.data(), MESHES, graphs(EXACTLY | MOVING | ROUNDING), st.integers(0, 99))
def test_runs_and_ranks_have_the_same_bits(data, mesh, graph, seed):
    check(graph, outcome(graph, data.draw(laid(mesh)), seed), None)


@given(st.data(), MESHES, graphs(EXACTLY | MOVING), st.integers(0, 99))
def test_what_is_exact_or_moved_has_the_bits_of_one_process(data, mesh, graph, seed):
    check(graph, outcome(graph, data.draw(laid(mesh)), seed), seed)


@given(st.data(), MESHES, graphs(EXACTLY | MOVING | ROUNDING), st.integers(0, 99))
def test_deterministic_results_have_the_bits_of_one_process(data, mesh, graph, seed):
    check(graph, outcome(graph, data.draw(laid(mesh)), seed, deterministic=True), seed)


@given(st.data(), MESHES, graphs(EXACTLY | MOVING | ROUNDING), st.integers(0, 99))
def test_deterministic_derivatives_have_the_bits_of_one_process(data, mesh, graph, seed):
    comm, chosen = SimulatedComm(mesh), data.draw(laid(mesh))
    xs = [distribute(x, to, comm) for x, to in zip(tensors(seed), chosen, strict=True)]
    grads = spmd(graph.grads, deterministic=True)(*xs)
    for grad, expected in zip(grads, graph.grads(*tensors(seed)), strict=True):
        assert same(grad.full(), expected)


def on_ranks(cases: Sequence[tuple[Graph, Sequence[Layout], int]]) -> list:
    ways = ({}, {"deterministic": True})
    return [[outcome(*case, **options) for options in ways] for case in cases]


def test_real_ranks_have_the_same_bits(pool4):
    names, meshes_ = sorted(ROUNDING), (Mesh(x=4), Mesh(a=2, b=2))
    cases = []
    for i in range(times(len(names), 10 * len(names))):
        steps = [(names[(i + k * k) % len(names)], i + k, i // 2 + 2 * k) for k in range(4)]
        mesh = meshes_[i % 2]
        cuts = [mesh.layout(*order) for order in ((mesh.axes[0],), (None, mesh.axes[-1]), ())]
        cases.append((Graph(tuple(steps)), [cuts[(i + k) % 3] for k in range(3)], i))
    by_rank = pool4.run(on_ranks, cases)
    for case, ways in zip(cases, zip(*by_rank, strict=True), strict=True):
        for k, seed in enumerate((None, case[2])):
            runs = [of_rank[k][n] for of_rank in ways for n in range(2)]
            held = [list(itertools.chain(*blocks)) for blocks in zip(*runs, strict=True)]
            check(case[0], [held, held], seed)


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SCALARS = {"clamp": (0.1, 0.7), "full_like": (0.3,), "masked_fill": (0.3,), "fill": (0.3,)}
SCALARS |= {"clamp_min": (0.4,), "clamp_max": (0.4,), "threshold_backward": (0.1,)}


def applied(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    op = getattr(torch.ops.aten, name)
    more = SCALARS.get(name, ())
    if name in ("where", "masked_fill"):
        return op(x > y, x, y) if name == "where" else op(x, x > y, *more)
    if name == "_to_copy":
        return op(x, dtype=torch.float16 if x.dtype != torch.float16 else torch.float32)
    try:
        return op(x, y, *more)
    except (TypeError, RuntimeError):
        return op(x, *more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT.split())
def test_an_exact_op_gives_a_block_the_bits_it_gives_the_whole(name, dtype):
    x, y = ((torch.rand(2, 37, 53) - 0.3).to(dtype)).unbind()
    if name.startswith("bitwise"):
        x, y = (t.view(torch.int16) if t.element_size() == 2 else t.long() for t in (x, y))
    whole = applied(name, x, y)
    blocks = (
        lambda t: t[5:12],
        lambda t: t[:, 3:10],
        lambda t: t[:, 3:10].contiguous(),
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t.t().contiguous(),
        lambda t: t[3:4, 3:4].clone(),
    )
    for block in blocks:
        found, expected = applied(name, block(x), block(y)), block(whole)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_value_that_lies_transposed_in_memory_does_so_on_every_mesh():
    def f(x, y, z):
        return [(x.t() * y * z).sum(1), (x.t() * y * z) @ x]

    mesh = Mesh(x=4)
    cut = [mesh.layout(), mesh.layout("x"), mesh.layout("x")]
    check(f, outcome(f, cut, 1, deterministic=True), 1)


def test_without_the_option_a_sum_along_a_cut_dim_has_other_bits():
    graph = Graph((("mm", 0, 1), ("sum", 3, 3), ("softmax", 4, 4)))
    mesh = Mesh(x=4)
    cut = [mesh.layout(None, "x"), mesh.layout("x"), mesh.layout()]
    with pytest.raises(AssertionError):
        check(graph, outcome(graph, cut, 1), 1)
    check(graph, outcome(graph, cut, 1, deterministic=True), 1)
