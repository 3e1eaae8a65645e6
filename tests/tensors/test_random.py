"""Random numbers are those of JAX, and depend on the key and the place in the full tensor alone."""

import itertools
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fdtensor import Program, func, random, spmd, trace
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.random_bits import Places, filled
from fdtensor.ops.random_bits.floats import _nearest
from fdtensor.ops.random_bits.rounding import above, below, rounded
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import distribute
from fdtensor.testing.strategies import types

VECTORS = np.load(Path(__file__).parent / "random_vectors.npz")
"""Made with jax 0.10.2 on CPU, in the default partitionable form of its Threefry."""

SEEDS = VECTORS["seeds"].tolist()
LOG_P = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
PS64 = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
PS = PS64.float()
i16, i32, i64 = torch.int16, torch.int32, torch.int64
f32, f64, f16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

EXACT = {
    "bits32_": lambda k: random.bits(k, (3, 5, 7)),
    "bits64_": lambda k: random.bits(k, 33, dtype=torch.uint64),
    "bits16_": lambda k: random.bits(k, 33, dtype=torch.uint16),
    "bits8_": lambda k: random.bits(k, 33, dtype=torch.uint8),
    "uniform": lambda k: random.uniform(k, (200,)),
    "uniform64_": lambda k: random.uniform(k, (100,), dtype=torch.float64),
    "uniform16_": lambda k: random.uniform(k, (33,), dtype=torch.float16),
    "uniformab": lambda k: random.uniform(k, (100,), low=-3, high=7),
    "bernoulli": lambda k: random.bernoulli(k, 0.3, (300,)),
    "randint": lambda k: random.randint(k, (200,), -7, 1000, dtype=i32),
    "randintw": lambda k: random.randint(k, (200,), -(2**31), 2**31 - 2, dtype=i32),
    "randint8_": lambda k: random.randint(k, (100,), 0, 256, dtype=torch.uint8),
    "randint64_": lambda k: random.randint(k, (100,), -5, 10**15),
    "randint64s_": lambda k: random.randint(k, (100,), 0, 10),
    "randint64p_": lambda k: random.randint(k, (50,), -(2**40), 2**40),
    "randint64m_": lambda k: random.randint(k, (50,), -3, 2**33 + 7),
    "randint64w_": lambda k: random.randint(k, (50,), -(2**63), 2**63 - 2),
    "randintp_": lambda k: random.randint(k, (50,), -8, 8, dtype=i32),
    "randintn_": lambda k: random.randint(k, (50,), -100, 100, dtype=torch.int8),
    "randintu_": lambda k: random.randint(k, (50,), 5, 2**32 - 2, dtype=torch.uint32),
    "uniformb_": lambda k: random.uniform(k, (60,), dtype=bf16),
    "uniformabb_": lambda k: random.uniform(k, (60,), low=-3, high=7, dtype=bf16),
    "uniformabh_": lambda k: random.uniform(k, (60,), low=-3, high=7, dtype=f16),
    "bernoullip_": lambda k: random.bernoulli(k, PS, (40, 3)),
    "bernoullib_": lambda k: random.bernoulli(k, PS.to(bf16), (40, 3)),
    "bernoulli64_": lambda k: random.bernoulli(k, PS64, (40, 3)),
    "permutationx_": lambda k: random.permutation(k, torch.arange(60).view(5, 12), dim=1),
    "permutation": lambda k: random.permutation(k, 100),
    "categorical": lambda k: random.categorical(k, LOG_P.expand(300, 4)),
}


def by_key(draw, seed):
    return draw(random.key(seed))


def by_tensor(draw, seed):
    return draw(random.key(seed).tensor())


def by_vmap(draw, seed):
    keys = torch.stack([random.key(seed + 1 & 3).tensor(), random.key(seed).tensor()])
    return torch.func.vmap(draw)(keys)[1]


def by_graph(draw, seed):
    """By ops as `torch.export` and `fdtensor.trace` record them."""
    return make_fx(draw)(random.key(seed).tensor())(random.key(seed).tensor())


WAYS = {way.__name__: way for way in (by_key, by_tensor, by_vmap)}


@pytest.fixture(params=WAYS)
def drawn(request):
    return WAYS[request.param]


