"""What the calls of one line hold besides its operands and results stands in the peak."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, SimulatedComm, TensorType, TraceError, run, trace
from fdtensor.func import scan
from tests.support.memory import Memory

MESH = Mesh(x=1)
SHAPES = {"square": (32, 32), "images": (2, 4, 16, 16)}
ONE_READ = {
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(5)[0],
    "median": lambda x: x.median(1).values,
    "qr": lambda x: torch.linalg.qr(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x + x.T)[0],
    "lu": lambda x: torch.linalg.lu(x)[1],
    "solve": lambda x: torch.linalg.solve(x, x[0]),
    "quantile": lambda x: x.quantile(0.5, dim=1),
    "split": lambda x: x.split(8)[0] + 1,
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "both": lambda x: x.sort(1),
    "product": lambda x: (x @ x).tanh() @ x,
}


def held(f, types, comm) -> tuple[int, int]:
    """The bytes that a program announces, and those that it really holds."""
    program = trace(f, *types)
    given = [torch.randn(type.shape) for type in types]
    values = [(x,) for x in given]
    run(program, values, comm)
    with Memory(given, program.peak_bytes) as memory:
        run(program, values, comm)
    return program.peak_bytes, memory.most


@pytest.mark.parametrize("name", ONE_READ)
def test_results_that_nothing_reads_are_held(name):
    shape = SHAPES["images" if "pool" in name else "square"]
    type = TensorType(shape, torch.float32, MESH.layout())
    announced, most = held(ONE_READ[name], [type], SimulatedComm(MESH))
    assert announced == most


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_what_a_loop_carries_is_freed_where_it_ends(steps):
    def gradient(h, stack):
        step = lambda a, b: (torch.tanh(a * b), None)  # noqa: E731
        return torch.func.grad(lambda h: scan(step, h, stack)[0].sum())(h)

    shapes = (32, 32), (steps, 32, 32)
    types = [TensorType(shape, torch.float32, MESH.layout()) for shape in shapes]
    announced, most = held(gradient, types, SimulatedComm(MESH))
    assert announced - 16 <= most <= announced


def test_a_budget_counts_them():
    x = TensorType((32, 32), torch.float32, MESH.layout())
    with pytest.raises(TraceError, match="does not fit in 16000 bytes"):
        trace(lambda x: x.sort(1).values, x, max_bytes=16000)


def test_what_a_rule_computes_on_its_way_is_held():
    """The windows of a pooling, three times its block, and their products with what they count."""
    mesh = Mesh(x=3)
    x = TensorType((24, 24), torch.float32, mesh.layout(None, "x"))
    block, windows = 24 * 8 * 4, 3 * 24 * 8 * 4
    peak = trace(lambda x: F.avg_pool1d(x, 3, 1, 1), x).peak_bytes
    assert peak == block + 2 * windows
