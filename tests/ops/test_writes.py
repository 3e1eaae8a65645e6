"""Writes in place and to `out=`: what torch refuses is refused, and what it takes is the same."""

import copy
import os
import random
import warnings

import pytest
import torch

from fdtensor import Mesh, SimulatedComm, TraceError, call, distribute, spmd
from fdtensor.errors import FallbackWarning, NotTorchError
from fdtensor.runtime.operand_memory import apart
from tests.support.depth import times

SEED = int(os.environ.get("FDTENSOR_SEED", "0"))
MESH = Mesh(b=2)
COMM = SimulatedComm(MESH)

X = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
C = torch.tensor([1 + 2j, 3, 1j, 2], dtype=torch.complex128)

RANDOM = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
}
"""They draw from a key, which `tests/ops/test_keyed.py` looks at."""

OF_TENSORS = {
    *("apply_", "map_", "map2_", "requires_grad_", "detach_", "share_memory_", "rename_"),
    *("set_", "resize_", "resize_as_", "resize_as_sparse_", "sparse_resize_", "swap_"),
    *("sparse_resize_and_clear_", "as_strided_", "is_shared_", "retain_grad_"),
}
"""They change a tensor, not its values; or are of tensors that are not dense."""

NAMES = sorted(
    name
    for name in dir(torch.Tensor)
    if name.endswith("_") and not name.startswith("_") and name not in RANDOM | OF_TENSORS
)

TARGETS = {
    "whole": lambda x: x,
    "expanded": lambda x: x[:1].expand(3),
    "shifted": lambda x: x[1:],
    "strided": lambda x: x[::2],
}

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)

OPERANDS = {
    "nothing": lambda x, y: (),
    "a float": lambda x, y: (1.5,),
    "an int": lambda x, y: (2,),
    "a complex number": lambda x, y: (1j,),
    "float32": lambda x, y: (y.float()[: x.shape[0]],),
    "int64": lambda x, y: (y.long()[: x.shape[0]],),
    "complex": lambda x, y: ((y * 1j)[: x.shape[0]],),
    "two": lambda x, y: (y.to(x.dtype)[: x.shape[0]], y.to(x.dtype)[: x.shape[0]]),
    "two of others": lambda x, y: (y[: x.shape[0]], y.long()[: x.shape[0]]),
}


