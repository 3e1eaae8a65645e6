"""Lines in place: with the bits of the lines as they were, and of nobody else's memory."""

import pytest
import torch

from fdtensor import Mesh, TensorType, trace
from fdtensor.layouts.torch_private import below_autograd, schema_of
from fdtensor.runtime import runner
from fdtensor.runtime.local_program import local_program
from fdtensor.runtime.reuse import IN_PLACE, reusing
from fdtensor.runtime.source import written
from tests.hunt.findings import known_as, signature
from tests.hunt.generate import Extent, generated
from tests.hunt.ways import GOOD, outcome
from tests.support.depth import times

ONE = Mesh(x=1)


def lines_of(f, *tensors):
    """The program of one rank, and its lines as they are and in place."""
    types = [TensorType(tuple(t.shape), t.dtype, ONE.layout()) for t in tensors]
    local = local_program(trace(f, *types), 0, None)
    return local, reusing(local)


def ran(local, reuses, tensors):
    source, names = written(local, None, (), reuses=reuses)
    exec(source, names)
    with below_autograd():
        return names["program"](*tensors)


def bits(t):
    return t.contiguous().view(-1).view(torch.uint8)


def in_place(f, *tensors):
    """The ops that write to an operand; they have given what they give elsewhere."""
    local, lines = lines_of(f, *tensors)
    kept = [t.clone() for t in tensors]
    assert all(
        torch.equal(a, b)
        for a, b in zip(ran(local, True, tensors), ran(local, False, kept), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))
    return [str(b.op) for a, b in zip(local.lines, lines, strict=True) if a is not b]


X, Y = torch.linspace(1, 2, 12).view(3, 4), torch.linspace(-1, 3, 12).view(3, 4)


def test_a_chain_is_computed_in_the_memory_of_its_first_result():
    assert in_place(lambda x, y: ((x * y + x) / 3).exp(), X, Y) == [
        "aten.add_.Tensor",
        "aten.div_.Tensor",
        "aten.exp_.default",
    ]


def test_what_is_larger_or_of_another_dtype_has_memory_of_its_own():
    assert in_place(lambda x, y: (x[:1] * 2) + y, X, Y) == []
    assert in_place(lambda x, y: (x > y) * x, X, Y) == []
    assert in_place(lambda x, y: (x * 2) * y.double(), X, Y) == []


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: (x.exp(), x * y),  # arguments are the caller's
        lambda x, y: (x.t() + 1, y.view(-1) * 2),  # and so are views of them
        lambda x, y: ((z := x * y), z + 1),  # a result
        lambda x, y: ((z := x * y).t(), z + 1),  # a view of one
        lambda x, y: (z := x * y) * z,  # both operands
        lambda x, y: (z := x * y) / z[:, :1],  # and a view of it, which the first column would be
        lambda x, y: (z := x * y) - z[0],
        lambda x, y: (z := x @ y.t()) + z.t(),
        lambda x, y: torch.addcmul(z := x * y, y, z[:, 1:2]),
        lambda x, y: (z := x * y) + z.flip(0) * 0 + z.view(4, 3).view(3, 4),  # read once more
        lambda x, y: (x * y).expand(2, 3, 4) + 1,  # elements of one place
    ],
)
def test_memory_that_somebody_else_may_read_is_left(f):
    assert in_place(f, X, Y) in ([], ["aten.add_.Tensor"])


def test_memory_is_taken_once_nobody_reads_a_view_of_it():
    def f(x, y):
        z = x * y
        w = z + 1  # not in the memory of z, of which the next line reads a view
        return z.t().sum(0), w + 2

    assert in_place(f, X, Y) == ["aten.add_.Tensor"]


def test_every_op_in_place_is_the_op():
    for op, inside in IN_PLACE.items():
        assert schema_of(inside).is_mutable
        assert not schema_of(op).is_mutable
        kinds = [[str(a.type) for a in schema_of(o).arguments] for o in (op, inside)]
        assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_random_programs_in_place_give_what_torch_gives(monkeypatch):
    simulated, changed = runner.run_lines, 0

    def run(program, values, comm):
        nonlocal changed
        if program.mesh.size > 1 or any(eqn.steps for eqn in program.eqns):
            return simulated(program, values, comm)
        local = local_program(program, program.mesh.order[0], None)
        changed += sum(a is not b for a, b in zip(local.lines, reusing(local), strict=True))
        tensors = [*(v for (v,) in values), *(t for _, t in program.constants)]
        kept = [t.detach().clone() for t in tensors]
        outs = ran(local, True, tensors)
        for a, b in zip(tensors, kept, strict=True):
            assert torch.equal(bits(a.detach()), bits(b))
        return [(out,) for out in outs]

    monkeypatch.setattr(runner, "run_lines", run)
    for number in range(times(60, 2000)):
        found = outcome(generated(7, number, Extent(least=6, most=20, ranks=1)))
        assert found.kind in GOOD or known_as(signature(found)), found
    assert changed
