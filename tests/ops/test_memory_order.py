"""What ops give lies in memory as in torch, where operands are not row-major."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fdtensor import Mesh, SimulatedComm, distribute, spmd
from fdtensor.ops.memory_order import IN_OTHER_ORDER
from tests.operators.samples import entries
from tests.support.depth import spread, times

aten = torch.ops.aten

KNOWN = IN_OTHER_ORDER | {
    aten._batch_norm_with_update.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
    aten.normal.Tensor_Tensor,  # drawn by key
}


class Compared(TorchDispatchMode):
    """Runs every call on fakes too, and keeps the ops of which the results lie otherwise."""

    def __init__(self):
        super().__init__()
        self.otherwise: set[object] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        given = pytree.tree_map_only(torch.Tensor, fakes.from_tensor, (args, kwargs))
        out = func(*args, **kwargs)
        try:
            with fakes:
                fake = func(*given[0], **given[1])
        except Exception:
            return out
        for a, b in zip(pytree.tree_leaves(out), pytree.tree_leaves(fake), strict=True):
            dense = isinstance(a, torch.Tensor) and a.layout is b.layout is torch.strided
            if dense and a.shape == b.shape and a.numel() > 1 and order(a) != order(b):
                self.otherwise.add(func)
        return out


def order(t):
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def turned(t):
    """The tensor with its dims the other way round in memory."""
    if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.ndim < 2:
        return t
    return t.detach().transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.slow
def test_the_table_has_the_ops_whose_fakes_lie_otherwise():
    compared = Compared()
    every = entries(torch.float64)
    for name, op in spread(list(every.items()), times(75, len(every))):
        if "jiterator" in name:  # for GPUs alone
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in list(op.sample_inputs("cpu", torch.float64))[:3]:
                given = pytree.tree_map(turned, (sample.input, sample.args, sample.kwargs))
                try:
                    with compared:
                        op.op(given[0], *given[1], **given[2])
                except (RuntimeError, NotImplementedError, ValueError, TypeError):
                    continue  # torch does not take this operand so
    assert {str(op) for op in compared.otherwise - KNOWN} == set()


ROWS = torch.tensor([[0, 1], [2, 0], [1, 1]])


@pytest.mark.parametrize(
    "op",
    [
        lambda x: torch.complex(x, x).angle(),
        lambda x: x.any(dim=(), keepdim=True).double(),
        lambda x: torch.all(x, dim=()).double(),
        lambda x: x[ROWS.t()],
        F.logsigmoid,
        lambda x: torch.copysign(x, torch.tensor(1.0)),
        lambda x: x // torch.tensor(2.0),
        lambda x: torch.logaddexp(x[:, None, :], x),
        lambda x: torch.softmax(x, 1),
    ],
)
def test_a_write_to_a_copy_or_to_an_alias_is_the_same_as_in_torch(op):
    def f(x):
        out = op(x.t().contiguous().t())
        out.contiguous().add_(100)
        return out

    x = torch.randn(5, 3, dtype=torch.float64)
    mesh = Mesh(a=2)
    got = spmd(f)(distribute(x, mesh.layout("a"), SimulatedComm(mesh))).full()
    torch.testing.assert_close(got, f(x))


@pytest.mark.parametrize(
    "op",
    [lambda x: x.roll(1, 2), lambda x: F.channel_shuffle(x, 3), lambda x: x.relu()],
)
def test_the_same_for_channels_last(op):
    def f(x):
        out = op(x.contiguous(memory_format=torch.channels_last))
        out.contiguous().add_(100)
        return out

    x = torch.randn(2, 6, 2, 3, dtype=torch.float64)
    mesh = Mesh(a=2)
    got = spmd(f)(distribute(x, mesh.layout("a"), SimulatedComm(mesh))).full()
    torch.testing.assert_close(got, f(x))