def outcome(f, *given):
    """The values, or None where it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = f(*given)
            return out if isinstance(out, torch.Tensor) else out.full()
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None


def same(a, b):
    return a.dtype == b.dtype and torch.allclose(a.cdouble(), b.cdouble(), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_in_place_writes_what_torch_does_or_is_refused(name):
    """What torch refuses must be refused; what it takes is the same, or refused in our words."""
    x = distribute(X, MESH.layout(), COMM)
    wrong, some = [], random.Random(f"{name} {SEED}")
    for dtype in DTYPES:
        for target, view in TARGETS.items():
            for said, operands in some.sample(sorted(OPERANDS.items()), times(1, 3)):

                def f(x, dtype=dtype, view=view, operands=operands):
                    written = x.to(dtype, copy=True)
                    part = view(written)
                    getattr(part, name)(*operands(part, x))
                    return written

                due, got = outcome(f, X.clone()), outcome(spmd(f), x)
                if got is not None and (due is None or not same(got, due)):
                    wrong.append((dtype, target, said, due, got))
    assert not wrong, wrong[:3]


def shifted(x, c):
    x = x.clone()
    x[1:].add_(x[:-1])
    return x


def assigned(x, c):
    x = x.clone()
    x[1:] = x[:-1]
    return x


def copied(x, c):
    x = x.clone()
    x[1:].copy_(x[:-1])
    return x


def flipped_in_memory(x, c):
    square = x.reshape(2, 2).clone()
    square.add_(square.t())
    return square


def augmented(x, c):
    x = x.clone()
    x += c
    return x


def compared(x, c):
    found = x > 2
    found += 1
    return found


def halved(x, c):
    whole = x.long()
    whole /= 2
    return whole


def in_a_gradient(x, c):
    return torch.func.grad(lambda x: shifted(x, c).sum())(x)


def under_vmap(x, c):
    return torch.func.vmap(lambda x: x.clone().add_(c[0]))(x)


def sum_of_kinds(x, c):
    return torch.add(x.long(), x, out=torch.empty(4, dtype=torch.int64))


def product_of_kinds(x, c):
    return torch.mm(x[:, None], x[None], out=torch.empty(4, 4))


REFUSED = [
    *(shifted, assigned, copied, flipped_in_memory, augmented, compared, halved, in_a_gradient),
    *(under_vmap, sum_of_kinds, product_of_kinds),
]


@pytest.mark.parametrize("f", REFUSED)
@pytest.mark.parametrize("way", ["spmd", "call"])
def test_what_torch_refuses_is_refused_in_its_words(f, way):
    x, c = (distribute(t, MESH.layout("b"), COMM) for t in (X, C))
    with pytest.raises(RuntimeError) as due:
        f(X.clone(), C)
    with pytest.raises(TraceError) as got:
        spmd(f)(x, c) if way == "spmd" else call(f, x, c)
    assert str(due.value).split("\n")[0][:60] in str(got.value)


def through_itself(x, c):
    x = x.clone()
    x[1:] += x[1:]
    x.mul_(x)
    x[:2] = x[2:]
    return x


def broadcast_beside(x, c):
    x = x.clone()
    wide = x[:1].expand(3)
    x.add_(1)
    x[1:].mul_(wide)
    return wide.clone().add_(x[0])


def promoted(x, c):
    y = x.float()
    y += x
    y.mul_(x[0])
    return y.lt_(3).add_(True)


def out_of_another_kind(x, c):
    values, places = torch.sort(x, out=(torch.empty(4).double(), torch.empty(4, dtype=torch.int64)))
    return torch.add(values, places, out=torch.empty(4, dtype=torch.complex64))


@pytest.mark.parametrize("f", [through_itself, broadcast_beside, promoted, out_of_another_kind])
def test_what_torch_takes_is_the_same(f):
    x, c = (distribute(t, MESH.layout("b"), COMM) for t in (X, C))
    due, got = f(X.clone(), C), spmd(f)(x, c)
    assert got.dtype == due.dtype
    assert torch.equal(got.full(), due)


def filled(x, c):
    x = x.clone()
    x[:1].expand(3).fill_(7)
    return x


def filled_in_part(x, c):
    x = x.clone()
    x[:1].expand(3)[0] = 7
    return x


def filled_by_a_view(x, c):
    x = x.clone()
    x[:1].expand(3)[None].unbind(0)[0][1].zero_()
    return x


def windows_that_overlap(x, c):
    x = x.clone()
    x.unfold(0, 2, 1).add_(1)
    return x


def one_of_windows_that_overlap(x, c):
    x = x.clone()
    x.as_strided((3, 2), (1, 1))[1].mul_(2)
    return x


SHARED = [filled, filled_in_part, filled_by_a_view]
SHARED += [windows_that_overlap, one_of_windows_that_overlap]


@pytest.mark.parametrize("f", SHARED)
def test_a_write_to_elements_of_one_place_is_refused(f):
    """Torch takes it; functionalization would add up what the elements of one place hold."""
    x, c = (distribute(t, MESH.layout("b"), COMM) for t in (X, C))
    f(X, C)
    with pytest.raises(TraceError, match="several elements share one place") as error:
        spmd(f)(x, c)
    own = f not in (filled_by_a_view, one_of_windows_that_overlap)
    assert ("to a tensor of which" in str(error.value)) == own


BASES = {
    "transposed": lambda x: x.T.clone(),
    "as it is": lambda x: x.clone(),
    "permuted": lambda x: x.reshape(2, 3, 2).permute(2, 0, 1).clone().flatten(1),
    "channels last": lambda x: x.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "product": lambda x: x.T * 2,
    "sum of two": lambda x: x.T + x.T.clone(),
    "of a stack": lambda x: torch.stack([x, x], 2).permute(2, 1, 0).clone()[0],
    "by strides": lambda x: torch.empty_strided((3, 4), (1, 3), dtype=x.dtype).copy_(x.T),
}


def part_times(y):
    y[0] *= 10


def part_from_part(y):
    y[0] = y[-1] * y[0]


def column(y):
    y.select(-1, 1).add_(y.select(-1, 0))


def diagonal(y):
    y.diagonal().mul_(3)


def of_the_transpose(y):
    y.mT[1].mul_(2)


def square_diagonal(y):
    y.flatten(0, -2).fill_diagonal_(9)


def by_strides(y):
    y.as_strided((2,), (1,), 1).mul_(10)


def whole(y):
    y.add_(1).mul_(y)


def twice(y):
    y[1].mul_(2)
    y[:, 1:].add_(1)


def by_indices(y):
    y[torch.tensor([0, 0]), torch.tensor([1, 0])] += 5


def by_mask(y):
    y[y > 3] = 0


def from_strides(y):
    y.mul_(torch.as_strided_copy(y, y.shape, (1,) * y.ndim))


def a_window(y):
    y.unfold(0, 1, 1)[0].mul_(2)


def windows(y):
    y.unfold(-1, 2, 2)[1].add_(1)


WRITES = [
    *(part_times, part_from_part, column, diagonal, of_the_transpose, square_diagonal, by_strides),
    *(whole, twice, by_indices, by_mask, from_strides, a_window, windows),
]


BY_PLACES = (square_diagonal, by_strides, from_strides, a_window, windows)
"""They go by strides; what cannot be told of a view of a larger tensor is refused."""


def weighted(y):
    return (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)).sum()


WAYS = {
    "value": lambda f: f,
    "grad": lambda f: torch.func.grad(lambda x: weighted(f(x))),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](f(x))[0],
    "grad of grad": lambda f: torch.func.grad(
        lambda x: weighted(torch.func.grad(lambda x: weighted(f(x * x)))(x))
    ),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x * x,))[1],
    "vmap of grad": lambda f: (
        lambda x: torch.func.vmap(torch.func.grad(lambda x: weighted(f(x))))(
            torch.stack([x, x + 1])
        )
    ),
    "autograd": lambda f: (
        lambda x: torch.autograd.grad(weighted(f(leaf := x.detach().requires_grad_())), leaf)[0]
    ),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", BASES)
def test_a_write_to_a_part_is_right_in_whatever_order_elements_lie(base, way):
    """Its derivative is written to a part of a tensor with the strides that the base has."""
    x = torch.arange(1.0, 13, dtype=torch.float64).reshape(4, 3)
    given = [distribute(x, layout, COMM) for layout in (MESH.layout(), MESH.layout("b"))]
    wrong = []
    for write in WRITES:

        def f(x, write=write):
            y = BASES[base](x)
            write(y)
            return y

        g = WAYS[way](f)
        due = outcome(g, x.clone())
        for each in given if due is not None else ():
            got = outcome(spmd(g), each)
            refused = got is None and write in BY_PLACES
            if not refused and (got is None or not same(got, due)):
                wrong.append((write.__name__, each.type, due, got))
    assert not wrong, wrong[:2]


def expanded_to_itself(x, c):
    x = x.clone()
    x[0], x[1] = float("nan"), 1e30
    x.expand(-1)[:] = 3.0
    return x


def expanded_by_a_dim(x, c):
    x = x.clone()
    x[0], x[1] = float("inf"), 1e30
    x.expand(1, 4)[0, :3].mul_(0).add_(1)
    x.broadcast_to(1, 1, 4)[..., 3:].fill_(2)
    return x


def broadcast_to_each_other(x, c):
    x = x.clone()
    x[1] = 1e30
    wide, other = torch.broadcast_tensors(x, x[:1].clone())
    wide.mul_(0).add_(other)
    return x


@pytest.mark.parametrize("f", [expanded_to_itself, expanded_by_a_dim, broadcast_to_each_other])
def test_a_write_to_what_expand_did_not_repeat_is_exact(f):
    x, c = (distribute(t, MESH.layout("b"), COMM) for t in (X, C))
    due = f(X, C)
    for got in (spmd(f)(x, c), spmd(lambda x, c: torch.func.vmap(f)(x[None], c[None])[0])(x, c)):
        assert torch.equal(got.full().nan_to_num(7), due.nan_to_num(7))


def test_a_tracer_inside_of_a_recorded_function_is_refused():
    """It would see none of the tensors: the tangents of linearize were whatever memory held."""

    def tangents(x):
        return torch.func.linearize(lambda x: x**3, x)[1](x)

    with pytest.raises(TraceError, match=r"torch\.func\.jvp gives the tangents of linearize"):
        spmd(tangents)(distribute(X, MESH.layout("b"), COMM))


def test_a_number_that_no_half_holds_is_refused():
    for fill in (lambda x: x.half().fill_(7e4), lambda x: x.bfloat16().fill_(1e39)):
        with pytest.raises((TraceError, RuntimeError), match="without overflow"):
            spmd(fill)(distribute(X, MESH.layout("b"), COMM))


def test_asking_torch_draws_no_random_numbers():
    x = distribute(X, MESH.layout("b"), COMM)
    torch.manual_seed(0)
    due = torch.rand(3)
    torch.manual_seed(0)
    spmd(lambda x: x.long().add_(2).clone().mul_(3))(x)
    assert torch.equal(torch.rand(3), due)


ORDERED = {
    "whole": lambda x: x,
    "turned": lambda x: x.t(),
    "turned copy": lambda x: x.t().clone(),
    "stepped": lambda x: x[:, ::2],
    "column": lambda x: x[:, 1],
    "rows": lambda x: x[1:3],
    "turned rows": lambda x: x.t()[:, 1:3],
    "permuted": lambda x: x[:4].view(2, 2, 3).permute(2, 0, 1),
}
"""Views, of which some are dense and not row-major."""


def backwards(v):
    """Numbers of its shape that lie in memory the other way round."""
    dims = range(v.ndim - 1, -1, -1)
    return torch.arange(v.numel()).to(v.dtype).view(v.shape[::-1]).permute(*dims)


IN_PLACE = {
    "cumsum_": lambda v: v.cumsum_(0),
    "triu_": lambda v: v.triu_(),
    "index_add_": lambda v: v.index_add_(0, torch.tensor([0]), v[:1] * 2),
    "scatter_": lambda v: v.scatter_(0, torch.zeros((1,) * v.ndim, dtype=torch.int64), 5.0),
    "masked_fill_": lambda v: v.masked_fill_(v > 3, 9),
    "add_": lambda v: v.add_(backwards(v)),
    "copy_": lambda v: v.copy_(backwards(v)),
    "fill_diagonal_": lambda v: v.fill_diagonal_(3),
    "rows by index": lambda v: v.__setitem__([0], 7),
    "rows by mask": lambda v: v.__setitem__(v > 3, 7),
    "row": lambda v: v.__setitem__(0, 7),
    "cumsum out": lambda v: torch.cumsum(v, 0, out=v),
    "add out": lambda v: torch.add(backwards(v), backwards(v), out=v),
    "sort out": lambda v: torch.sort(backwards(v), 0, out=(v, torch.empty(v.shape).long())),
}


@pytest.mark.few(40)
@pytest.mark.parametrize("write", IN_PLACE)
@pytest.mark.parametrize("view", ORDERED)
@pytest.mark.parametrize("copy", ["contiguous", "flatten"])
def test_a_write_leaves_a_tensor_in_its_order_of_memory(view, write, copy):
    """Whether `contiguous` and `flatten` copy depends on it, and what a later write changes."""

    def f(x):
        whole = x.clone()
        v = ORDERED[view](whole)
        IN_PLACE[write](v)
        seen.append(v.stride())
        getattr(v, copy)().add_(100)
        return whole, v

    seen: list[object] = []
    x = torch.arange(15, dtype=torch.float64).view(5, 3)
    try:
        wanted = f(x)
    except RuntimeError:
        pytest.skip("torch does not do this")
    given = spmd(f)(distribute(x, MESH.layout("b"), COMM))
    assert seen[1] == seen[0]
    assert [t.full().tolist() for t in given] == [t.tolist() for t in wanted]


@pytest.mark.parametrize("write", ["cumsum_", "triu_", "index_add_", "masked_fill_", "scatter_"])
@pytest.mark.parametrize("view", ["turned", "turned copy", "permuted"])
def test_gradients_through_a_write_to_a_tensor_that_is_not_row_major(view, write):
    def loss(x):
        whole = x * 2
        v = ORDERED[view](whole)
        IN_PLACE[write](v)
        return (whole * backwards(whole)).sum() + (v * v).sum()

    x = torch.arange(15, dtype=torch.float64).view(5, 3)
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    got = spmd(torch.func.grad(loss))(distribute(x, MESH.layout("b"), COMM))
    assert got.full().tolist() == leaf.grad.tolist()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float16, torch.int8])
def test_a_write_to_windows_of_any_dtype(dtype):
    def f(x):
        x = x.clone()
        x.unfold(0, 2, 2).add_(1)
        return x

    x = torch.arange(12).view(4, 3).to(dtype)
    assert torch.equal(spmd(f)(distribute(x, MESH.layout("b"), COMM)).full(), f(x))


def test_a_write_by_a_mask_of_one_number():
    def f(x):
        y = x * 1
        first, rest = y[0], y[1:]
        first[first > 0] = 3
        rest[rest.sum() > 5] = 7
        rest[rest.sum() > 100] = 9
        return y

    got = spmd(f)(distribute(X, MESH.layout("b"), COMM))
    assert got.full().tolist() == f(X).tolist() == [3, 7, 7, 7]


def test_a_deep_copy_shares_nothing():
    def f(x):
        copies = copy.deepcopy({"a": x, "b": [x]})
        copies["a"].add_(1)
        return x, copies

    whole, copies = spmd(f)(distribute(X, MESH.layout("b"), COMM))
    assert whole.full().tolist() == X.tolist()
    assert copies["a"].full().tolist() == copies["b"][0].full().tolist() == (X + 1).tolist()


WRITES = {
    "select": lambda y: y.select(1, 0).add_(5),
    "slice": lambda y: y[1:].mul_(3),
    "diagonal": lambda y: y.diagonal().zero_(),
    "index": lambda y: y[:, 1].fill_(7),
    "scatter": lambda y: y.scatter_(0, torch.zeros_like(y[:1]).long(), -1.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("dims", [(), ("b",)], ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_a_write_to_a_copy_of_windows_leaves_the_others(write, dims, step):
    """Windows that overlap share elements, as a program that leaves out the copy must not."""

    def written(x):
        y = x.unfold(0, 3, step).clone()
        write(y)
        return y

    x = torch.arange(8, dtype=torch.float64)
    held = distribute(x, MESH.layout(*dims), COMM)
    for run in (spmd(written), lambda x: call(written, x)):
        assert torch.equal(run(held).full(), written(x))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (1, 5), (2, 1, 3), (0, 3), ()], ids=str)
def test_only_elements_that_share_a_place_are_copied_apart(shape):
    x = torch.randn(shape)
    for view in (x, x.movedim(0, -1), x[..., ::2]) if shape else (x,):
        assert apart(view) is view
    for shared in (torch.arange(6.0).unfold(0, 3, 1), torch.ones(3, 1).expand(3, 4)):
        copied = apart(shared)
        assert torch.equal(copied, shared)
        assert copied.is_contiguous()
        assert not shared.is_contiguous()


# --- writes to arguments ---------------------------------------------------------------------

STATISTICS = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)


def scaled_in_place(x):
    x.mul_(2)


def counted(x, seen):
    seen["count"].add_(1)
    return x * 2


def normalized(x, mean, var):
    return torch.nn.functional.batch_norm(x, mean, var, training=True)


@pytest.mark.parametrize(
    ("f", "args", "written"),
    [
        (scaled_in_place, (X,), "argument 0"),
        (counted, (X, {"count": torch.tensor(0)}), "argument 1['count']"),
        (normalized, (X.expand(3, 4), *STATISTICS), "argument 1, argument 2"),
        (lambda x: x[:2].zero_(), (X,), None),
        (lambda x: x[:2].zero_().sum() * 0 + 1, (X,), None),
        (lambda x, y: (x.copy_(y), y)[1], (X, X), "argument 0"),
        (lambda x: torch.zeros_like(x.zero_()), (X,), "argument 0"),
        (lambda x: x.add_(1).new_ones(3), (X,), "argument 0"),
    ],
)
@pytest.mark.parametrize("way", [call, lambda f, *args: spmd(f)(*args)])
def test_a_write_to_an_argument_that_nothing_reads_is_told(f, args, written, way):
    given = distribute(args, MESH.layout(), COMM)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        way(f, *given)
    texts = [str(one.message) for one in said if one.category is FallbackWarning]
    if written is None:
        assert not texts
    else:
        sentence = f"writes to {written}, and what it writes is lost: arguments never change"
        assert sentence in texts[0]
        assert "test_writes.py" in texts[0]


def test_statistics_are_returned_or_given_as_clones():
    given = distribute((X.expand(3, 4), *STATISTICS), MESH.layout(), COMM)

    def returned(x, mean, var):
        return normalized(x, mean, var), mean, var

    def cloned(x, mean, var):
        return normalized(x, mean.clone(), var.clone())

    y, mean, _ = call(returned, *given)
    assert torch.equal(mean.full(), X * 0.1)
    assert torch.equal(call(cloned, *given).full(), y.full())


def test_an_op_of_torch_that_writes_to_its_arguments_is_refused():
    x, mean, var = distribute((X.expand(3, 4), *STATISTICS), MESH.layout(), COMM)
    with pytest.raises(TraceError, match="batch_norm writes to argument 1, argument 2"):
        torch.nn.functional.batch_norm(x, mean, var, training=True)
    with pytest.raises(NotTorchError, match=r"add_\.Tensor writes to a tensor"):
        torch.ops.aten.add_.Tensor(x, 1)
    rows = distribute(torch.tensor([0, 1]), MESH.layout(), COMM)
    with pytest.raises(NotTorchError, match="embedding writes to a tensor"):
        torch.nn.functional.embedding(rows, x, max_norm=1.0)
    assert torch.equal(torch.nn.functional.embedding(rows, x).full(), X.expand(2, 4))


# --- lists, and out= of another dtype ----------------------------------------------------------


def twice(w):
    torch._foreach_add_([w, w], 1)


def a_part_and_all(w):
    torch._foreach_mul_([w[:2], w], [2.0, 3.0])


def a_view_and_all(w):
    torch._foreach_lerp_([w, w.view(2, 2)], [w * 2, w.view(2, 2) * 3], 0.5)


def read_after_written(w):
    torch._foreach_add_([w, other := w * 2], [other, w])


def unscaled(w):
    scale = torch.full((1,), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_([w, w], torch.zeros(1), scale)


@pytest.mark.parametrize(
    "write", [twice, a_part_and_all, a_view_and_all, read_after_written, unscaled]
)
def test_a_list_of_tensors_that_share_memory_is_written_entry_by_entry(write):
    def f(x):
        w = x.float()
        write(w)
        return w

    assert torch.equal(spmd(f)(distribute(X, MESH.layout("b"), COMM)).full(), f(X))


def test_a_list_of_which_one_shares_a_part_of_an_operand_is_refused():
    def f(x):
        w = x * 1
        torch._foreach_add_([w[1:]], [w[:-1]])
        return w

    with pytest.raises(TraceError, match="shares a part of an operand's memory"):
        spmd(f)(distribute(X, MESH.layout("b"), COMM))


@pytest.mark.parametrize(
    ("f", "dtype", "sentence"),
    [
        (
            lambda x, out: torch.sum(x, 0, out=out),
            torch.int64,
            "gives f64, and out= takes i64",
        ),
        (lambda x, out: torch.prod(x, 0, out=out), torch.float32, "gives f64, and out= takes f32"),
        (lambda x, out: torch.argmax(x, 0, out=out), torch.float64, "have dtype long int"),
        (lambda x, out: torch.where(x > 0, x, x, out=out), torch.float32, "out type"),
        (lambda x, out: torch.add(x, 1, out=out), torch.float32, None),
        (lambda x, out: torch.sum(x, 0, out=out), torch.float64, None),
    ],
)
def test_out_of_another_dtype_is_refused_where_it_would_matter(f, dtype, sentence):
    def written(x):
        return f(x, torch.empty(0, dtype=dtype))

    x = distribute(X, MESH.layout("b"), COMM)
    if sentence is None:
        assert torch.equal(spmd(written)(x).full(), written(X))
        return
    with pytest.raises(TraceError, match=sentence):
        spmd(written)(x)


def test_functionalize_is_told_to_be_left_out():
    def f(x):
        return torch.func.functionalize(lambda a: a.clone().add_(1))(x)

    with pytest.raises(TraceError, match="functionalize inside of a traced function"):
        spmd(f)(distribute(X, MESH.layout("b"), COMM))


def windows_of(view):
    def written(x, y):
        out = x * 2
        view(out).copy_(view(y))
        return out

    return written


def windows_again(x, _):
    out = x * 2
    out[1:].unfold(0, 1, 2).mul_(3)
    out[1:].unfold(0, 1, 2).add_(x[:3:2, None])
    return out


def windows_between(x, y):
    out = x * 2
    windows = out.unfold(0, 1, 2)
    windows.mul_(3)
    out.add_(y)
    windows.mul_(2)
    return out


PAIR = torch.arange(8, dtype=torch.float64).view(2, 4)


@pytest.mark.parametrize(
    "written", [windows_again, windows_between, windows_of(lambda t: t.unfold(0, 2, 2))]
)
def test_a_write_to_windows_changes_their_tensor(written):
    held = [distribute(t, MESH.layout(), COMM) for t in PAIR]
    assert torch.equal(spmd(written)(*held).full(), written(*PAIR))


def test_windows_with_gaps_of_two_tensors_are_told():
    """Functionalization tells the sizes of the tensor that is written to, which both have."""
    held = [distribute(t, MESH.layout(), COMM) for t in PAIR]
    with pytest.raises(TraceError, match="cannot be told which tensor"):
        spmd(windows_of(lambda t: t.unfold(0, 1, 2)))(*held)
