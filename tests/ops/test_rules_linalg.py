"""Rows of linear algebra and Fourier transforms hold on blocks and move no more than they must."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

from fdtensor import (
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    SimulatedComm,
    TensorType,
    distribute,
    like,
    spmd,
    trace,
)
from fdtensor.ops.decompositions.plain import corrcoef, cov
from fdtensor.ops.graph import Full
from fdtensor.ops.householder import SIGNS
from fdtensor.ops.notation.core import P, R, S
from fdtensor.ops.rows import rows_of
from fdtensor.testing.row_checks import call_of, verify
from tests.support.decompositions import differences
from tests.support.nested import ints, nested

aten = torch.ops.aten
MESH = Mesh(x=4)


@pytest.fixture(autouse=True)
def one_thread():
    """On tiny tensors threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def whole(*shape: int) -> torch.Tensor:
    return ints(*shape, dtype=torch.float64)


def regular(*shape: int) -> torch.Tensor:
    """Stacks of matrices far from singular ones, so that solutions are exact to many digits."""
    return whole(*shape) + 12 * torch.eye(*shape[-2:], dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    a = whole(*shape)
    return a @ a.mT + torch.eye(shape[-1], dtype=torch.float64)


def lower(*shape: int) -> torch.Tensor:
    return regular(*shape).tril()


def waves(*shape: int) -> torch.Tensor:
    return torch.complex(whole(*shape), whole(*shape).flip(0))


def factored(stack: tuple[int, ...]):
    """Samples of ops that factor each matrix of a stack, as `op, args, kwargs`."""
    square, tall = (*stack, 3, 3), (*stack, 3, 2)
    yield aten.cholesky.default, (positive(*square),), {}
    yield aten.cholesky_inverse.default, (lower(*square),), {}
    yield aten.linalg_cholesky_ex.default, (positive(*square),), {}
    yield aten.linalg_matrix_exp.default, (whole(*square) / 8,), {}
    yield aten.linalg_inv_ex.default, (regular(*square),), {}
    yield aten.linalg_eig.default, (regular(*square),), {}
    yield aten._linalg_eigvals.default, (regular(*square),), {}
    yield aten._linalg_det.default, (regular(*square),), {}
    yield aten._linalg_slogdet.default, (regular(*square),), {}
    yield aten.geqrf.default, (regular(*tall),), {}
    yield aten.linalg_householder_product.default, (*torch.geqrf(regular(*tall)),), {}
    yield aten.linalg_ldl_factor_ex.default, (positive(*square),), {}
    yield aten.linalg_lu_factor_ex.default, (regular(*tall),), {}
    for vectors in (True, False):
        yield aten._linalg_eigh.default, (positive(*square), "L", vectors), {}
        yield aten._linalg_svd.default, (regular(*tall), True, vectors), {}
        for data in (True, False):
            packed = aten.linalg_lu_factor_ex(regular(*square))[:2]
            yield aten.lu_unpack.default, (*packed, data, vectors), {}
    for mode in ("reduced", "complete", "r"):
        yield aten.linalg_qr.default, (regular(*tall), mode), {}
    yield aten.linalg_lu.default, (regular(*tall),), {}
    bounds = {"atol": torch.zeros((), dtype=torch.float64), "rtol": whole(*stack).abs() / 64}
    for given in ({}, bounds, {"rtol": bounds["rtol"]}):
        yield aten.linalg_pinv.atol_rtol_tensor, (regular(*tall),), given


def solved(stack: tuple[int, ...], k: int):
    """Samples of ops with right-hand sides, some for all matrices of a stack."""
    square, tall = (*stack, 3, 3), (*stack, 3, 2)
    columns, rows = whole(*stack, 3, k), whole(*stack, k, 3)
    packed = aten.linalg_lu_factor_ex(regular(*square))[:2]
    yield aten.linalg_lu_solve.default, (*packed, columns), {}
    yield aten.linalg_lu_solve.default, (*packed, rows), {"left": False}
    yield aten.ormqr.default, (*torch.geqrf(regular(*tall)), columns), {}
    yield aten.ormqr.default, (*torch.geqrf(regular(*tall)), rows, False, True), {}
    packed = aten.linalg_ldl_factor_ex(positive(*square))[:2]
    yield aten.linalg_ldl_solve.default, (*packed, columns), {}
    yield aten.linalg_solve_triangular.default, (lower(*square), rows), {"upper": 0, "left": 0}
    yield aten._linalg_solve_ex.default, (regular(*square), rows), {"left": False}
    yield aten._linalg_solve_ex.default, (regular(*square), whole(*stack, 3)), {}
    for a, b in (
        (square, (*stack, 3, k)),
        ((3, 3), (*stack, 3, k)),
        (square, (3, k)),
        ((1, 3, 3), (*stack, 3, k)),
    ):
        yield aten.linalg_solve_triangular.default, (lower(*a), whole(*b)), {"upper": False}
        yield aten.triangular_solve.default, (whole(*b), lower(*a), False), {}
        yield aten._linalg_solve_ex.default, (regular(*a), whole(*b)), {}
        yield aten.cholesky_solve.default, (whole(*b), lower(*a)), {}


def distances():
    """Samples of distances and their gradients, and of cross products."""
    for p in (0.0, 1.0, 2.0, 3.0, inf):
        a, b, points = whole(2, 5, 3), whole(2, 4, 3), whole(5, 3)
        far = aten._cdist_forward(a, b, p, 2)
        yield aten._cdist_forward.default, (a, b, p, 2), {}
        yield aten._cdist_forward.default, (points, b, p, 2), {}
        yield aten._cdist_backward.default, (whole(*far.shape), a, b, p, far), {}
        yield aten._cdist_backward.default, (whole(*far.shape), a[0], b, p, far), {}
        apart = aten._pdist_forward(points, p)
        yield aten._pdist_backward.default, (whole(10), points, p, apart), {}
    yield aten.linalg_cross.default, (whole(5, 3), whole(1, 3)), {}
    yield aten.linalg_cross.default, (whole(3, 5), whole(3, 5)), {"dim": 0}


def transformed():
    """Samples of transforms of one dim and of two, in any order."""
    for dims, last in (([0], 5), ([1], 6), ([0, 2], 4), ([2, 1], 6)):
        for way in (True, False):
            yield aten._fft_c2c.default, (waves(5, 4, 3), dims, 1, way), {}
            yield aten._fft_r2c.default, (whole(5, 4, 3), dims, 2, way), {}
        yield aten._fft_c2r.default, (waves(5, 4, 3), dims, 1, last), {}


def wrong(samples) -> list[str]:
    """The rows that do not hold on blocks, some of them short or empty."""
    return [
        str(found)[:400]
        for op, args, kwargs in samples
        for count in (2, 3, 4)
        for found in verify(op, [(args, kwargs)], count=count)
    ]


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
def test_each_matrix_of_a_stack_is_factored_where_it_is():
    """Ranks with no matrix at all included, and outputs that hold nothing."""
    assert wrong(factored((5,))) == []
    assert wrong(factored((2,))) == []


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("k", [5, 1])
def test_right_hand_sides_are_free(k):
    """Columns may be cut, pending sums pass, and factors stay whole."""
    assert wrong(solved((2,), k)) == []
    assert wrong(solved((5,), k)) == []


def test_the_rows_of_distances_are_right():
    """A gradient is a sum over the other points, and separate in each coordinate."""
    assert wrong(distances()) == []


def test_the_rows_of_transforms_are_right():
    """Kernels that refuse empty blocks are not asked."""
    assert wrong(transformed()) == []


@pytest.mark.filterwarnings("ignore:torch.(cholesky|triangular_solve) is deprecated")
def test_rows_of_two_axes_hold_together():
    """Stacks over one axis, right-hand sides over another."""
    for samples in (factored((4,)), solved((2,), 4), distances(), transformed()):
        for op, args, kwargs in samples:
            assert list(nested(op, (args, kwargs))) == []


def rows(op, *args, **kwargs):
    call, tensors, made = call_of(op, args, kwargs)
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *made)]
    return [(row.ins, row.outs) for row in rows_of(call, types, 2)]


