"""Functions of torch whose shapes are static though theirs read values: recorded in other ops."""

import pytest
import torch
from torch.ao.quantization import FakeQuantize

import fdtensor as fd
from fdtensor.testing import assert_same_on_every_layout
from tests.support.depth import times

COMM = fd.connect(fd.Mesh(dp=2, tp=2))
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=GENERATOR)


def laid(tensor, *dims):
    return fd.distribute(tensor, COMM.mesh.layout(*dims), COMM)


SHAPES = [((6, 3), (6, 2)), ((3, 6), (3,)), ((2, 5, 3), (2, 5, 2)), ((2, 5, 3), (2, 5))]


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("driver", [None, "gels", "gelsy"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_least_squares_are_those_of_torch(shapes, driver, dtype):
    a, b = (drawn(*shape, dtype=dtype) for shape in shapes)

    def solved(a, b):
        return torch.linalg.lstsq(a, b, driver=driver)

    for found in (fd.spmd(solved)(laid(a, "dp"), laid(b)), fd.call(solved, laid(a), laid(b, "dp"))):
        for own, wanted in zip(found, solved(a, b), strict=True):
            assert own.dtype == wanted.dtype
            torch.testing.assert_close(own.full(), wanted)


def test_least_squares_of_a_matrix_without_full_rank_are_the_smallest():
    a, b = drawn(6, 2) @ drawn(2, 3), drawn(6, 2)
    found, wanted = fd.spmd(torch.linalg.lstsq)(laid(a, "dp"), laid(b)), torch.linalg.lstsq(a, b)
    assert found.rank.item() == 2
    torch.testing.assert_close(found.solution.full(), wanted.solution)


def test_least_squares_on_every_layout():
    def solved(a, b):
        return torch.linalg.lstsq(a, b).solution

    assert_same_on_every_layout(
        solved, drawn(5, 2), drawn(5, 3), grad=True, max_examples=times(5, 50)
    )


def test_least_squares_whose_shapes_depend_on_values_are_refused():
    a, b = laid(drawn(6, 3), "dp"), laid(drawn(6, 2))
    for options in ({"driver": "gelsd"}, {"rcond": 0.5}):
        with pytest.raises(fd.DataDependentError, match="linalg_lstsq"):
            fd.spmd(lambda a, b, options=options: torch.linalg.lstsq(a, b, **options))(a, b)
    with pytest.raises(fd.FdtensorError):
        fd.spmd(torch.linalg.lstsq)(b, laid(drawn(2, 6, 2)))


@pytest.mark.one_of("with_replacement")
@pytest.mark.parametrize("with_replacement", [False, True])
@pytest.mark.parametrize("r", [0, 1, 2, 3, 6])
def test_combinations_are_those_of_torch(r, with_replacement):
    x = drawn(5)

    def taken(x):
        return torch.combinations(x, r, with_replacement)

    assert torch.equal(fd.spmd(taken)(laid(x, "dp")).full(), taken(x))
    assert torch.equal(fd.call(taken, laid(x, "tp")).full(), taken(x))
    if r > 1:
        assert_same_on_every_layout(taken, x, grad=True, max_examples=times(3, 20))


def test_where_torch_asks_for_a_value_its_line_is_told():
    module = FakeQuantize()
    with pytest.raises(fd.DataDependentError) as raised:
        fd.spmd(module)(laid(drawn(4, dtype=torch.float32), "dp"))
    assert raised.value.facts["inside"].startswith("torch/ao/quantization/fake_quantize.py:")
    assert "if self.observer_enabled[0] == 1" in raised.value.facts["inside"]
    with pytest.raises(fd.DataDependentError) as raised:
        fd.spmd(lambda x: x if x.sum() > 0 else -x)(laid(drawn(4)))
    assert "inside" not in raised.value.facts
