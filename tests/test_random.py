"""Random numbers are those of JAX, and depend on the key and the place in the full tensor alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import random
from fdtensor.api import distribute
from fdtensor.errors import FdtensorError
from fdtensor.layout import TensorType
from fdtensor.mesh import Mesh
from fdtensor.random_bits import Places, filled
from fdtensor.simulator import SimulatedComm
from fdtensor.testing.strategies import types

VECTORS = np.load(Path(__file__).parent / "random_vectors.npz")
"""Made with jax 0.10.2 on CPU, in the default partitionable form of its Threefry."""

SEEDS = VECTORS["seeds"].tolist()
LOG_P = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
i32, i64 = torch.int32, torch.int64

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
    "permutation": lambda k: random.permutation(k, 100),
    "categorical": lambda k: random.categorical(k, LOG_P.expand(300, 4)),
}


@pytest.fixture(params=["ints", "tensor"])
def key_of(request):
    def make(seed):
        key = random.key(seed)
        return key if request.param == "ints" else key.tensor()

    return make


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", SEEDS)
def test_draws_are_those_of_jax(name, seed, key_of):
    assert (EXACT[name](key_of(seed)).numpy() == VECTORS[f"{name}{seed}"]).all()


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


def ulps(found, wanted):
    apart = np.abs(found.numpy().astype(np.float64) - wanted.astype(np.float64))
    return (apart / np.spacing(np.abs(wanted)).astype(np.float64)).max()


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_numbers_are_within_4_ulp_of_jax(seed, key_of):
    key = key_of(seed)
    assert ulps(random.normal(key, (2000,)), VECTORS[f"normal{seed}"]) <= 4
    half = random.normal(key, (33,), dtype=torch.float16)
    assert ulps(half, VECTORS[f"normal16_{seed}"]) <= 4
    cut = random.truncated_normal(key, -1.5, 2.0, (300,))
    assert ulps(cut, VECTORS[f"truncated{seed}"]) <= 4


def test_the_tails_of_a_million_are_within_4_ulp_of_jax():
    found = random.normal(random.key(3), (1 << 20,))
    for part in ("tail", "near"):
        assert ulps(found[VECTORS[f"{part}_index"]], VECTORS[part]) <= 4


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
    torch.float32: random.normal,
    torch.bfloat16: random.normal,
    torch.float64: random.uniform,
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


@pytest.mark.parametrize("bad", ["key(0.5)", "key(True)", "uniform(0, 3)", "normal(short, 3)"])
def test_what_is_no_key_is_refused(bad):
    with pytest.raises(FdtensorError, match=r"is not a (seed|key)"):
        eval(bad, {**vars(random), "short": torch.zeros(3, dtype=i64)})


def test_bad_input_is_told_in_one_sentence():
    key = random.key(0)
    with pytest.raises(FdtensorError, match=r"1\.5 is not a probability\."):
        random.dropout(key, torch.ones(3), 1.5)
    with pytest.raises(FdtensorError, match=r"uniform cannot draw i64\."):
        random.uniform(key, 3, dtype=i64)


def test_a_million_draws_are_uniform_normal_and_independent():
    from scipy import stats

    key, other = random.split(random.key(11))
    x, y = random.uniform(key, (10**6,)).numpy(), random.uniform(other, (10**6,)).numpy()
    assert stats.kstest(x, "uniform").pvalue > 1e-3
    assert stats.kstest(random.normal(key, (10**6,)).numpy(), "norm").pvalue > 1e-3
    for a, b in ((x, y), (x[1:], x[:-1]), (x[1024:], x[:-1024])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4e-3
    counts, _, _ = np.histogram2d(x, y, bins=32, range=((0, 1), (0, 1)))
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3
