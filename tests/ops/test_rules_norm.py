"""Every row of the normalizations and losses holds on blocks, and so do their decompositions."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from fdtensor import SimulatedComm, TraceError, distribute, spmd
from fdtensor.layouts.mesh import Mesh
from fdtensor.ops.decompositions import DECOMPOSITIONS
from fdtensor.ops.graph import Full
from fdtensor.ops.rows import rows_of
from fdtensor.testing.row_checks import call_of, verify
from tests.support.decompositions import differences
from tests.support.nested import nested

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
MASKS = [(True, True, True), (True, False, True), (False, True, False)]


def draw(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Quarters between -2 and 2."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator) / 4).to(dtype)


def chances(*shape: int, seed: int = 0) -> torch.Tensor:
    """Sixteenths between 0 and 1."""
    return (draw(*shape, seed=seed) + 2.5) / 5


def layer_norms():
    """Samples of a layer norm: `x, normalized_shape, weight, bias, eps`."""
    for shape, inner in (((4, 6), 1), ((5, 3), 1), ((2, 3, 4), 1), ((3, 2, 4), 2), ((6,), 1)):
        x, normalized = draw(*shape), list(shape[-inner:])
        w, b = draw(*normalized, seed=1), draw(*normalized, seed=2)
        for weight, bias in ((w, b), (w, None), (None, None)):
            yield x, normalized, weight, bias, 1e-5


def layer_norm_backwards():
    """Samples of the backward of a layer norm."""
    for x, normalized, weight, bias, eps in layer_norms():
        _, mean, rstd = aten.native_layer_norm(x, normalized, weight, bias, eps)
        grad = draw(*x.shape, seed=3)
        for mask in MASKS if bias is not None else [(True, weight is not None, False)]:
            yield grad, x, normalized, mean, rstd, weight, bias, mask


def rms_norms():
    """Samples of a root mean square norm: `x, normalized_shape, weight, eps`."""
    return [(x, n, w, e) for x, n, w, b, eps in layer_norms() if b is None for e in (eps, None)]


def rms_norm_backwards():
    """Samples of the backward of a root mean square norm."""
    for x, normalized, weight, eps in rms_norms():
        rstd = aten._fused_rms_norm(x, normalized, weight, eps)[1]
        for mask in ((True, True), (True, False)):
            if weight is not None or not mask[1]:
                yield draw(*x.shape, seed=3), x, normalized, rstd, weight, mask


BATCHES = [(4, 6), (5, 3, 2), (2, 4, 3, 1)]


def batch_norms(running: bool = True, stats: bool = True):
    """Samples of a batch norm: `x, weight, bias[, running_mean, running_var]`."""
    for shape in BATCHES:
        c = shape[1]
        w, b = draw(c, seed=1), draw(c, seed=2)
        known = (draw(c, seed=3), draw(c, seed=4).abs() + 1)
        for weight, bias in ((w, b), (None, None)):
            yield draw(*shape), weight, bias, *(known if running else (None, None)) * stats


def native_batch_norms():
    """Samples of `native_batch_norm`, which keeps its running statistics only when evaluating."""
    yield from [(*s, True, 0.25, 1e-5) for s in batch_norms(running=False)]
    yield from [(*s, False, 0.25, 1e-5) for s in batch_norms()]


def native_batch_norm_backwards():
    """Samples of the backward of a batch norm."""
    for x, w, b, m, v, training, _, eps in native_batch_norms():
        _, mean, invstd = aten.native_batch_norm(x, w, b, m, v, training, 0.25, eps)
        for mask in MASKS if w is not None else [(True, False, False)]:
            yield draw(*x.shape, seed=5), x, w, m, v, mean, invstd, training, eps, mask


def update_backwards():
    """Samples of the backward of a batch norm with a reserve."""
    for grad, x, w, m, v, mean, invstd, training, eps, mask in native_batch_norm_backwards():
        reserve = torch.empty(0, dtype=torch.uint8)
        if w is not None and training:
            yield grad, x, w, m, v, mean, invstd, True, eps, mask, reserve


def group_norms():
    """Samples of a group norm: `x, weight, bias, N, C, HxW, group, eps`."""
    for shape, group in (((4, 6, 3), 3), ((5, 8), 2), ((2, 3, 2, 2), 1), ((3, 5, 4), 5)):
        n, c, *rest = shape
        sizes = (n, c, torch.Size(rest).numel(), group)
        w, b = draw(c, seed=1), draw(c, seed=2)
        for weight, bias in ((w, b), (None, None)):
            yield draw(*shape), weight, bias, *sizes, 1e-5


def group_norm_backwards():
    """Samples of the backward of a group norm."""
    for x, w, b, *sizes, eps in group_norms():
        _, mean, rstd = aten.native_group_norm(x, w, b, *sizes, eps)
        for mask in MASKS if w is not None else [(True, False, False)]:
            yield draw(*x.shape, seed=3), x, mean, rstd, w, *sizes, mask


def likelihoods(shapes):
    """Samples of a likelihood loss: `x, target, weight, reduction, ignore_index`."""
    for shape in shapes:
        c = shape[min(1, len(shape) - 1)]
        at = [n for d, n in enumerate(shape) if d != min(1, len(shape) - 1)]
        target = torch.randint(0, c, at, generator=torch.Generator().manual_seed(0))
        for weight in (None, chances(c)):
            for reduction in (NONE, MEAN, SUM):
                for ignore in (-100, int(target.flatten()[0])):
                    if target.unique().numel() > 1 or ignore < 0:
                        yield -draw(*shape).abs(), target, weight, reduction, ignore


VECTORS = [(4, 6), (5, 3), (2, 4)]
IMAGES = [(2, 5, 3, 1), (4, 3, 2, 2)]


def likelihood_backwards(op, samples):
    """Samples of the backward of a likelihood loss."""
    for x, target, weight, reduction, ignore in samples:
        out, total = op(x, target, weight, reduction, ignore)
        yield draw(*out.shape, seed=7), x, target, weight, reduction, ignore, total


PAIRS = [((4, 6), (4, 6)), ((5, 3), (5, 3)), ((3,), (3,)), ((), ()), ((2, 1, 3), (2, 1, 3))]


def losses(*rest, pairs=PAIRS, of=draw):
    """Samples of a loss: `x, y, reduction, *rest`."""
    return [
        (of(*a), of(*b, seed=1), reduction, *rest)
        for a, b in pairs
        for reduction in (NONE, MEAN, SUM)
    ]


def loss_backwards(*rest, of=draw):
    """Samples of the backward of a loss: `grad, x, y, reduction, *rest`."""
    return [
        (draw(*(x.shape if s[0] == NONE else ()), seed=2), x, y, *s)
        for x, y, *s in losses(*rest, of=of)
    ]


def weighted(samples, at: int, *more):
    """The samples with no weight, and with one, before the argument number `at`."""
    for s in samples:
        for weight in (None, chances(*s[at - 1].shape, seed=3)):
            yield *s[:at], weight, *more, *s[at:]


BROADCAST = [*PAIRS, ((4, 6), (6,)), ((4, 1), (4, 6))]

SAMPLES = {
    aten.native_layer_norm.default: [*layer_norms()],
    aten.native_layer_norm_backward.default: [*layer_norm_backwards()],
    aten._fused_rms_norm.default: rms_norms(),
    aten._fused_rms_norm_backward.default: [*rms_norm_backwards()],
    aten.native_batch_norm.default: [*native_batch_norms()],
    aten._native_batch_norm_legit_functional.default: [
        (*s, training, 0.25, 1e-5) for s in batch_norms() for training in (True, False)
    ],
    aten._native_batch_norm_legit.no_stats: [
        (*s, True, 0.25, 1e-5) for s in batch_norms(stats=False)
    ],
    aten._batch_norm_with_update_functional.default: [
        (*s, 0.25, 1e-5) for s in batch_norms() if s[1] is not None
    ],
    aten._batch_norm_no_update.default: [
        (*s, 0.25, 1e-5) for s in batch_norms() if s[1] is not None
    ],
    aten.native_batch_norm_backward.default: [*native_batch_norm_backwards()],
    aten.batch_norm_backward.default: [*update_backwards()],
    aten.native_group_norm.default: [*group_norms()],
    aten.native_group_norm_backward.default: [*group_norm_backwards()],
    aten.nll_loss_forward.default: [*likelihoods([*VECTORS, (3,)])],
    aten.nll_loss2d_forward.default: [*likelihoods(IMAGES)],
    aten.nll_loss_backward.default: [
        *likelihood_backwards(aten.nll_loss_forward, likelihoods([*VECTORS, (3,)]))
    ],
    aten.nll_loss2d_backward.default: [
        *likelihood_backwards(aten.nll_loss2d_forward, likelihoods(IMAGES))
    ],
    aten.mse_loss.default: losses(pairs=BROADCAST),
    aten.smooth_l1_loss.default: losses(0.5, pairs=BROADCAST),
    aten.huber_loss.default: losses(0.5, pairs=BROADCAST),
    aten.soft_margin_loss.default: losses(),
    aten.binary_cross_entropy.default: [*weighted(losses(of=chances), 2)],
    aten.binary_cross_entropy_with_logits.default: [
        *weighted(losses(), 2, None),
        (draw(4, 6), chances(4, 6), None, chances(6), MEAN),
    ],
    aten.mse_loss_backward.default: loss_backwards(),
    aten.smooth_l1_loss_backward.default: loss_backwards(0.5),
    aten.huber_loss_backward.default: loss_backwards(0.5),
    aten.soft_margin_loss_backward.default: loss_backwards(),
    aten.binary_cross_entropy_backward.default: [*weighted(loss_backwards(of=chances), 3)],
}

NO_KERNEL = aten._fused_rms_norm_backward.default
"""Without a kernel on a CPU."""

DECOMPOSED = [op for op in SAMPLES if op in DECOMPOSITIONS and op is not NO_KERNEL]


@pytest.fixture(scope="module", autouse=True)
def kernel():
    """A CPU kernel for `NO_KERNEL`: its decomposition."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm_backward", DECOMPOSITIONS[NO_KERNEL].f, "CPU")
        yield