def test_factors_are_not_pending():
    """A pending right-hand side leaves the factors of the matrix as they are."""
    found = rows(aten._linalg_solve_ex.default, regular(2, 3, 3), whole(2, 3, 4))
    assert ((R, P), (P, R, R, R)) in found
    assert ((R, S(2)), (S(2), R, R, R)) in found
    assert ((S(0), S(0)), (S(0), S(0), S(0), S(0))) in found
    assert ((P, R), (P, R, R, R)) not in found


def test_the_decompositions_give_what_the_ops_give():
    """Several dims one by one, and norms of differences."""
    for op, args, _ in transformed():
        if len(args[1]) > 1:
            assert differences(op, [args]) == []
    for p in (0.0, 1.0, 2.0, 3.0, inf):
        a, b = whole(2, 5, 3), whole(2, 4, 3)
        assert differences(aten._cdist_forward.default, [(a, b, p, 2)]) == []
        assert differences(aten._pdist_forward.default, [(a[0], p)]) == []
        assert differences(aten.dist.default, [(a, b[:, :1], p)]) == []


def typed(shape, *placements, dtype=torch.float32) -> TensorType:
    return TensorType(shape, dtype, Layout(MESH, list(placements)))


def test_transforms_of_two_dims_move_the_cut_between_them():
    """An all-to-all of what a rank holds, where a gather would bring all of the rest."""
    image = typed((1024, 1024), Shard(0), dtype=torch.complex64)
    there = trace(torch.fft.fft2, image, out_layouts=like(None))
    assert there.received_bytes == image.local_nbytes(0) * 3 // 4
    assert there.out_types[0].layout == Layout(MESH, [Shard(1)])
    back = trace(torch.fft.ifft2, there.out_types[0], out_layouts=like(None))
    assert back.received_bytes == there.received_bytes
    assert back.out_types[0].layout == Layout(MESH, [Shard(0)])


