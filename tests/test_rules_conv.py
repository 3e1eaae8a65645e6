"""Every row of the rules for convolutions, pooling and resampling, also on empty blocks."""

import pytest
import torch

from fdtensor.graph import Full
from fdtensor.rows import rows_of
from fdtensor.rules import Row, pool, resample
from fdtensor.rules.core import P, R, S
from fdtensor.verify import call_of, verify

aten = torch.ops.aten
COUNTS = [2, 3, 4]


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small random integers, so that sums of them are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def conv(n, i, o, size, kernel, groups=1, transposed=False, bias=True, stride=1, extra=0):
    """The arguments of a convolution of `n` images with `i` channels to `o`."""
    d = len(size)
    weight = (i, o // groups, *kernel) if transposed else (o, i // groups, *kernel)
    return (
        *(ints(n, i, *size), ints(*weight, seed=1), ints(o, seed=2) if bias else None),
        *([stride] * d, [0] * d, [1] * d, transposed, [extra] * d, groups),
    )


CONVOLUTIONS = {
    "2d": conv(2, 4, 6, (4, 4), (3, 3)),
    "1d without bias": conv(3, 5, 2, (6,), (3,), bias=False, stride=2),
    "3d": conv(2, 2, 3, (3, 3, 3), (2, 2, 2)),
    "one channel": conv(1, 3, 1, (4, 4), (2, 2)),
    "two groups": conv(2, 4, 6, (4, 4), (3, 3), groups=2),
    "depthwise": conv(2, 6, 6, (5,), (3,), groups=6),
    "depthwise with multiplier": conv(2, 3, 6, (5,), (3,), groups=3),
    "transposed": conv(3, 4, 5, (4,), (3,), transposed=True, stride=2, extra=1),
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


def test_a_rank_without_input_channels_adds_its_term_of_the_bias():
    """The bias has to be pending with the sum over input channels, or it counts on each rank."""
    args = CONVOLUTIONS["2d"]
    call, tensors, whole = call_of(aten.convolution.default, args, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    right, wrong = Row((S(1), S(1), P), (P,)), Row((S(1), S(1), R), (P,))
    assert right in rows_of(call, types, 5)
    assert verify(aten.convolution.default, [args], [right], count=5) == []
    assert len(verify(aten.convolution.default, [args], [wrong], count=5)) == 1


IMAGES = {1: ints(3, 5, 6), 2: ints(3, 5, 6, 6), 3: ints(2, 3, 4, 4, 4)}
SIZES = {
    "_adaptive_avg_pool2d": [3, 3],
    "_adaptive_avg_pool3d": [2, 2, 2],
    "adaptive_max_pool1d": [3],
    "adaptive_max_pool2d": [3, 3],
    "adaptive_max_pool3d": [2, 2, 2],
}


def each(table):
    return [(op, n) for n, ops in table.items() for op in ops]


def forward_of(name: str, n: int) -> list:
    """The second argument of a pooling or padding: sizes for each of `n` dims."""
    return SIZES.get(name, [2] * n if "pool" in name else [1] * 2 * n)


@pytest.mark.parametrize(("op", "n"), each(pool.LINEAR) + each(pool.MAXIMA), ids=str)
def test_the_rows_of_pooling_and_padding_are_right(op, n):
    """Images and channels, with and without a dim of images."""
    sizes = forward_of(op._schema.name.removeprefix("aten::"), n)
    for count in COUNTS[1:]:
        assert verify(op, [(IMAGES[n], sizes), (IMAGES[n][0], sizes)], count=count) == []


def gradient(op, n, x):
    """The arguments of the backward kernel `op` at `x`."""
    name = op._schema.name.removeprefix("aten::").replace("_backward", "")
    sizes = forward_of(name, n)
    made = getattr(aten, name).default(x, sizes)
    if "max" in name:
        grad, where = ints(*made[0].shape), made[1]
        windows = () if "adaptive" in name else (sizes, sizes, [0] * n, [1] * n, False)
        return (grad, x, *windows, where)
    grad = ints(*made.shape)
    if "adaptive" in name:
        return grad, x
    windows = (sizes, [0] * n, False, True, None) if "avg" in name else ()
    return (grad, x, sizes, *windows)


@pytest.mark.parametrize(("op", "n"), each(pool.BACKWARD), ids=str)
def test_the_rows_of_the_gradients_of_pooling_and_padding_are_right(op, n):
    """They are linear in the gradient of the output."""
    for count in COUNTS[1:]:
        samples = [gradient(op, n, IMAGES[n]), gradient(op, n, IMAGES[n][0])]
        assert verify(op, samples, count=count) == []


@pytest.mark.parametrize("op", resample.RESIZED + resample.RESIZED_BACKWARD, ids=str)
def test_the_rows_of_resizing_are_right(op):
    """Gradients are given the shape of the block."""
    name = op._schema.name
    n = next(int(c) for c in name if c.isdigit())
    x, size = IMAGES[n], [7] * n
    rest = () if "nearest" in name else (False,)
    args = (x, size, *rest)
    if "backward" in name:
        args = (ints(*x.shape[:2], *size), size, list(x.shape), *rest)
    for count in COUNTS[1:]:
        assert verify(op, [args], count=count) == []


SAMPLED = [
    (aten.pixel_shuffle.default, ints(3, 12, 4, 5), 2),
    (aten.pixel_shuffle.default, ints(8, 3, 3), 2),
    (aten.pixel_unshuffle.default, ints(3, 3, 4, 6), 2),
    (aten.pixel_unshuffle.default, ints(2, 4, 4), 2),
    (aten.channel_shuffle.default, ints(3, 6, 4, 5), 3),
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