def bits_of(x):
    return x.view(torch.uint16) if x.dtype == bf16 else x


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", SEEDS)
def test_draws_are_those_of_jax(name, seed, drawn):
    assert (bits_of(drawn(EXACT[name], seed)).numpy() == VECTORS[f"{name}{seed}"]).all()


@pytest.mark.parametrize(
    "name", ["bits64_", "uniformabb_", "randint8_", "randint64m_", "categorical"]
)
def test_recorded_draws_are_those_of_jax(name):
    assert (bits_of(by_graph(EXACT[name], 42)).numpy() == VECTORS[f"{name}42"]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_are_those_of_jax(seed):
    key = random.key(seed)
    for made in (
        [k.tensor() for k in random.split(key, 5)],
        list(random.split(key.tensor(), 5)),
    ):
        assert (torch.stack(made).numpy() == VECTORS[f"split{seed}"]).all()
    for data, wanted in zip((0, 1, 7, 2**32 - 1), VECTORS[f"fold{seed}"], strict=True):
        assert random.fold_in(key, data).tensor().tolist() == wanted.tolist()
        assert random.fold_in(key.tensor(), data).tolist() == wanted.tolist()
        assert random.fold_in(key.tensor(), torch.tensor(data)).tolist() == wanted.tolist()
    assert random.key(-3).tensor().tolist() == VECTORS["keyneg"].tolist()
    assert random.key(0x1234567890ABCDEF).tensor().tolist() == VECTORS["key64"].tolist()


def ulps(found, wanted, least=0.0):
    """How far apart they are at most, in ulp of what is wanted, or of `least` if larger."""
    if found.dtype == bf16:
        wanted = torch.from_numpy(wanted.view(np.int16)).view(bf16).float().numpy()
    apart = np.abs(found.double().numpy() - wanted.astype(np.float64))
    size = np.maximum(np.abs(wanted), least).astype(wanted.dtype)
    coarser = 2.0**16 if found.dtype == bf16 else 1
    return (apart / np.spacing(size).astype(np.float64) / coarser).max()


NEAR = {
    "normal": lambda k: random.normal(k, (2000,)),
    "normal16_": lambda k: random.normal(k, (33,), dtype=f16),
    "normalb_": lambda k: random.normal(k, (60,), dtype=bf16),
    "truncated": lambda k: random.truncated_normal(k, -1.5, 2.0, (300,)),
    "exponential": lambda k: random.exponential(k, (60,)),
    "exponentialh_": lambda k: random.exponential(k, (60,), dtype=f16),
    "exponentialb_": lambda k: random.exponential(k, (60,), dtype=bf16),
}


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("seed", SEEDS)
def test_floats_are_within_4_ulp_of_jax(name, seed, drawn):
    assert ulps(drawn(NEAR[name], seed), VECTORS[f"{name}{seed}"]) <= 4


@pytest.mark.parametrize("name", ["normal", "normal16_", "exponential"])
def test_recorded_floats_are_those_that_are_drawn(name):
    assert torch.equal(by_graph(NEAR[name], 42), by_key(NEAR[name], 42))


@pytest.mark.parametrize("seed", SEEDS)
def test_gumbel_numbers_are_within_2_ulp_of_jax_or_of_1(seed, drawn):
    single = drawn(lambda k: random.gumbel(k, (60,)), seed)
    assert ulps(single, VECTORS[f"gumbel{seed}"], 1.0) <= 2
    double = drawn(lambda k: random.gumbel(k, (60,), dtype=f64), seed)
    assert ulps(double, VECTORS[f"gumbel64_{seed}"], 1.0) <= 2


DOUBLES = {
    "normal64_": (lambda k: random.normal(k, (60,), dtype=f64), (0.7, 0.97), 0, 4),
    "exponential64_": (lambda k: random.exponential(k, (60,), dtype=f64), (0.41, 0.56), 0, 4),
    "truncated64_": (
        lambda k: random.truncated_normal(k, -1.5, 2.0, (60,), dtype=f64),
        (0.7, 0.97),
        1,
        8,
    ),
}
"""How to draw, where the log1p of XLA is off by up to 1e-14, and how near they are elsewhere."""


@pytest.mark.parametrize("name", DOUBLES)
@pytest.mark.parametrize("seed", SEEDS)
def test_doubles_are_near_those_of_jax_where_its_logarithm_is_good(name, seed, drawn):
    draw, (start, stop), least, most = DOUBLES[name]
    found, wanted = drawn(draw, seed), VECTORS[f"{name}{seed}"]
    good = (np.abs(wanted) < start) | (np.abs(wanted) > stop)
    assert good.sum() > 40
    assert ulps(found[good], wanted[good], least) <= most
    assert ulps(found, wanted, 1.0) <= 64


@pytest.mark.parametrize(("dtype", "name"), [(f32, ""), (f64, "64")])
def test_the_tails_of_a_million_are_within_4_ulp_of_jax(dtype, name):
    found = random.normal(random.key(3), (1 << 20,), dtype=dtype)
    for part in (f"tail{name}", f"near{name}"):
        assert ulps(found[VECTORS[f"{part}_index"]], VECTORS[part]) <= 4


def test_double_normals_are_within_8_ulp_of_the_inverse_of_erf():
    from scipy import special

    key = random.key(5)
    u = 2 * random.uniform(key, (10**5,), dtype=f64).numpy() - (1 - 2.0**-53)
    found, inner = random.normal(key, (10**5,), dtype=f64), np.abs(u) < 0.7
    assert ulps(found[inner], np.sqrt(2) * special.erfinv(u[inner])) <= 8


@given(st.floats(), st.sampled_from([f32, f64, f16, bf16]))
def test_python_floats_round_as_tensors_do(x, dtype):
    assume(not np.isnan(x))
    held = torch.tensor(x, dtype=f64).to(dtype)
    if dtype in (f32, f64):  # torch takes others by way of float32, which rounds twice
        assert rounded(x, dtype) == held.item()
    x = held.item()
    if dtype != f16:  # torch has no nextafter
        ends = torch.tensor([inf, -inf], dtype=dtype)
        assert [above(x, dtype), below(x, dtype)] == torch.nextafter(held, ends).tolist()


def test_places_past_32_bits_have_the_bits_of_jax():
    places = Places((2**33,), (((2**32 - 8, 2**32 + 8),),))
    for key in (random.key(42), random.key(42).tensor()):
        found = filled(key, places, i32, 32, lambda bits: bits)
        assert (found.numpy().view(np.uint32) == VECTORS["past"]).all()
    rows = Places((2**31, 4), (((2**30 - 2, 2**30 + 2),), ((1, 2), (3, 4))))
    found = filled(random.key(42), rows, i32, 32, lambda bits: bits)
    wanted = VECTORS["past"].reshape(4, 4)[:, [1, 3]]
    assert (found.numpy().view(np.uint32) == wanted).all()


DRAWS = {
    f32: random.normal,
    bf16: random.normal,
    f16: random.exponential,
    f64: random.normal,
    torch.bool: lambda key, where, *comm, dtype=None: random.bernoulli(key, 0.3, where, *comm),
    torch.uint8: random.bits,
    i64: lambda key, where, *comm: random.randint(key, where, -3, 9, *comm),
}
any_type = st.sampled_from(list(DRAWS)).flatmap(lambda d: types(dtype=d, partial=False))


@given(any_type, st.integers(0, 2**64 - 1))
def test_a_layout_does_not_change_the_numbers(type, seed):
    draw = DRAWS[type.dtype]
    extra = {"dtype": type.dtype} if type.dtype != i64 else {}
    key, comm = random.key(seed), SimulatedComm(type.mesh)
    whole = draw(key, type.shape, **extra)
    found = draw(key, type, comm)
    assert found.type is type
    assert not comm.calls
    for rank, local in zip(type.mesh.order, found.local, strict=True):
        wanted = whole
        for d, index in enumerate(type.index(rank)):
            wanted = wanted.index_select(d, torch.tensor(list(index), dtype=i64))
        assert torch.equal(local, wanted)


@pytest.mark.parametrize("shape", [(70000,), (3, 40000), (300, 400), (40000, 3), (5, 7, 9000)])
def test_pieces_do_not_change_the_numbers(shape):
    key, mesh = random.key(7), Mesh(x=3)
    whole = random.normal(key.tensor(), shape)
    for d in range(len(shape)):
        type = TensorType(shape, torch.float32, mesh.layout(*[None] * d, "x"))
        found = random.normal(key, type, SimulatedComm(mesh))
        assert torch.equal(torch.cat(found.local, d), whole)


@given(types(dtype=torch.float64, partial=("sum", "avg", "max")), st.floats(0, 1))
def test_dropout_is_that_of_the_full_tensor(type, p):
    x, key = random.randint(random.key(1), type.shape, -9, 9).double(), random.key(2)
    found = random.dropout(key, distribute(x, type.layout, SimulatedComm(type.mesh)), p)
    torch.testing.assert_close(found.full(), random.dropout(key, x, p))


def test_permutation_of_a_type_is_that_of_the_whole():
    mesh = Mesh(x=3)
    type = TensorType((10,), i64, mesh.layout("x"))
    found = random.permutation(random.key(1), type, SimulatedComm(mesh)).full()
    assert torch.equal(found, random.permutation(random.key(1), 10))


@given(types(dtype=f64, partial=("sum", "max")), st.integers(0, 9))
def test_probabilities_are_taken_at_their_place(type, seed):
    key, comm = random.key(seed), SimulatedComm(type.mesh)
    p = random.uniform(random.key(seed + 1), type.shape, dtype=f64)
    settled = type.cotangent()
    whole = random.bernoulli(key, p)
    found = random.bernoulli(key, distribute(p, settled.layout, comm))
    assert found.layout == settled.layout
    assert not comm.calls
    assert torch.equal(found.full(), whole)
    bools = TensorType(type.shape, torch.bool, settled.layout)
    assert torch.equal(random.bernoulli(key, p, bools, comm).full(), whole)


def test_probabilities_are_broadcast():
    mesh, key, p = Mesh(x=3), random.key(2), torch.tensor([0.0, 0.25, 1.0, 0.5])
    whole = random.bernoulli(key, p, (500, 4))
    assert whole.float().mean(0).sub(p).abs().max() < 0.1
    spread = distribute(p, mesh.layout("x"), SimulatedComm(mesh))
    assert torch.equal(random.bernoulli(key, spread, (500, 4)).full(), whole)
    assert random.bernoulli(key, p).shape == (4,)


@settings(max_examples=30)
@given(types(dtype=i64, partial=("sum",)), st.data())
def test_a_permutation_of_a_dtensor_is_that_of_the_full_tensor(type, data):
    assume(type.shape)
    dim = data.draw(st.integers(-len(type.shape), len(type.shape) - 1))
    x, key = random.randint(random.key(1), type.shape, -9, 9), random.key(2)
    found = random.permutation(key, distribute(x, type.layout, SimulatedComm(type.mesh)), dim=dim)
    whole = random.permutation(key, x, dim=dim)
    assert torch.equal(found.full(), whole)
    if dim in (0, -len(type.shape)):
        assert torch.equal(whole, x[random.permutation(key, len(x))])


MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)
ROWS = TensorType((4,), f32, MESH.layout("x"))
PENDING = TensorType((4,), f32, MESH.layout(partial={"x": "sum"}))
FAR = TensorType((4,), f32, Mesh(y=4).layout("y"))
FLOATS = "Use one of: torch.float32, torch.float64, torch.float16, torch.bfloat16."
SHAPE = "Pass a tuple of ints, 0 or more, or a TensorType and a Comm."
MAKE = "Pass random.key(seed), or its .tensor(): two words in int64, of shape (2,)."
ORDERED = "Pass two numbers, the smaller one first."
DIMS = "Pass how many, a tensor with dims, or a TensorType of one dim and a Comm."
UNIT = "Pass a number from 0 to 1."