def test_solvers_move_nothing_for_free_columns():
    """And a count for a stack, of its singular matrices; of pending columns each gets its own."""
    a, b = typed((8, 16, 16), Shard(0)), typed((8, 16, 32), Shard(0))
    assert trace(torch.linalg.solve, a, b, check_indices=False).received_bytes == 0
    assert trace(torch.linalg.solve, a, b).received_bytes < 2 * torch.float32.itemsize
    a, b = typed((16, 16), Replicate()), typed((16, 32), Shard(1))
    assert trace(torch.linalg.solve, a, b).received_bytes == 0
    pending = typed((16, 32), Partial("sum"))
    assert trace(torch.linalg.solve, a, pending).received_bytes == pending.nbytes * 3 // 4


def test_distances_of_pairs_are_sums_over_a_cut_coordinate():
    """What moves are terms of the distances, not points."""
    points = typed((10, 1024), Shard(1))
    assert trace(torch.nn.functional.pdist, points).received_bytes == 12 * 4 * 3


def test_conjugates_are_viewed_as_real_numbers():
    """What a trace records of a conjugate has its values, not a bit that says so."""

    def parts(x):
        return torch.view_as_real(torch.fft.ihfft(x).resolve_conj())

    x = whole(8, 6)
    held = distribute(x, Layout(MESH, [Shard(0)]), SimulatedComm(MESH))
    assert torch.allclose(spmd(parts)(held).full(), parts(x))


def test_covariances_are_traced():
    """Plain ones look at the values of their weights, to refuse some."""
    x, times, weights = whole(5, 8), whole(8).abs() + 1, whole(8).abs() + 1
    comm = SimulatedComm(MESH)
    every: list[dict[str, Any]] = [
        {},
        {"fweights": times.long()},
        {"fweights": times.long(), "aweights": weights, "correction": 2},
    ]
    for given in every:
        due = torch.cov(x, **given)
        assert torch.allclose(cov(x, **given), due)
        held = distribute(x, Layout(MESH, [Shard(1)]), comm)
        assert torch.allclose(spmd(lambda t, g=given: torch.cov(t, **g))(held).full(), due)
    for z in (x, x[0], waves(5, 8)):
        assert torch.allclose(corrcoef(z), torch.corrcoef(z))
    wide = typed((8, 1 << 20), Shard(1))
    assert trace(torch.corrcoef, wide).received_bytes < 2 * 8 * 9 * 4


