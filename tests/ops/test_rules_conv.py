"""Every row of the rules for convolutions, pooling and resampling, also on empty blocks."""

import pytest
import torch

from fdtensor import (
    Layout,
    Mesh,
    Replicate,
    Shard,
    SimulatedComm,
    TensorType,
    distribute,
    spmd,
    trace,
)
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S
from fdtensor.ops.rows import rows_of
from fdtensor.ops.rules import Row, pool, resample
from fdtensor.testing.row_checks import call_of, verify
from tests.operators.check import Checked
from tests.operators.layouts import LINE, SQUARE
from tests.operators.samples import Sample

aten = torch.ops.aten
nn = torch.nn.functional
COUNTS = [2, 3, 4]


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small random integers, so that sums of them are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def conv(
    n, i, o, size, kernel, groups=1, transposed=False, bias=True, stride=1, extra=0, pad=0, wide=1
):
    """The arguments of a convolution of `n` images with `i` channels to `o`."""
    d = len(size)
    weight = (i, o // groups, *kernel) if transposed else (o, i // groups, *kernel)
    return (
        *(ints(n, i, *size), ints(*weight, seed=1), ints(o, seed=2) if bias else None),
        *([stride] * d, [pad] * d, [wide] * d, transposed, [extra] * d, groups),
    )


CONVOLUTIONS = {
    "2d": conv(2, 4, 6, (4, 4), (3, 3)),
    "1d without bias": conv(3, 5, 2, (6,), (3,), bias=False, stride=2),
    "3d": conv(2, 2, 3, (3, 3, 3), (2, 2, 2)),
    "one channel": conv(1, 3, 1, (4, 4), (2, 2)),
    "two groups": conv(2, 4, 6, (4, 4), (3, 3), groups=2),
    "depthwise": conv(2, 6, 6, (5,), (3,), groups=6),
    "depthwise with multiplier": conv(2, 3, 6, (5,), (3,), groups=3),
    "padded": conv(1, 2, 3, (9, 5), (3, 3), stride=2, pad=1),
    "wide": conv(1, 2, 2, (9,), (3,), pad=3, wide=2),
    "sparse": conv(1, 2, 2, (13,), (1,), stride=3, pad=2),
    "transposed": conv(3, 4, 5, (4,), (3,), transposed=True, stride=2, extra=1),
    "transposed and padded": conv(1, 2, 2, (5,), (3,), transposed=True, stride=3, extra=2, pad=2),
    "transposed and wide": conv(1, 2, 2, (5,), (2,), transposed=True, wide=3, pad=1),
    "transposed in groups": conv(2, 4, 6, (3, 3), (2, 2), groups=2, transposed=True),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_rows_of_convolutions_are_right(name):
    """Images, output channels, input channels, and whole groups."""
    for count in COUNTS:
        assert verify(aten.convolution.default, [CONVOLUTIONS[name]], count=count) == []


MASKS = [(True, True, True), (False, True, True), (True, False, False)]


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("wanted", MASKS)
def test_the_rows_of_the_gradients_of_convolutions_are_right(name, wanted):
    """Only those that are wanted come out."""
    x, weight, bias, *rest = CONVOLUTIONS[name]
    grad = ints(*aten.convolution.default(x, weight, bias, *rest).shape, seed=5)
    sizes = None if bias is None else list(bias.shape)
    wanted = [w and (i < 2 or bias is not None) for i, w in enumerate(wanted)]
    args = (grad, x, weight, sizes, *rest, wanted)
    for count in COUNTS[-1:] if False in wanted else COUNTS[1:]:
        assert verify(aten.convolution_backward.default, [args], count=count) == []


def rows(op, *args):
    """The rows of a call on two ranks, as they print."""
    call, tensors, whole = call_of(op, args, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    return {str(row) for row in rows_of(call, types, 2)}


def test_the_gradient_of_a_convolution_is_linear_in_image_and_weight_together():
    """One goes into the gradient of the other; that of the bias is of neither."""
    x, weight, bias, *rest = CONVOLUTIONS["2d"]
    grad = ints(*aten.convolution.default(x, weight, bias, *rest).shape, seed=5)
    op, args = aten.convolution_backward.default, (grad, x, weight, [6], *rest)
    assert "R P(sum) P(sum) -> P(sum) P(sum) R" in rows(op, *args, [True, True, True])
    assert "R P(sum) P(sum) -> P(sum)" in rows(op, *args, [True, False, False])
    assert verify(op, [(*args, [True, True, True])], [Row((R, P, P), (P, P, R))], count=3) == []


def test_an_image_whose_shape_alone_is_read_may_be_pending():
    """That of the gradient of an average, and of a maximum whose places are given."""
    x, y = IMAGES[2], torch.ones(1, 2, 3, 2)
    found = rows(aten.avg_pool2d_backward.default, y, x, *([2, 2],) * 2, [0, 0], False, True, None)
    assert {"P(sum) P(sum) -> P(sum)", "R P(sum) -> R"} <= found
    pooled, where = aten.adaptive_max_pool2d.default(x, [3, 2])
    found = rows(aten.adaptive_max_pool2d_backward.default, pooled, x, where)
    assert "P(sum) P(sum) R -> P(sum)" in found


def test_a_rank_without_input_channels_adds_its_term_of_the_bias():
    """The bias has to be pending with the sum over input channels, or it counts on each rank."""
    args = CONVOLUTIONS["2d"]
    call, tensors, whole = call_of(aten.convolution.default, args, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    right, wrong = Row((S(1), S(1), P), (P,)), Row((S(1), S(1), R), (P,))
    assert right in rows_of(call, types, 5)
    assert verify(aten.convolution.default, [args], [right], count=5) == []
    assert len(verify(aten.convolution.default, [args], [wrong], count=5)) == 1


SAMPLES = {
    "reflection_pad": ([1, 2, 0, 1, 2, 2],),
    "replication_pad": ([1, 2, 0, 3, -1, 2],),
    "avg_pool": ([3, 2, 3], [2, 2, 1], [1, 0, 1], True, False, None),
    "_adaptive_avg_pool": ([3, 5, 1],),
    "upsample_nearest": ([7, 3, 4], None, None, None),
    "_upsample_nearest_exact": ([7, 3, 4], None, None, None),
    "upsample_linear": ([9], False, None),
    "upsample_bilinear": ([9, 3], True, None, None),
    "upsample_bicubic": ([9, 3], False, 1.5, 0.5),
    "upsample_trilinear": ([7, 3, 4], False, None, None, None),
    "_upsample_bilinear_aa": ([9, 3], False, None, None),
    "_upsample_bicubic_aa": ([9, 3], True, None, None),
    "max_pool_with_indices": ([3, 2, 2], [2, 2, 1], [1, 0, 1], [1, 2, 1], True),
    "adaptive_max_pool": ([3, 5, 2],),
}
"""The arguments of an op after the image, on three dims or as many as there are."""

IMAGES = {1: ints(2, 3, 9), 2: ints(1, 2, 6, 5), 3: ints(1, 2, 5, 4, 3)}


def sampled():
    """Forward, backward and the arguments for each number of dims."""
    for name, (_, *dims) in resample.LINEAR.items():
        yield from ((name, n) for n in dims)
    yield from ((name, n) for name in pool.POOLS for n in (2, 3))


def arguments(name: str, n: int) -> list:
    """Those of the op after the image."""
    given = SAMPLES[name.replace("{}d", "")]
    sizes = [v[: 2 * n if "_pad" in name else n] if isinstance(v, list) else v for v in given]
    return sizes[: 1 + n] if "nearest" in name else sizes


@pytest.mark.few(16)
@pytest.mark.parametrize(("name", "n"), [*sampled()])
def test_the_rows_of_pools_paddings_and_resizing_are_right(name, n):
    """Forward and backward: images, channels, and rows with their halos."""
    x, args = IMAGES[n], arguments(name, n)
    forward = getattr(aten, name.format(n)).default
    backward = getattr(aten, f"{name.format(n)}_backward").default
    made = forward(x, *args)
    made, *where = made if isinstance(made, tuple) else (made,)
    grad = ints(*made.shape, seed=3)
    rest = [x, *([] if "adaptive" in name else args), *where]
    if "upsample" in name:
        rest = [args[0], list(x.shape), *args[1:]]
    for count in COUNTS[1:]:
        assert verify(forward, [(x, *args)], count=count) == []
        assert verify(backward, [(grad, *rest)], count=count) == []


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_unpooled_goes_where_it_was(n):
    """Each rank takes what belongs in its block."""
    pooled, where = getattr(aten, f"max_pool{n}d_with_indices").default(IMAGES[n], [2] * n)
    rest = [[2] * n, [0] * n] if n == 3 else []
    sample = pooled, where, list(IMAGES[n].shape[2:]), *rest
    for count in COUNTS:
        assert verify(getattr(aten, f"max_unpool{n}d").default, [sample], count=count) == []


def test_rounded_averages_are_no_sums():
    """An integer average of terms is not the average of the sum."""
    x = torch.arange(24).reshape(1, 2, 3, 4)
    call, tensors, whole = call_of(aten.avg_pool2d.default, (x, [2, 2]), {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    assert all(row.ins not in ((P,), (S(2),)) for row in rows_of(call, types, 2))


PROGRAMS = {
    "convolution": (
        lambda x, w, b: nn.conv2d(x, w, b, stride=2, padding=(1, 2), dilation=(2, 1)),
        (3, 2, 3, 3),
        (3,),
    ),
    "transposed": (
        lambda x, w, b: nn.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        (2, 3, 3, 3),
        (3,),
    ),
    "max_pool": (lambda x: nn.max_pool2d(x, 3, 2, 1, return_indices=True),),
    "adaptive_max_pool": (lambda x: nn.adaptive_max_pool2d(x, (5, 4)),),
    "avg_pool": (lambda x: nn.avg_pool2d(x, 3, 2, 1, divisor_override=5),),
    "bilinear": (lambda x: nn.interpolate(x, (7, 9), mode="bilinear"),),
    "reflect": (lambda x: nn.pad(x, (1, 2, 3, 0), mode="reflect"),),
    "images": (lambda x: nn.avg_pool3d(x, 3, 1, 1),),
}
"""A function of an image, and the shapes of what it takes besides."""


@pytest.mark.few(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_and_columns_may_be_cut_at_once(name):
    """By one axis each, or both by one dim, also where some ranks hold nothing."""
    f, *shapes = PROGRAMS[name]
    size = (1, 2, 7, 6, 5) if name == "images" else (1, 2, 9, 6)
    tensors = [ints(*shape, seed=i) for i, shape in enumerate([size, *shapes])]
    checked = Checked(Sample(f, tuple(tensors), name, False), True)
    cuts = [(LINE, [Shard(2)]), (LINE, [Shard(3)])]
    cuts += [(SQUARE, [Shard(a), Shard(b)]) for a, b in ((2, 3), (3, 2), (2, 2), (1, 3))]
    for mesh, placements in cuts:
        rest = [Layout(mesh, [Replicate()] * mesh.ndim) for _ in shapes]
        found = checked.result([Layout(mesh, placements), *rest])
        assert found.kind == "right", found


def test_a_convolution_moves_only_halos():
    """Of 256 rows over 4 ranks, the one before and the one after a block; back the same."""

    def there(x, w):
        return nn.conv2d(x, w, padding=1)

    def back(grad, x, w):
        return aten.convolution_backward(
            grad, x, w, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )

    image = TensorType((2, 8, 256, 64), torch.float32, Layout(LINE, [Shard(2)]))
    weight = TensorType((8, 8, 3, 3), torch.float32, Layout(LINE, [Replicate()]))
    halo, sums = 2 * (2 * 8 * 64) * 4, 2 * 3 * ((8 * 8 * 9 + 8) * 4 // 4)
    assert trace(there, image, weight).received_bytes == halo
    program = trace(back, image, image, weight)
    assert halo < program.received_bytes <= halo + sums


def test_resized_and_pooled_images_move_only_halos():
    """Two rows for a bilinear image of twice the size, one for a window of three rows each two."""
    row = 2 * 8 * 64 * 4
    image = TensorType((2, 8, 256, 64), torch.float32, Layout(LINE, [Shard(2)]))
    larger = trace(lambda x: nn.interpolate(x, scale_factor=2.0, mode="bilinear"), image)
    assert larger.received_bytes == 2 * row
    assert trace(lambda x: nn.max_pool2d(x, 3, 2, 1), image).received_bytes == row
    assert trace(lambda x: nn.max_pool2d(x, 2), image).received_bytes == 0
    assert trace(lambda x: nn.adaptive_avg_pool2d(x, (1, 64)), image).received_bytes < 2 * row


def test_halos_along_two_axes_are_all_that_moves():
    """An edge of 4 elements for each dim, and a corner, of 8 planes."""
    for placements in ([Shard(2), Shard(3)], [Shard(3), Shard(2)]):
        image = TensorType((2, 4, 8, 8), torch.float32, Layout(SQUARE, placements))
        assert (
            trace(lambda x: nn.max_pool2d(x, 3, 1, 1), image).received_bytes == 8 * (4 + 4 + 1) * 4
        )


SAMPLED = [
    (aten.pixel_shuffle.default, ints(3, 12, 4, 5), 2),
    (aten.pixel_shuffle.default, ints(8, 3, 3), 2),
    (aten.pixel_unshuffle.default, ints(3, 3, 4, 6), 2),
    (aten.pixel_unshuffle.default, ints(2, 4, 4), 2),
    (aten.channel_shuffle.default, ints(3, 6, 4, 5), 3),
    (aten.channel_shuffle.default, ints(1, 12, 2), 3),
    (aten.im2col.default, ints(3, 5, 4, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
    (aten.im2col.default, ints(3, 4, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
    (aten.col2im.default, ints(3, 20, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    (aten.col2im.default, ints(12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    (aten.affine_grid_generator.default, ints(3, 2, 3), [3, 2, 4, 4], False),
]


@pytest.mark.parametrize("sample", SAMPLED, ids=lambda s: f"{s[0]}{[*s[1].shape]}")
def test_the_rows_of_shuffles_and_windows_are_right(sample):
    """Channels in units of a window or of a shuffled pixel."""
    op, *args = sample
    for count in COUNTS:
        assert verify(op, [tuple(args)], count=count) == []


@pytest.mark.parametrize("n", [2, 3])
def test_the_rows_of_grid_samples_are_right(n):
    """Images, channels and places; the image is linear."""
    size, places = (4, 4, 3)[:n], (5, 3, 2)[:n]
    x, grid = ints(3, 5, *size), ints(3, *places, n, seed=1) / 4
    grad = ints(3, 5, *places, seed=2)
    op, backward = {
        2: (aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default),
        3: (aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default),
    }[n]
    for count in COUNTS[1:]:
        assert verify(op, [(x, grid, 0, 0, False)], count=count) == []
        for wanted in ([True, True], [False, True]):
            assert verify(backward, [(grad, x, grid, 0, 0, False, wanted)], count=count) == []


@pytest.mark.parametrize("shape", [(1, 0, 5), (0, 4, 5)])
def test_a_convolution_of_nothing_in_groups_is_its_bias(shape):
    """Of no channels, runs of them have no length."""
    mesh = Mesh(x=2)
    x, weight = torch.zeros(shape), torch.ones(4, shape[1] // 2, 3)
    comm = SimulatedComm(mesh)
    given = [distribute(t, mesh.layout(), comm) for t in (x, weight, torch.arange(4.0))]

    def f(x, weight, bias):
        return torch.nn.functional.conv1d(x, weight, bias, groups=2)

    assert torch.equal(spmd(f)(*given).full(), f(x, weight, torch.arange(4.0)))