@pytest.mark.one_of("count")
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_every_row_holds_on_blocks(op, count):
    wrong = verify(op, SAMPLES[op], count=count)

    assert not wrong, "\n".join(map(str, wrong[:5]))


@pytest.mark.parametrize("op", [aten.mse_loss.default, aten.mse_loss_backward.default], ids=str)
def test_the_mean_over_two_axes_divides_by_the_full_number(op):
    assert not [*nested(op, SAMPLES[op][MEAN])]


@pytest.mark.parametrize("op", DECOMPOSED, ids=str)
def test_a_decomposition_gives_what_the_op_gives(op):
    assert not differences(op, SAMPLES[op])


def test_the_backward_of_a_root_mean_square_norm_is_its_gradient():
    x, w = draw(5, 3).requires_grad_(), draw(3, seed=1).requires_grad_()
    grad = draw(5, 3, seed=2)
    rstd = aten._fused_rms_norm(x, [3], w, 1e-5)[1]
    found = DECOMPOSITIONS[NO_KERNEL].f(grad, x, [3], rstd, w, (True, True))

    expected = torch.autograd.grad(F.rms_norm(x, [3], w, 1e-5), (x, w), grad)

    torch.testing.assert_close(tuple(found), expected)


def test_an_output_that_was_not_asked_for_has_no_placement():
    x = draw(4, 6)
    _, mean, rstd = aten.native_layer_norm(x, [6], x[0], None, 1e-5)
    sample = (x, x, [6], mean, rstd, x[0], None, (False, True, False))
    call, ins, outs = call_of(aten.native_layer_norm_backward.default, sample, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*ins, *outs)]

    rows = {str(row) for row in rows_of(call, types, 2)}

    assert "S(0) S(0) S(0) S(0) R -> P(sum)" in rows


