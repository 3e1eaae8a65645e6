"""A table of plain torch functions, and what it takes to run one of them on any layouts.

A case says what its function takes as a text: `"b i, i h, b<v, b?"` is a matrix, a matrix whose
rows are as many as the columns of the first, integers below `v` and bools. Letters are sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.plans.cost import GLOO, NCCL, CostModel
from fdtensor.programs.program import Program
from fdtensor.programs.tracer import trace
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import layouts, meshes
from fdtensor.testing.strides import Strides, strided
from fdtensor.testing.tensor_strategies import memory_formats
from fdtensor.testing.values import block, scatter

__all__ = [
    "CASES",
    "SMOOTH",
    "Case",
    "Setting",
    "alone",
    "checked",
    "close",
    "derivatives",
    "differentiated",
    "plainly",
    "ran",
    "same",
    "settings_of",
    "spread_over",
    "tensors_of",
    "traced",
]


@attrs.frozen(eq=False)
class Case:
    """A plain function and the tensors that it takes."""

    f: Callable[..., Any]
    takes: str
    smooth: bool = False
    """Whether its results have derivatives by all that it takes."""
    least: int = 0
    """The least that each size may be."""

    @property
    def names(self) -> tuple[str, ...]:
        """The letters of its sizes, in order."""
        letters = (c for c in self.takes if c.isalpha())
        return tuple(dict.fromkeys(letters))

    @property
    def indexed(self) -> set[str]:
        """The sizes that integers are below, which are not 0."""
        return {self.takes[i + 1] for i, c in enumerate(self.takes) if c == "<"}


@attrs.frozen(eq=False)
class Setting:
    """A case with sizes, layouts and prices."""

    name: str
    sizes: dict[str, int]
    mesh: Mesh
    layouts: tuple[Layout, ...]
    cost: CostModel
    strides: tuple[Strides | None, ...]

    @property
    def case(self) -> Case:
        """The case."""
        return CASES[self.name]

    @property
    def types(self) -> tuple[TensorType, ...]:
        """The types of what the function takes."""
        tensors = tensors_of(self.case, self.sizes)
        pairs = zip(tensors, self.layouts, strict=True)
        return tuple(TensorType(tuple(t.shape), t.dtype, layout) for t, layout in pairs)

    def __repr__(self) -> str:
        types = ", ".join(f"{t} {t.layout.placements}" for t in self.types)
        return f"{self.name} {self.sizes} {self.mesh!r} {self.cost.name}: {types}"


def tensors_of(case: Case, sizes: dict[str, int]) -> list[torch.Tensor]:
    """Random tensors for a case: small integers in float64, indices, bools."""
    generator = torch.Generator().manual_seed(sum(sizes.values()))
    made = []
    for text in case.takes.split(","):
        bare, _, below = text.strip().partition("<")
        shape = [_size(c, sizes) for c in bare.removesuffix("?").split()]
        if below:
            made.append(torch.randint(_size(below, sizes), shape, generator=generator))
        elif bare.endswith("?"):
            made.append(torch.randint(2, shape, generator=generator) > 0)
        else:
            made.append(torch.randint(-4, 5, shape, generator=generator).double())
    return made


def _size(text: str, sizes: dict[str, int]) -> int:
    return sizes[text] if text.isalpha() else int(text)


@st.composite
def settings_of(
    draw: st.DrawFn,
    name: str,
    *,
    world: int | None = None,
    partial: Sequence[str] = ("sum", "avg", "max", "min"),
    max_size: int = 7,
) -> Setting:
    """A case on any small mesh, with any sizes and any layouts of what it takes."""
    case = CASES[name]
    mesh = draw(meshes(max_axes=2, max_ranks=6, world=world))
    sizes = {}
    for letter in case.names:
        least = max(case.least, letter in case.indexed)
        sizes[letter] = draw(st.integers(least, max_size))
    found, strides = [], []
    for t in tensors_of(case, sizes):
        strides.append(draw(memory_formats(t.ndim)))
        ops = partial if t.dtype.is_floating_point else ()
        found.append(draw(layouts(mesh, tuple(t.shape), partial=ops)))  # type: ignore[arg-type]
    cost = draw(st.sampled_from([NCCL, GLOO]))
    return Setting(name, sizes, mesh, tuple(found), cost, tuple(strides))


def traced(setting: Setting, **options: Any) -> Program:
    """The program of a setting."""
    return trace(setting.case.f, *setting.types, cost=setting.cost, **options)


def ran(setting: Setting, program: Program) -> tuple[list[Any], SimulatedComm]:
    """What a program gives for the tensors of a setting, and the mesh that it ran on."""
    full = tensors_of(setting.case, setting.sizes)
    values = [
        strided(scatter(t, type, i), how)
        for i, (t, type, how) in enumerate(zip(full, setting.types, setting.strides, strict=True))
    ]
    comm = SimulatedComm(setting.mesh, cost=setting.cost)
    return run_lines(program, values, comm), comm


def alone(setting: Setting) -> list[torch.Tensor]:
    """What the plain function gives."""
    return plainly(setting)(*tensors_of(setting.case, setting.sizes))


def checked(setting: Setting, **options: Any) -> Program:
    """The program of a setting, after its results were compared with the plain function's."""
    program = traced(setting, **options)
    outs, _ = ran(setting, program)
    for blocks, type, single in zip(outs, program.out_types, alone(setting), strict=True):
        same(blocks, type, single)
    return program


