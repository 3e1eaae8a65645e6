"""Every row of every rule for elementwise ops, on dims that divide, do not divide and are empty."""

import itertools

import pytest
import torch

from fdtensor.layouts.placement import Partial
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S
from fdtensor.ops.notation.dtypes import keeps_order, keeps_sums
from fdtensor.ops.rows import rows_of
from fdtensor.testing.row_checks import call_of, verify

aten = torch.ops.aten
MAX, MIN = Partial("max"), Partial("min")
SHAPES = [(4, 6), (5, 3), (2, 1), (0, 3), (7,), ()]
COUNTS = [2, 3, 4]
pytestmark = pytest.mark.one_of("count")


def ints(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small random integers, so that sums of them are exact."""
    least = -4 if dtype.is_signed else 0
    drawn = torch.randint(least, 5, shape, generator=torch.Generator().manual_seed(seed))
    return drawn > 0 if dtype is torch.bool else drawn.to(dtype)


def mask(*shape: int) -> torch.Tensor:
    return ints(*shape, dtype=torch.bool, seed=3)


def placements(op, *args, **kwargs):
    """The rows of a call, as they print."""
    call, tensors, whole = call_of(op, args, kwargs)
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    return [(row.ins, row.outs) for row in rows_of(call, types, 2)]


UNARY = [
    (op, numbers)
    for op, *numbers in [
        (aten.abs.default,),
        (aten.alias_copy.default,),
        (aten.asinh.default,),
        (aten.atan.default,),
        (aten.ceil.default,),
        (aten.celu.default, 0.5),
        (aten.clamp.default, -1, 2),
        (aten.clamp_max.default, 1),
        (aten.clamp_min.default, 0),
        (aten.clone.default,),
        (aten.conj_physical.default,),
        (aten.cos.default,),
        (aten.deg2rad.default,),
        (aten.detach_copy.default,),
        (aten.div.Scalar, -2.0),
        (aten.elu.default, 0.5, 2.0),
        (aten.erf.default,),
        (aten.erfc.default,),
        (aten.exp.default,),
        (aten.exp2.default,),
        (aten.expm1.default,),
        (aten.fill.Scalar, 3),
        (aten.floor.default,),
        (aten.floor_divide.Scalar, 2),
        (aten.frexp.Tensor,),
        (aten.gelu.default,),
        (aten.hardsigmoid.default,),
        (aten.hardswish.default,),
        (aten.hardtanh.default,),
        (aten.leaky_relu.default, 0.1),
        (aten.lift_fresh_copy.default,),
        (aten.log.default,),
        (aten.log_sigmoid_forward.default,),
        (aten.mish.default,),
        (aten.mul.Scalar, -2),
        (aten.mul.Scalar, 0),
        (aten.nan_to_num.default,),
        (aten.native_dropout.default, 0.0, True),
        (aten.native_dropout.default, 0.5, False),
        (aten.neg.default,),
        (aten.pow.Tensor_Scalar, 2),
        (aten.rad2deg.default,),
        (aten.relu.default,),
        (aten.round.default,),
        (aten.rsub.Scalar, 2),
        (aten.selu.default,),
        (aten.sigmoid.default,),
        (aten.silu.default,),
        (aten.sinh.default,),
        (aten.softplus.default,),
        (aten.sqrt.default,),
        (aten.tanh.default,),
        (aten.trunc.default,),
        (aten.add.Scalar, 10),
        (aten.sub.Scalar, 10, 2),
        (aten.add.Tensor, 10),
        (aten.mul.Tensor, 3),
        (aten.mul.Tensor, -3),
        (aten.div.Tensor, 2),
        (aten.zero.default,),
    ]
]


@pytest.mark.parametrize(("op", "numbers"), UNARY, ids=lambda v: str(v).removeprefix("aten."))
def test_the_rows_of_a_function_of_one_tensor_are_right(op, numbers):
    """Cuts, pending sums, maxima and minima."""
    for shape, count in itertools.product(SHAPES, COUNTS):
        assert verify(op, [(ints(*shape), *numbers)], count=count) == []


BINARY = [
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Tensor,
    aten.mul.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.atan2.default,
    aten.gt.Tensor,
    aten.floor_divide.default,
    aten.copy.default,
    aten._prelu_kernel.default,
    aten.complex.default,
    aten.polar.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.silu_backward.default,
    aten.gelu_backward.default,
    aten.mish_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
]
PAIRS = [((4, 6), (4, 6)), ((5, 3), (3,)), ((5, 3), (1, 3)), ((3, 5), (3, 1)), ((0, 2), (1, 2))]


@pytest.mark.parametrize("op", BINARY, ids=str)
def test_the_rows_of_a_function_of_two_tensors_are_right(op):
    """Dims of size 1 and those that are not there are not cut."""
    same = str(op).split(".")[1] in ("copy", "polar") or "backward" in str(op)
    for (left, right), count in itertools.product(PAIRS, COUNTS):
        right = left if same and "copy" not in str(op) else right
        found = verify(op, [(ints(*left), ints(*right, seed=1))], count=count)
        assert found == []
        if not same and op is not aten._prelu_kernel.default:
            assert verify(op, [(ints(*right), ints(*left, seed=1))], count=count) == []


@pytest.mark.parametrize("count", COUNTS)
def test_the_rows_of_functions_of_more_tensors_are_right(count):
    """Broadcast arguments and keyword arguments too."""
    for shape in ((4, 6), (5, 3), (1, 2)):
        x, y, z = (ints(*shape, seed=i) for i in range(3))
        row, one = ints(shape[1], seed=5), torch.tensor(2.0)
        positive = z.abs() + 1
        for op, *sample in [
            (aten.div.Tensor, x, positive),
            (aten.div.Tensor_mode, (x, positive), {"rounding_mode": None}),
            (aten.div.Tensor_mode, (x, positive), {"rounding_mode": "floor"}),
            (aten.add.Tensor, (x, row), {"alpha": 3}),
            (aten.addcmul.default, (x, y, row), {"value": 2}),
            (aten.addcdiv.default, (x, y, positive), {"value": 2}),
            (aten.lerp.Scalar, x, y, 0.25),
            (aten.lerp.Tensor, x, row, z),
            (aten.where.self, mask(*shape), x, row),
            (aten.where.ScalarOther, mask(*shape), x, 0),
            (aten.where.ScalarOther, mask(*shape), x, 1),
            (aten.where.ScalarSelf, mask(*shape), 0, x),
            (aten.masked_fill.Scalar, x, mask(shape[1]), 0),
            (aten.masked_fill.Scalar, x, mask(shape[1]), 7),
            (aten.masked_fill.Tensor, x, mask(*shape), one),
            (aten.fill.Tensor, x, one),
            (aten.clamp.Tensor, x, row, None),
            (aten.clamp.Tensor, (x,), {"max": row}),
            (aten.isin.Tensor_Tensor, x, row),
            (aten.isin.Tensor_Scalar, x, 2.0),
            (aten.threshold_backward.default, x, y, 0),
            (aten.leaky_relu_backward.default, x, y, 0.1, False),
            (aten.elu_backward.default, x, 1.0, 1.0, 1.0, False, y),
            (aten.hardtanh_backward.default, x, y, -1, 1),
            (aten.hardshrink_backward.default, x, y, 0.5),
            (aten.softshrink_backward.default, x, y, 0.5),
            (aten.softplus_backward.default, x, y, 1, 20),
            (aten.log_sigmoid_backward.default, x, y, z.abs()),
            (aten.logit_backward.default, x, y / 16 + 0.5),
            (aten.native_dropout_backward.default, x, mask(*shape), 2.0),
            (aten._prelu_kernel_backward.default, x, y, row.expand(shape)),
            (aten.ldexp.Tensor, x, row),
            (aten.xlogy.Tensor, x, positive),
            (aten.xlogy.Scalar_Other, x, 3.0),
            (aten.xlogy.Scalar_Self, 3.0, positive),
            (aten.special_xlog1py.default, x, row.abs()),
            (aten.special_xlog1py.other_scalar, x, 3.0),
            (aten.polar.default, x, y),
        ]:
            args = tuple(sample[0]) if isinstance(sample[-1], dict) else tuple(sample)
            kwargs = sample[-1] if isinstance(sample[-1], dict) else {}
            assert verify(op, [(args, kwargs)], count=count) == [], op


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dim", [0, -1])
def test_the_rows_of_gated_units_are_right(count, dim):
    """The dim of both halves may be cut in each of them."""
    for shape in ((4, 6), (10, 2)):
        x = ints(*shape)
        grad = ints(*aten.glu.default(x, dim).shape, seed=1)
        assert verify(aten.glu.default, [(x, dim)], count=count) == []
        assert verify(aten.glu_backward.default, [(grad, x, dim)], count=count) == []


DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("before", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("after", [*DTYPES, torch.complex64])
def test_the_rows_of_casts_and_mixed_dtypes_are_right(before, after):
    """A sum of bools is `or` and one without a sign wraps around: not every cast keeps them."""
    x, y = ints(5, 3, dtype=before), ints(3, dtype=after, seed=1)
    if not (before.is_complex and not after.is_complex):
        assert verify(aten._to_copy.default, [((x,), {"dtype": after})], count=3) == []
        assert verify(aten.copy.default, [(ints(5, 3, dtype=after), x)], count=3) == []
    for op in (aten.add.Tensor, aten.mul.Tensor, aten.where.self, aten.maximum.default):
        if op is not aten.maximum.default or not (before.is_complex or after.is_complex):
            args = (mask(5, 3), x, y) if op is aten.where.self else (x, y)
            assert verify(op, [args], count=2) == [], op
    for number in (2, -2, 0.5):
        assert verify(aten.mul.Scalar, [(x, number)], count=2) == []
        assert verify(aten.mul.Tensor, [(x, number)], count=2) == []
        assert verify(aten.add.Tensor, [(x, number)], count=2) == []


def test_complex_ops_keep_pending_sums():
    """Conjugates and parts are linear over real numbers."""
    z = torch.complex(ints(5, 3), ints(5, 3, seed=1))
    for op in (aten._conj_physical.default, aten._conj_copy.default, aten.clone.default):
        assert verify(op, [(z,)], count=3) == []
        assert ((P,), (P,)) in placements(op, z)


def test_bools_keep_pending_maxima():
    """`or` is the maximum of bools, `and` the minimum, and `not` turns them around."""
    a, b = mask(5, 3), ints(5, 3, dtype=torch.bool, seed=8)
    for op in (aten.logical_or.default, aten.logical_and.default, aten.bitwise_or.Tensor):
        assert verify(op, [(a, b)], count=3) == []
    assert ((MAX, MAX), (MAX,)) in placements(aten.logical_or.default, a, b)
    assert verify(aten.logical_not.default, [(a,)], count=3) == []
    assert ((MAX,), (MIN,)) in placements(aten.logical_not.default, a)


def test_sums_pass_only_linear_functions():
    """`x + 10` adds 10 once for each rank."""
    x = ints(4, 6)
    pending = ((P,), (P,))
    assert pending in placements(aten.mul.Tensor, x, 10)
    assert ((P, R), (P,)) in placements(aten.masked_fill.Scalar, x, mask(4, 6), 0)
    assert ((P, R), (P,)) not in placements(aten.masked_fill.Scalar, x, mask(4, 6), 1)
    for op, args in [
        (aten.add.Tensor, (x, 10)),
        (aten.add.Scalar, (x, 10)),
        (aten.rsub.Scalar, (x, 10)),
        (aten.relu.default, (x,)),
        (aten.pow.Tensor_Scalar, (x, 2)),
    ]:
        assert pending not in placements(op, *args)


def test_maxima_pass_increasing_functions_and_turn_in_decreasing_ones():
    """Those that are not defined for all numbers let none pass: nan is no maximum."""
    x = ints(4, 6)
    assert ((MAX,), (MAX,)) in placements(aten.exp.default, x)
    assert ((MAX,), (MIN,)) in placements(aten.neg.default, x)
    assert ((MAX,), (MAX,)) not in placements(aten.log.default, x)
    assert ((MAX,), (MAX,)) not in placements(aten.leaky_relu.default, x, -0.1)
    assert ((MAX, R), (MAX,)) in placements(aten.minimum.default, x, x)


def test_backward_kernels_are_linear_in_the_gradient():
    """The function itself need not be."""
    x = ints(4, 6)
    assert ((P, R), (P,)) in placements(aten.gelu_backward.default, x, x)
    assert ((P,), (P,)) not in placements(aten.gelu.default, x)
    assert ((S(1), S(1)), (S(1),)) in placements(aten.gelu_backward.default, x, x)


def test_products_with_functions_are_linear_in_the_other_factor():
    x, y = ints(4, 6), ints(4, 6, seed=1)
    for op in (aten.ldexp.Tensor, aten.polar.default):
        assert ((P, R), (P,)) in placements(op, x, y)
        assert ((R, P), (P,)) not in placements(op, x, y)
    # 0 * log(0) is 0, but terms of that 0 times log(0) are infinite
    assert ((P, R), (P,)) not in placements(aten.xlogy.Tensor, x, y)
    assert ((P, R), (P,)) not in placements(aten.ldexp.Tensor, x > 0, y)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_are_linear_in_their_weights(reduction):
    """And the gradient of a squared error in the error; a likelihood's mean is over the weights."""
    x, part, weight = ints(6, 4), ints(6, 4).abs() / 8 + 0.25, ints(4, seed=1).abs() + 1
    target, total = torch.tensor([0, 3, 1, 3, 2, 0]), torch.tensor(7.0)
    each, one = ints(6, 4, seed=2), torch.tensor(2.0)
    grad, of_rows = (each, each[:, 0]) if reduction == 0 else (one, one)
    last = reduction, -100
    for op, sample, row in [
        (aten.mse_loss_backward, (grad, x, part, reduction), ((R, P, P), (P,))),
        (aten.binary_cross_entropy, (part, part, weight, reduction), ((R, R, P), (P,))),
        (
            aten.binary_cross_entropy_backward,
            (grad, part, part, weight, reduction),
            ((R, R, R, P), (P,)),
        ),
        (
            aten.binary_cross_entropy_with_logits,
            (x, part, weight, weight, reduction),
            ((R, R, P, R), (P,)),
        ),
        (aten.multi_margin_loss, (x, target, 1, 1.0, weight, reduction), ((R, R, P), (P,))),
        (
            aten.multi_margin_loss_backward,
            (of_rows, x, target, 1, 1.0, weight, reduction),
            ((R, R, R, P), (P,)),
        ),
        (aten.nll_loss_forward, (x, target, weight, *last), ((R, R, P), (P, P))),
        (
            aten.nll_loss_backward,
            (of_rows, x, target, weight, *last, total),
            ((R, R, R, P, R), (P,)),
        ),
        (
            aten.nll_loss_backward,
            (of_rows, x, target, weight, *last, total),
            ((R, P, R, R, R), (R,)),  # of x only the shape is read
        ),
        (
            aten.nll_loss_backward,
            (of_rows, x, target, None, *last, total),
            ((P, P, R, R), (P,)),
        ),
    ]:
        mean = op is aten.nll_loss_forward and reduction == 1
        assert (row in placements(op.default, *sample)) is not mean, op
        for count in COUNTS:
            assert verify(op.default, [sample], count=count) == [], op


def test_casts_that_keep_sums_and_order():
    """Rounding, wrapping around and `or` keep no sums."""
    assert keeps_sums(torch.float32, torch.float64)
    assert keeps_sums(torch.int64, torch.int32)
    assert not keeps_sums(torch.int32, torch.int64)
    assert not keeps_sums(torch.int32, torch.float32)
    assert not keeps_sums(torch.float32, torch.bfloat16)
    assert not keeps_sums(torch.uint8, torch.float32)
    assert not keeps_sums(torch.bool, torch.int64)
    assert keeps_order(torch.float64, torch.float32)
    assert keeps_order(torch.bool, torch.int64)
    assert not keeps_order(torch.int64, torch.bool)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.hardtanh.default], ids=str)
def test_a_wrong_row_is_found(op):
    """`verify` compares what ranks make with the whole."""
    from fdtensor.ops.rules import Row

    args = (ints(4, 6), 10) if op is aten.add.Tensor else (ints(4, 6),)
    (wrong,) = verify(op, [args], [Row((P,), (P,))], count=2)
    assert "output 0" in wrong.found