PENDING = [
    (aten.native_layer_norm, "R P(sum) P(sum) -> P(sum) R R", "R P(sum) -> P(sum) R R"),
    (aten._fused_rms_norm, "R P(sum) -> P(sum) R"),
    (aten.native_group_norm, "R P(sum) P(sum) -> P(sum) R R"),
    (aten._native_batch_norm_legit_functional, "R P(sum) P(sum) R R -> P(sum) R R R R"),
    (aten.native_layer_norm_backward, "R R R R P(sum) R -> P(sum) R R"),
    (aten._fused_rms_norm_backward, "R R R P(sum) -> P(sum) R"),
    (aten.native_group_norm_backward, "R R R R P(sum) -> P(sum) R R"),
    (aten.native_batch_norm_backward, "R R P(sum) R R R R -> P(sum) R R"),
]


@pytest.mark.parametrize(("op", "wanted"), [(op.default, set(rows)) for op, *rows in PENDING])
def test_a_normalization_is_linear_in_weight_and_bias_together(op, wanted):
    found = set()
    for sample in SAMPLES[op]:
        call, ins, outs = call_of(op, sample, {})
        types = [Full(tuple(t.shape), t.dtype) for t in (*ins, *outs)]
        found |= {str(row) for row in rows_of(call, types, 2)}

    assert wanted <= found


