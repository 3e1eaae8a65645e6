"""Tests of ops/line_checks.py: a line whose blocks are not what the program says is named."""

import os
import subprocess
import sys

import pytest
import torch

from fdtensor import (
    CommError,
    SimulatedComm,
    TensorType,
    TraceError,
    call,
    connect,
    debug,
    distribute,
    from_local,
    rule,
    spmd,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.ops.line_checks import debugging
from fdtensor.ops.rules import S
from fdtensor.testing.pool import GlooPool

MESH = Mesh(x=4)
COMM = SimulatedComm(MESH)


def register():
    """An op whose rule says that it keeps rows apart, though it repeats the first of each block."""
    if hasattr(torch.ops.test_debug, "repeat_first"):
        return torch.ops.test_debug.repeat_first.default

    @torch.library.custom_op("test_debug::repeat_first", mutates_args=())
    def repeat_first(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[:1]])

    repeat_first.register_fake(lambda x: x.new_empty(x.shape[0] + 1, *x.shape[1:]))
    rule(repeat_first)(wrong_rows)
    return torch.ops.test_debug.repeat_first.default


def wrong_rows(x):
    yield (S(0),), S(0)


def run_wrongly(comm):
    """The error that the wrong rule meets while each line is compared."""
    x = distribute(torch.arange(18.0).reshape(9, 2), MESH.layout("x"), comm)
    with debug():
        assert call(torch.relu, x).full().shape == (9, 2)
        try:
            spmd(register())(x)
        except TraceError as error:
            return str(error)
    return None


def test_a_line_that_does_not_fit_its_type_is_named():
    assert run_wrongly(SimulatedComm(MESH)) == WRONG


WRONG = """\
rank 0 has f32[4, 2] for a value of repeat_first.default that is f32[3, 2].

  line: test_debug.repeat_first.default
  type: f32[10@x,2]

The rule of the op or its kernel is wrong: verify(op, samples) runs its rows."""


def test_terms_of_another_kind_lie_side_by_side_whatever_they_come_of():
    """A sum that becomes an average, of blocks that lie in the order of columns."""
    average, total = (MESH.layout(partial={"x": kind}) for kind in ("avg", "sum"))
    blocks = [torch.full((2, 3), float(rank)).t() for rank in range(4)]
    x = from_local(blocks, TensorType((3, 2), torch.float32, average), COMM)
    with debug():
        assert spmd(torch.t, out_layouts=total)(x).full().equal(torch.full((2, 3), 1.5))


def test_it_is_on_within_and_off_after():
    before = debugging()
    with debug():
        assert debugging()
        with debug(False):
            assert not debugging()
    assert debugging() == before


def test_the_environment_puts_it_on():
    code = "import fdtensor.ops.line_checks as d; print(d.debugging())"
    env = {**os.environ, "FDTENSOR_DEBUG": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout.strip() == "True"


def test_a_program_that_was_made_before_is_compared_too():
    op = register()
    x = distribute(torch.arange(18.0).reshape(9, 2), MESH.layout("x"), SimulatedComm(MESH))
    f = spmd(op)
    with debug(False):
        f(x)
    with debug(), pytest.raises(TraceError):
        f(x)


def on_a_rank():
    try:
        return run_wrongly(connect(MESH))
    except CommError as error:  # that of a rank which was quicker
        return str(error)


@pytest.mark.mesh
def test_real_ranks_compare_their_lines(pool4: GlooPool):
    texts = pool4.run(on_a_rank)
    assert all("for a value of repeat_first.default that is" in text for text in texts)


BIG = torch.arange(100.0)
MEMORY = {
    "as_strided": lambda x: torch.as_strided(x, (2, 2), (6, 1), 5),
    "as_strided from where it is": lambda x: torch.as_strided(x, (2, 2), (6, 1)),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, x[:2, :2], (2, 2), (6, 1), 5),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(4, 3, 2))),
    "view of a dtype": lambda x: x.view(torch.float64),
}


@pytest.mark.parametrize("f", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("offset", [0, 3, 4])
def test_ops_about_memory_do_not_see_where_a_block_lies_in_a_larger_one(f, offset):
    mesh = Mesh(a=2)
    block = BIG[offset : offset + 24].reshape(4, 6)
    type = TensorType((4, 6), torch.float32, mesh.layout())
    x = from_local((block, block), type, SimulatedComm(mesh))
    assert torch.equal(spmd(f)(x).full(), f(block.clone()))


def test_a_single_number_may_lie_at_any_stride():
    """It counts as contiguous, and yet torch views no number of such a stride as bytes."""
    mesh = Mesh(a=2)
    block = torch.arange(4)[::2][:1]
    x = from_local(
        (block, block), TensorType((1,), torch.int64, mesh.layout()), SimulatedComm(mesh)
    )
    assert spmd(lambda x: x.view(torch.uint8))(x).full().tolist() == [0] * 8