REFUSED = [
    ("key(0.5)", "0.5 is not a seed.", "Pass an int: random.key(0)."),
    ("key(True)", "True is not a seed.", "Pass an int: random.key(0)."),
    (
        "key(2**64)",
        "the seed 18446744073709551616 has more than 64 bits.",
        "Pass an int from -2**63 to 2**64 - 1.",
    ),
    (
        "Key(-1, 0)",
        "-1 is not a word of a key.",
        "Make keys by random.key(seed), split and fold_in.",
    ),
    ("uniform(7, 3)", "7 is not a key.", "Make one: random.key(seed); a seed is an int."),
    ("normal(zeros(3).long(), 3)", "a tensor of shape (3,) and torch.int64 is not a key.", MAKE),
    ("dropout(zeros(2), ones(3))", "a tensor of shape (2,) and torch.float32 is not a key.", MAKE),
    (
        "split(k, -1)",
        "a key cannot be split into num=-1.",
        "Pass how many keys you need, an int below 2**31.",
    ),
    ("fold_in(k, -1)", "-1 cannot be folded into a key.", "Pass an int from 0 to 2**32 - 1."),
    (
        "fold_in(k, arange(2)[1])",
        "a tensor of shape () and torch.int64 cannot be folded into this Key.",
        "Pass an int, or a 0-d integer tensor and the key as a tensor: key.tensor().",
    ),
    ("dropout(k, ones(3), 1.5)", "1.5 is not a probability.", UNIT),
    ("bernoulli(k, float('nan'))", "nan is not a probability.", UNIT),
    ("bernoulli(k, True)", "True is not a probability.", UNIT),
    ("bernoulli(k, ones(3) * -0.5)", "-0.5 is not a probability.", UNIT),
    ("bernoulli(k, arange(2))", "i64 cannot be probabilities.", "Pass floats from 0 to 1."),
    (
        "bernoulli(k, ones(3), (3, 2))",
        "probabilities of shape (3,) cannot be broadcast to (3, 2).",
        "Pass a shape that ends in theirs, or leave it out.",
    ),
    (
        "bernoulli(k, uniform(k, ROWS, COMM), ROWS, COMM)",
        "the result has the layout of p, (x=S(0)).",
        "Pass a plain shape, and redistribute p or the result.",
    ),
    ("bernoulli(k, 0.5, ROWS, COMM)", "bernoulli cannot draw f32.", "Use one of: torch.bool."),
    ("uniform(k, 3, dtype=arange(2).dtype)", "uniform cannot draw i64.", FLOATS),
    ("normal(k, 3, dtype='float32')", "normal cannot draw 'float32'.", FLOATS),
    (
        "uniform(k, ROWS, COMM, dtype=zeros(1).double().dtype)",
        "f32[4@x] is not of f64.",
        "Leave dtype out: the type says it.",
    ),
    ("uniform(k, 3, low=1, high=1)", "there is no number between 1 and 1.", ORDERED),
    ("uniform(k, 3, high='a')", "there is no number between 0.0 and 'a'.", ORDERED),
    (
        "uniform(k, 3, high=float('inf'))",
        "f32 cannot hold inf - 0.0.",
        "Use ends that are closer to each other, or a wider dtype.",
    ),
    ("truncated_normal(k, 2, 1)", "there is no number between 2 and 1.", ORDERED),
    (
        "randint(k, 3, 0.5, 2)",
        "0.5 and 2 are not the ends of a range of integers.",
        "Pass two ints.",
    ),
    (
        "randint(k, 3, 0, 300, dtype=zeros(1).byte().dtype)",
        "u8 has no integers from 0 up to, but without, 300.",
        "Let low be below high, both from 0 to 256.",
    ),
    ("uniform(k, (-3,))", "(-3,) is not a shape.", SHAPE),
    ("uniform(k, 2.5)", "2.5 is not a shape.", SHAPE),
    (
        "uniform(k, 3, COMM)",
        "a Comm goes with the type of a DTensor, not with 3.",
        "Pass TensorType(shape, dtype, layout) and the Comm.",
    ),
    (
        "uniform(k, ROWS)",
        "f32[4@x] is drawn on a Comm.",
        "Pass one: connect(mesh), or SimulatedComm(mesh).",
    ),
    (
        "normal(k, PENDING, COMM)",
        "f32[4]{sum:x} has pending terms, which cannot be drawn one by one.",
        "Draw type.cotangent(), and redistribute it.",
    ),
    (
        "normal(k, FAR, COMM)",
        "a draw uses rank 2, which this Comm does not have.",
        "Make the Comm of a mesh that contains all ranks of both meshes.",
    ),
    ("permutation(k, 2.5)", "2.5 cannot be permuted.", DIMS),
    (
        "permutation(k, zeros(2, 3), dim=2)",
        "dim 2 cannot be permuted in a tensor that has 2 dims.",
        "Pass one from -2 to 1.",
    ),
    (
        "permutation(k, ROWS, COMM)",
        "f32[4@x] is not the type of a permutation.",
        "Use one dim, and int64 or int32.",
    ),
    (
        "categorical(k, arange(3))",
        "i64 cannot be logits.",
        "Pass a tensor or DTensor of floats: log(p).",
    ),
    (
        "dropout(k, arange(3))",
        "i64 cannot be dropped and scaled.",
        "Pass a tensor or DTensor of floats.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "sentence", "hint"), REFUSED)
def test_bad_input_is_told_in_one_sentence(bad, sentence, hint):
    names = {"k": random.key(0), "zeros": torch.zeros, "ones": torch.ones, "arange": torch.arange}
    with pytest.raises(FdtensorError) as raised:
        eval(bad, {**globals(), **vars(random), **names})
    assert str(raised.value).splitlines()[0] == sentence
    assert raised.value.hint == hint


def streams(kind, count=4):
    """Keys that are related as closely as they can be."""
    key = random.key(11)
    match kind:
        case "split":
            return random.split(key, count)
        case "fold_in":
            return [random.fold_in(key, i) for i in range(count)]
        case "chain":
            return [key] + [key := random.split(key)[0] for _ in range(count - 1)]
        case _:
            return [random.key(11 + i) for i in range(count)]


@pytest.mark.parametrize("kind", ["split", "fold_in", "chain", "seeds"])
def test_streams_of_related_keys_are_independent(kind):
    """On a million draws each: correlation, and equal bits at the same place."""
    keys = streams(kind)
    drawn = np.stack([random.uniform(k, (10**6,)).numpy() for k in keys])
    assert np.abs(np.corrcoef(drawn) - np.eye(len(keys))).max() < 5e-3
    words = [random.bits(k, (10**6,)).numpy() for k in keys]
    for a, b in itertools.pairwise(words):
        differing = np.unpackbits((a ^ b).view(np.uint8)).reshape(-1, 32).mean(0)
        assert np.abs(differing - 0.5).max() < 2.5e-3


LAWS = {
    "uniform": (random.uniform, "uniform"),
    "normal": (random.normal, "norm"),
    "exponential": (random.exponential, "expon"),
    "gumbel": (random.gumbel, "gumbel_r"),
}


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("name", LAWS)
def test_a_million_draws_have_their_law_and_no_serial_correlation(name, dtype):
    from scipy import stats

    draw, law = LAWS[name]
    x = draw(random.key(11), (10**6,), dtype=dtype).double().numpy()
    assert stats.kstest(x, law).pvalue > 1e-3
    for lag in (1, 2, 3, 1024, 65536):
        assert abs(np.corrcoef(x[lag:], x[:-lag])[0, 1]) < 5e-3


def test_a_million_pairs_fill_the_square_evenly():
    from scipy import stats

    key, other = random.split(random.key(11))
    x, y = random.uniform(key, (10**6,)).numpy(), random.uniform(other, (10**6,)).numpy()
    for a, b in ((x, y), (x[::2], x[1::2]), (x[:-3], x[3:])):
        counts, _, _ = np.histogram2d(a, b, bins=32, range=((0, 1), (0, 1)))
        assert stats.chisquare(counts.ravel()).pvalue > 1e-3


def test_a_million_integers_and_choices_have_their_frequencies():
    from scipy import stats

    key = random.key(12)
    for high in (7, 16, 1000):
        counts = random.randint(key, (10**6,), 0, high).bincount(minlength=high)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    chosen = random.categorical(key, LOG_P.expand(10**6, 4)).bincount(minlength=4).numpy()
    assert stats.chisquare(chosen, 10**6 * np.array([0.1, 0.2, 0.3, 0.4])).pvalue > 1e-3
    firsts = [int(random.permutation(random.fold_in(key, i), 5)[0]) for i in range(2000)]
    assert stats.chisquare(np.bincount(firsts)).pvalue > 1e-3


@pytest.mark.parametrize("draw", ["uniform", "normal", "truncated", "randint", "dropout"])
def test_compiled_draws_have_the_same_bits(draw):
    """Traced whole by dynamo, and run by torch's own kernels."""
    f = {
        "uniform": lambda k: random.uniform(k, (99,), low=-1, high=3, dtype=bf16),
        "normal": lambda k: random.normal(k, (99,), dtype=f64),
        "truncated": lambda k: random.truncated_normal(k, -1, inf, (99,), dtype=f16),
        "randint": lambda k: random.randint(k, (99,), -3, 10**12),
        "dropout": lambda k: random.dropout(random.fold_in(k, 3), torch.ones(99), 0.3),
    }[draw]
    key = random.key(4).tensor()
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(key), f(key))


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_half_types_round_the_same_way_where_ops_are_recorded(dtype):
    x = random.normal(random.key(1), (4000,), dtype=f64) * 2.0 ** torch.arange(-30, 10).repeat(100)
    assert torch.equal(make_fx(lambda x: _nearest(x, dtype))(x)(x), _nearest(x, dtype))


KEYED = {
    "normal": lambda k: random.normal(k, (3,)),
    "split": lambda k: random.split(k, 3),
    "fold_in": lambda k: random.fold_in(k, 5),
    "of a part": lambda k: random.uniform(random.split(k)[1], (2,)),
    "permutation": lambda k: random.permutation(k, 7),
    "randint": lambda k: random.randint(k, (6,), 0, 9),
    "truncated": lambda k: random.truncated_normal(k, -1.0, 2.0, (5,), dtype=f64),
    "gumbel": lambda k: random.gumbel(k, (5,), dtype=bf16),
    "bits": lambda k: random.bits(k, (3, 2), dtype=torch.uint64),
}


@pytest.mark.parametrize("name", KEYED)
def test_a_key_may_be_a_dtensor_and_vmap_goes_over_many(name):
    comm = SimulatedComm(Mesh(x=2))
    keys = random.split(random.key(3).tensor(), 4)
    one = KEYED[name](distribute(keys[0], Mesh(x=2).layout(), comm))
    assert torch.equal(one.full(), KEYED[name](keys[0]))
    many = func.vmap(KEYED[name])(distribute(keys, Mesh(x=2).layout("x"), comm))
    assert torch.equal(many.full(), torch.stack([KEYED[name](k) for k in keys]))


def test_a_draw_is_one_op_of_a_program_without_traffic_or_checks():
    """By each of many keys too; splitting a key is a handful more."""
    mesh = Mesh(e=2, d=2, t=2)
    for dims, f in ((("e",), draws_of_many), ((), draws_of_one)):
        keys = TensorType((8, 2)[-1 - len(dims) :], i64, mesh.layout(*dims))
        program = trace(f, keys, choice="follow")
        assert program.received_bytes == 0
        ops = [str(eqn.op) for eqn in program.eqns]
        assert ops.count("fdtensor.draw.default") == 1
        assert len(ops) < 20
        assert Program.from_json(program.to_json()) == program


def draws_of_many(keys):
    return torch.func.vmap(lambda k: random.normal(k, (8, 32)))(keys)


def draws_of_one(key):
    return random.uniform(random.split(key)[1], (6,), low=-1.0)


def test_keys_are_carried_through_scans_loops_and_gradients():
    def f(key, w):
        def step(carry, _):
            key, new = random.split(carry[0])
            return (key, carry[1] + random.normal(new, (3,))), random.uniform(new, ())

        carry, ys = func.scan(step, (key, w), w)
        grad = torch.func.grad(lambda w, key: (random.normal(key, (3,)) * w).sum())
        return carry[1], ys, loop(key, w), grad(w, key), random.normal(random.key(2), (3,))

    def drawn(key, x):
        return random.fold_in(key, 1), x + random.normal(key, (3,))

    def small(_, x):
        return x.abs().sum() < 9

    def loop(key, x):
        if torch.compiler.is_compiling():
            return torch.while_loop(small, drawn, (key, x))[1]
        while small(key, x):
            key, x = drawn(key, x)
        return x

    comm = SimulatedComm(Mesh(x=2))
    key, w = random.key(3).tensor(), torch.tensor([0.25, -0.5, 0.125])
    given = (distribute(x, comm.mesh.layout(), comm) for x in (key, w))
    for out, wanted in zip(spmd(f)(*given), f(key, w), strict=True):
        torch.testing.assert_close(out.full(), wanted)


def test_a_dtensor_is_dropped_by_a_key_that_is_one():
    comm = SimulatedComm(Mesh(x=2))
    key, x = random.key(3).tensor(), torch.randn(4, 6)
    wide, cut = (
        distribute(key, Mesh(x=2).layout(), comm),
        distribute(x, Mesh(x=2).layout("x"), comm),
    )
    assert torch.equal(random.dropout(wide, cut).full(), random.dropout(key, x))
    assert torch.equal(random.categorical(wide, cut).full(), random.categorical(key, x))
    with pytest.raises(FdtensorError, match="by a key that every rank has"):
        random.normal(wide, TensorType((3,), f32, Mesh(x=2).layout()), comm)
    with pytest.raises(FdtensorError, match="folded"):
        random.fold_in(wide, -1)