@pytest.mark.parametrize("mode", ["reduced", "r"])
@pytest.mark.parametrize("shape", [(16, 3), (13, 4), (2, 14, 3), (4, 1), (21, 5)])
def test_a_qr_by_blocks_of_rows_is_that_of_the_whole(shape, mode):
    """Signs too, which say which of all that are right a kernel gives."""
    samples = []
    for seed in range(20):
        a = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        samples.append((a, mode))
    eye = torch.eye(*shape[-2:], dtype=torch.float64).expand(shape)
    samples += [(eye.clone(), mode), (-2 * eye, mode), (0 * eye, mode), (eye.flip(-2), mode)]
    assert differences(aten.linalg_qr.default, samples) == []


@pytest.mark.parametrize("shape", [(16, 3), (13, 4), (2, 14, 3), (4, 1), (40, 5)])
def test_what_follows_from_a_qr_by_blocks_is_that_of_the_whole(shape):
    several = [
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in range(6)
    ]
    several.append(several[0] * torch.tensor([1e-30] + [1.0] * (shape[-1] - 1)))
    flags = [(False, True), (False, False), (True, False)]
    for full, vectors in flags:
        assert differences(aten._linalg_svd.default, [(a, full, vectors) for a in several]) == []
    tenth = torch.tensor(0.1, dtype=torch.float64)
    for given in (
        {},
        {"rtol": tenth},
        {"atol": tenth},
        {"atol": 0 * tenth},
        {"atol": tenth, "rtol": tenth},
    ):
        samples = [((a,), given) for a in several]
        assert differences(aten.linalg_pinv.atol_rtol_tensor, samples) == []


def test_singular_values_and_inverses_of_a_tall_matrix_move_triangles():
    tall, many = TensorType((1 << 20, 64), torch.float64, MESH.layout("x")), 64 * 64 * 8 * 5
    assert trace(torch.linalg.svdvals, tall).received_bytes <= many
    assert trace(torch.linalg.pinv, tall, out_layouts=MESH.layout(None, "x")).received_bytes <= many
    outs = MESH.layout("x"), MESH.layout(), MESH.layout()
    program = trace(lambda a: tuple(torch.linalg.svd(a, False)), tall, out_layouts=outs)
    assert program.received_bytes <= many


def test_the_rows_of_signs_are_right():
    q = torch.linalg.qr(torch.randn(4, 6, 3, dtype=torch.float64))[0]
    assert verify(SIGNS, [(q[:, :3], q[:, 0])], count=2) == []


def test_a_tall_matrix_stays_cut_in_its_qr():
    tall = TensorType((1 << 20, 64), torch.float64, MESH.layout("x"))
    outs = MESH.layout("x"), MESH.layout()
    program = trace(lambda a: tuple(torch.linalg.qr(a)), tall, out_layouts=outs)
    triangle = 64 * 64 * 8
    assert program.received_bytes == 3 * triangle + 2 * 3 * triangle // 4  # all, and the first

    def loss(a):
        q, r = torch.linalg.qr(a)
        return (q**3).sum() + (r**2).sum()

    a = torch.randn(400, 3, dtype=torch.float64)
    held = distribute(a, MESH.layout("x"), SimulatedComm(MESH))
    due = torch.func.grad(loss)(a)
    assert torch.allclose(
        spmd(torch.func.grad(loss), as_if=lambda s: (1 << 20, 3))(held).full(), due
    )


def test_a_qr_of_blocks_with_fewer_rows_than_columns_takes_the_whole():
    for shape, dtype in [((8, 3), torch.float64), ((64, 3), torch.complex128)]:
        a = torch.randn(shape, dtype=dtype)
        held = distribute(a, MESH.layout("x"), SimulatedComm(MESH))
        for got, due in zip(spmd(torch.linalg.qr)(held), torch.linalg.qr(a), strict=True):
            assert torch.allclose(got.full(), due)