def derivatives(f: Callable[..., Any], leaves: Sequence[torch.Tensor], twice: bool) -> list[Any]:
    """The gradients of a sum of squares of results, and those of the sum of their squares."""

    def squares(tensors: Sequence[torch.Tensor]) -> Any:
        return sum((t**2).sum() for t in tensors if t.is_floating_point())

    options = {"allow_unused": True, "materialize_grads": True}
    loss = squares(f(*leaves))
    grads = list(torch.autograd.grad(loss, leaves, create_graph=twice, **options))
    if not twice or not any(g.requires_grad for g in grads):
        return grads
    return [*grads, *torch.autograd.grad(squares(grads), leaves, **options)]


def spread_over(setting: Setting, comm: Any) -> Callable[..., list[torch.Tensor]]:
    """The function of a setting through `spmd`, from full tensors to full tensors."""

    def f(*leaves: torch.Tensor) -> list[torch.Tensor]:
        args = [distribute(t, layout, comm) for t, layout in zip(leaves, setting.layouts)]
        out = flatten(spmd(setting.case.f)(*args), is_leaf=lambda x: isinstance(x, DTensor))[0]
        return [t.full() for t in out if isinstance(t, DTensor)]

    return f


def plainly(setting: Setting) -> Callable[..., list[torch.Tensor]]:
    """The function of a setting, its results as a list."""

    def f(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return [t for t in flatten(setting.case.f(*leaves))[0] if isinstance(t, torch.Tensor)]

    return f


def differentiated(setting: Setting, comm: Any, twice: bool = False) -> tuple[list[Any], list[Any]]:
    """The derivatives of a setting's function through `spmd`, and those of the plain function."""
    full = tensors_of(setting.case, setting.sizes)
    leaves = [[t.clone().requires_grad_() for t in full] for _ in range(2)]
    spread = derivatives(spread_over(setting, comm), leaves[0], twice)
    return spread, derivatives(plainly(setting), leaves[1], twice)


def close(found: Sequence[torch.Tensor], due: Sequence[torch.Tensor]) -> None:
    """Asserts that tensors are equal but for the order of their sums."""
    torch.testing.assert_close(list(found), list(due), rtol=1e-8, atol=1e-8, equal_nan=True)


def same(blocks: Sequence[torch.Tensor], type: TensorType, single: torch.Tensor) -> None:
    """Asserts that each rank holds its block of a tensor."""
    assert type.shape == tuple(single.shape)
    assert not type.layout.partial, f"{type} is pending"
    for rank, local in zip(type.mesh.ranks, blocks, strict=True):
        due = block(single.detach(), type, rank)
        torch.testing.assert_close(local, due, rtol=1e-9, atol=1e-9, equal_nan=True)


# --- the functions ---------------------------------------------------------------------------


def mlp(x, v, w):
    return torch.relu(x @ v) @ w


def square_loss(x, v, w):
    return ((torch.tanh(x @ v) @ w) ** 2).mean() if x.numel() and w.shape[1] else (x @ v @ w).sum()


def gradients(x, v, w):
    return torch.func.grad_and_value(square_loss, argnums=(0, 1, 2))(x, v, w)


def pulled_back(x, v, w):
    out, back = torch.func.vjp(mlp, x, v, w)
    return out, back(2 * out)


def pushed_forward(x, v, w):
    return torch.func.jvp(mlp, (x, v, w), (2 * x, v + 1, w))


def curvature(x, w):
    return torch.func.hessian(lambda w: ((x @ w) ** 3).sum())(w)


def each_number(x):
    return torch.func.vmap(
        lambda row: torch.polygamma(1, row.abs() + 1) + torch.mvlgamma(row + 40, 2)
    )(x)


def each_row(x, w):
    return torch.func.vmap(lambda row: (row @ w).cumsum(0) + row.sum())(x)


def each_gradient(x, w):
    return torch.func.vmap(torch.func.grad(lambda row, w: ((row @ w) ** 2).sum()), (0, None))(x, w)


def once_ten(x):
    return x.sum() + 10, x.sum(0) + 10, (x + 10).sum(1), x.sum(1, keepdim=True) * 2 - x


def statistics(x):
    return x.mean(), x.mean(0), x.var(1, correction=0), x.norm(), x.prod(1), x.std(0, correction=0)


def extremes(x):
    return x.amax(0), x.amin(1), x.max(dim=1).values, (x > 0).any(0), (x > 0).all(), x.logsumexp(1)


def in_place(x, y):
    z = x.clone()
    z += y
    z.mul_(2)
    z[1:] += 1
    z.view(-1)[::2].neg_()
    return z, x


def written_out(x, y):
    out = torch.empty_like(x)
    torch.add(x, y, out=out)
    torch.mul(out, 3, out=out[...])
    return out


def reshaped(x):
    b, i, j = x.shape
    return (
        x.reshape(b * i, j),
        x.reshape(b, i * j).t(),
        x.flatten(),
        x.view(b, i, 1, j).transpose(0, 3),
    )


def split_dims(x):
    rows, columns = x.shape
    return x.unflatten(0, (2, rows // 2)), x.view(2, rows // 2 * columns), x.view(-1, 2).sum(1)


def halves(x):
    rows, columns = x.shape
    y = x.view(2, rows // 2, columns).transpose(0, 1) * 2
    return y.reshape(rows, columns), y.reshape(rows // 2, -1)


def doubled_rows(x, y):
    return halves(torch.cat([x, y])), split_dims(torch.stack([x, y], 1).flatten(0, 1))


def control_flow(x):
    y = x
    for _ in range(x.shape[0] % 3):
        y = y + x
    return y.sum(0) if x.shape[1] > 2 else y


TABLE = torch.arange(21.0, dtype=torch.float64).reshape(7, 3)


def closed_over(x):
    table = TABLE[:, : x.shape[1]]
    return x @ table.T[: x.shape[1], :], table[: x.shape[0]] + 1


def checkpointed(x, v, w):
    def loss(x, v, w):
        hidden: Any = checkpoint(lambda x, v: torch.tanh(x @ v), x, v, use_reentrant=False)
        return (hidden @ w).sum()

    leaves = [t.detach().requires_grad_() for t in (x, v, w)]
    return torch.autograd.grad(loss(*leaves), leaves)


def contracted(x, y):
    return torch.einsum("bij,bjk->bik", x, y), torch.einsum("bij,bjk->kb", x, y)


def outer(x, y):
    return torch.einsum("i,j->ij", x, y), torch.outer(x, y).sum(0), torch.dot(x, x), x[:, None] > y


def joined(x, y):
    both = torch.cat([x, y, x])
    first, _ = (
        both.split([x.shape[0] + 1, both.shape[0] - x.shape[0] - 1]) if x.shape[0] else (x, y)
    )
    return first * 2, torch.stack([x.sum(0), y.sum(0)], 1), torch.cat([x, x], 1)


def chunks(x):
    parts = x.chunk(3, 1)
    return parts[0] + 1, [t.sum() for t in x.unbind(0)], torch.hstack([x, x]), x.tensor_split(2)


def selected(x, mask, y):
    return torch.where(mask, x, y), x.masked_fill(mask, -7), torch.where(mask, x, 1.0).sum(0)


def looked_up(x, index):
    wide = index[:, None].expand(-1, x.shape[1])
    taken = x.gather(0, wide)
    added = torch.zeros_like(x).scatter_add(0, wide, taken + 1)
    return taken, added, x.index_select(0, index), x[index], x.scatter(0, wide[:1], 9.0)


def put(x, index, y):
    return x.index_add(0, index, y), x.index_put((index,), y, accumulate=True)


def normalized(x):
    return x.softmax(0), x.log_softmax(1), (x / 3).softmax(-1) @ x.t()


def classified(x, target, weight):
    target = torch.where(target == 1, -100, target)
    weight = weight.abs() + 1

    def loss(x):
        some = F.cross_entropy(x, target, weight, label_smoothing=0.1)
        return some + F.cross_entropy(x, target.relu(), ignore_index=0, reduction="sum")

    return torch.func.grad_and_value(loss)(x), F.cross_entropy(x, target, reduction="none")


def embedded(table, index):
    def loss(table):
        return (F.embedding(index, table, padding_idx=0) ** 2).sum()

    return F.embedding(index, table), torch.func.grad(loss)(table)


def layer_norm(x, weight, bias):
    def loss(x, weight, bias):
        return (F.layer_norm(x, x.shape[1:], weight, bias) ** 3).sum()

    return F.layer_norm(x, x.shape[1:], weight), torch.func.grad(loss, (0, 1, 2))(x, weight, bias)


def rms_norm(x, weight):
    return torch.func.vjp(lambda x, w: F.rms_norm(x, x.shape[1:], w), x, weight)[1](x)


def group_norm(x, weight):
    x = torch.cat([x, 2 * x, x + 1, x], 1)
    weight = torch.cat([weight] * 4)

    def loss(x):
        return (F.group_norm(x, 2, weight) ** 3).sum()

    return F.group_norm(x, 4), torch.func.grad(loss)(x)


def batch_norm(x, weight, bias):
    def loss(x, weight, bias):
        mean, var = torch.zeros(x.shape[1]).double(), torch.ones(x.shape[1]).double()
        y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.3)
        return (y**3).sum(), (mean, var)

    return torch.func.grad_and_value(loss, (0, 1, 2), has_aux=True)(x, weight, bias)


def attended(q, k, v):
    def loss(q, k, v):
        return (F.scaled_dot_product_attention(q, k, v) ** 2).sum()

    causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return causal, torch.func.grad_and_value(loss, (0, 1, 2))(q, k, v)


def convolved(x, w, bias):
    def loss(x, w, bias):
        y = F.conv1d(x, w, bias, padding=1)
        return (F.max_pool1d(torch.relu(y), 2, ceil_mode=True) ** 2).sum() + y.mean()

    return torch.func.grad_and_value(loss, (0, 1, 2))(x, w, bias)


def image(x, w):
    y = F.conv2d(x, w, stride=2, padding=1)
    return (
        y,
        F.avg_pool2d(y, 2, ceil_mode=True),
        F.adaptive_avg_pool2d(x, 1),
        F.interpolate(x, scale_factor=2.0),
    )


def running(x):
    return (
        x.cumsum(0),
        x.cumsum(1).sum(0),
        (x / 4).cumprod(0),
        x.flip(0),
        x.roll(2, 0),
        x.diff(dim=1),
    )


def padded(x):
    wide = F.pad(x, (1, 2, 0, 1), value=3.0)
    return wide, wide[1:, :-1], F.pad(x, (0, -1)), x.repeat(2, 1), x.expand(2, *x.shape).sum((0, 2))


def sliced(x):
    return x[1:-1], x[::2] * 2, x[:, 1:].sum(1), x[-1], x[:, 0], x.narrow(0, 1, x.shape[0] - 2)


def shifted_loss(x):
    return torch.func.grad(lambda x: ((x[1:] - x[:-1]) ** 2).sum() + x[0].sum())(x)


def triangles(x):
    rows, columns = x.shape
    mask = torch.arange(rows)[:, None] >= torch.arange(columns)
    return x.tril(), x.triu(1), x.masked_fill(mask, 0), mask, torch.ones(rows, 2) + 1, x.diagonal()


def adam(p, q, g, h):
    params, grads = [p, q], [g, h]
    m = torch._foreach_mul(grads, 0.1)
    v = torch._foreach_mul(grads, grads)
    torch._foreach_add_(v, 1e-3)
    update = torch._foreach_div(m, torch._foreach_sqrt(v))
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    scaled = torch._foreach_mul(update, torch.clamp(1 / (norm + 1), max=1.0))
    return torch._foreach_add(params, scaled, alpha=-0.5), norm


def casts(x):
    half = x.to(torch.float32)
    return (
        half * 2,
        x.long() // 2,
        (x > 1).sum(),
        x.to(torch.complex128).abs(),
        (x > 0).double().mean(0),
    )


def one_hot(x, index):
    hot = F.one_hot(index, 4).double()
    return hot.t() @ x, hot.sum(0), hot.argmax(1)


def ranked(x):
    distinct = x * 64 + torch.arange(x.numel(), dtype=x.dtype).view(x.shape)
    return distinct.sort(0).values, distinct.argmax(1), distinct.topk(1, 0).indices


def twice_used(x, w):
    y = x @ w
    return y @ y.t(), y.sum(0), y.t() @ y, y.exp().sum(), F.linear(x, w.t(), y[0])


torch.library.define("tests::unruled", "(Tensor x) -> Tensor")
torch.library.impl("tests::unruled", "CompositeExplicitAutograd", torch.clone)
UNRULED = torch.ops.tests.unruled.default
"""An op that nobody gives a rule."""


def unruled(x):
    return UNRULED(x), torch.fft.fft(x), torch.linalg.matrix_exp(x[:1, :1]), x.unfold(0, 2, 1)


def scalars(x):
    return x * 2, x.sum(), x.reshape(1, 1), torch.stack([x, x]), x.expand(3)


def blocks(x):
    return (
        torch.block_diag(x, x),
        torch.kron(x, torch.eye(2).double()),
        x.repeat_interleave(2, 0),
        x.trace(),
    )


CASES = {
    "mlp": Case(mlp, "b i, i h, h o", True),
    "gradients": Case(gradients, "b i, i h, h o", True),
    "vjp": Case(pulled_back, "b i, i h, h o", True),
    "jvp": Case(pushed_forward, "b i, i h, h o", True),
    "hessian": Case(curvature, "b i, i o", True),
    "vmap": Case(each_row, "b i, i o", True, 1),
    "vmap of numbers": Case(each_number, "b i", True, 1),
    "gradient of each row": Case(each_gradient, "b i, i o", True, 1),
    "ten once": Case(once_ten, "a b", True),
    "statistics": Case(statistics, "a b", least=1),
    "extremes": Case(extremes, "a b", least=1),
    "in place": Case(in_place, "a b, a b", True),
    "out=": Case(written_out, "a b, a b"),
    "views": Case(reshaped, "a b c", True),
    "split dims": Case(doubled_rows, "a b, a b", True, 1),
    "control flow": Case(control_flow, "a b", True),
    "closed over": Case(closed_over, "a 3", True),
    "checkpoint": Case(checkpointed, "b i, i h, h o"),
    "einsum": Case(contracted, "b i j, b j k", True),
    "outer": Case(outer, "i, j"),
    "cat and split": Case(joined, "a b, c b", True, 1),
    "chunks": Case(chunks, "a b", True, 1),
    "where": Case(selected, "a b, a b?, a b"),
    "gather and scatter": Case(looked_up, "a b, c<a", least=1),
    "index_add": Case(put, "a b, c<a, c b"),
    "softmax": Case(normalized, "a b", True, 1),
    "cross_entropy": Case(classified, "b c, b<c, c", least=2),
    "embedding": Case(embedded, "v d, b t<v"),
    "layer_norm": Case(layer_norm, "a b, b, b", True, 1),
    "rms_norm": Case(rms_norm, "a b, b", True, 1),
    "group_norm": Case(group_norm, "a b c, b", True, 2),
    "batch_norm": Case(batch_norm, "b c t, c, c", least=2),
    "attention": Case(attended, "b h t d, b h s d, b h s d", True, 1),
    "convolution": Case(convolved, "b c t, o c 3, o", True, 1),
    "image": Case(image, "b c h w, o c 3 3", True, 1),
    "cumsum": Case(running, "a b", True, 1),
    "pad": Case(padded, "a b", True, 1),
    "slices": Case(sliced, "a b", True, 2),
    "gradient of slices": Case(shifted_loss, "a b", True, 1),
    "triangles": Case(triangles, "a b"),
    "adam": Case(adam, "a b, c, a b, c"),
    "casts": Case(casts, "a b", least=1),
    "one_hot": Case(one_hot, "a b, a<4", least=1),
    "sort": Case(ranked, "a b", least=1),
    "used twice": Case(twice_used, "a b, b c", True, 1),
    "no rule": Case(unruled, "a b", least=2),
    "scalars": Case(scalars, " ", True),
    "blocks": Case(blocks, "a b", least=1),
}


SMOOTH = [name for name, case in CASES.items() if case.smooth]
"""The cases that have derivatives by all that they take."""