def test_half_precision_keeps_the_types_of_the_kernel():
    x, w, b = draw(4, 6), draw(6, seed=1), draw(6, seed=2)
    for dtype, parameters in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        h, hw, hb = x.to(dtype), w.to(parameters), b.to(parameters)
        norm = (h, [6], hw, hb, 1e-5)
        _, mean, rstd = aten.native_layer_norm(*norm)
        back = (h, h, [6], mean, rstd, hw, hb, (True, True, True))
        group = (h, hw, hb, 4, 6, 1, 2, 1e-5)
        assert not differences(aten.native_layer_norm.default, [norm])
        assert not differences(aten.native_layer_norm_backward.default, [back])
        assert not differences(aten.native_group_norm.default, [group])
        batch = (h, hw, hb, True, 0.25, 1e-5)
        assert not differences(aten._native_batch_norm_legit.no_stats, [batch])


def test_a_decomposition_is_as_exact_as_the_kernel_far_from_zero():
    far = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)) + 1e3
    ones, zeros = torch.ones(6), torch.zeros(6)

    for op, sample in (
        (aten.native_layer_norm.default, (far, [6], ones, zeros, 1e-5)),
        (aten._native_batch_norm_legit.no_stats, (far, ones, zeros, True, 0.1, 1e-5)),
        (aten.native_group_norm.default, (far, ones, zeros, 8, 6, 1, 2, 1e-5)),
    ):
        assert not differences(op, [sample], 1e-3)


def test_running_statistics_that_are_views_are_refused():
    """Functionalization does not see that batch norm writes to them."""
    comm = SimulatedComm(Mesh(x=2))
    x, stats = torch.randn(4, 3), torch.zeros(2, 3)
    given = [distribute(t, Mesh(x=2).layout(), comm) for t in (x, stats)]

    def f(x, stats):
        F.batch_norm(x, stats[0], stats[1], training=True)
        return stats

    with pytest.raises(TraceError, match="running statistics that are views"):
        spmd(f)(*given)
    stacked = distribute(torch.zeros(2, 3), Mesh(x=2).layout(), comm)

    def of_each(x, mean, var):
        F.batch_norm(x, mean, var, training=True)
        return mean

    with pytest.raises(TraceError, match="running statistics that are views"):
        spmd(torch.vmap(of_each))(
            distribute(torch.randn(2, 4, 3), Mesh(x=2).layout(), comm), stacked, stacked
        )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "name",
    [
        *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "l1_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    ],
)
def test_a_loss_of_no_elements_is_that_of_torch_on_any_blocks(name, reduction):
    mesh, x = Mesh(x=2), torch.ones(0, 3)
    loss = functools.partial(getattr(torch.nn.functional, name), reduction=reduction)
    for cut in (("x",), (None, "x")):
        y = distribute(x, mesh.layout(*cut), SimulatedComm(mesh))
        for choice in ("follow", "cheapest"):
            got = spmd(loss, choice=choice)(y, y).full()
            assert torch.equal(got.nan_to_num(7), loss(x, x).nan_to_num(7))
