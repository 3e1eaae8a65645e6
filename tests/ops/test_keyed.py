"""Random ops of torch in traced functions: their numbers depend on the key and the place alone."""

import functools

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch import nn
from torch.utils.checkpoint import checkpoint

import fdtensor as fd
from fdtensor import (
    DTensor,
    Layout,
    Mesh,
    Shard,
    SimulatedComm,
    TensorType,
    TraceError,
    call,
    distribute,
    random,
    spmd,
    trace,
    verify,
)
from fdtensor.layouts.errors import FdtensorError
from fdtensor.ops.random_bits import split
from fdtensor.ops.random_bits.threefry import HASH
from fdtensor.ops.randomness import DRAW
from fdtensor.testing import assert_same_on_every_layout

ONE = Mesh(one=1)
ALONE = SimulatedComm(ONE)
SQUARE = Mesh(dp=2, tp=2)
COMM = SimulatedComm(SQUARE)
KEY = random.key(11)
SHAPE = (5, 6)


def _draws(x):
    """Every op that draws, in the shape of x or in one of its own."""
    p = torch.full_like(x, 0.3)
    return {
        "rand": torch.rand(4, 3),
        "randn": torch.randn(7),
        "randn complex": torch.randn(3, 2, dtype=torch.complex64),
        "rand half": torch.rand(4, 3, dtype=torch.bfloat16),
        "rand double": torch.rand(4, 3, dtype=torch.float64),
        "rand complex": torch.rand(2, dtype=torch.complex64),
        "normal": torch.normal(1.0, 2.0, (3, 3)),
        "normal each": torch.normal(p, p),
        "normal around": torch.normal(p, 2.0),
        "normal wide": torch.normal(2.0, p),
        "randint": torch.randint(-3, 9, (4, 4)),
        "randint 0": torch.randint(7, (2, 3), dtype=torch.int32),
        "randperm": torch.randperm(9),
        "rand_like": torch.rand_like(x),
        "randn_like": torch.randn_like(x),
        "randint_like": torch.randint_like(x, 2, 5),
        "randint_like 0": torch.randint_like(x, 5),
        "bernoulli": torch.bernoulli(p),
        "bernoulli p": torch.bernoulli(x, 0.4),
        "bernoulli each": x.clone().bernoulli_(p),
        "uniform_": x.clone().uniform_(-1, 2),
        "uniform_ point": x.clone().uniform_(2, 2),
        "normal_": x.clone().normal_(1, 2),
        "exponential_": x.clone().exponential_(2.0),
        "geometric_": x.clone().geometric_(0.3),
        "cauchy_": x.clone().cauchy_(),
        "log_normal_": x.clone().log_normal_(),
        "random_": torch.empty(5, dtype=torch.int64).random_(),
        "random_ half": torch.empty(5, dtype=torch.float16).random_(),
        "random_ to": torch.empty(5).random_(10),
        "random_ from": torch.empty(5, dtype=torch.uint8).random_(3, 10),
        "random_ bool": torch.empty(5, dtype=torch.bool).random_(),
        "dropout": F.dropout(x, 0.5),
        "dropout all": F.dropout(x, 1.0),
        "dropout none": F.dropout(x, 0.0),
        "dropout2d": F.dropout2d(x.reshape(1, 5, 6, 1), 0.5),
        "alpha dropout": F.alpha_dropout(x, 0.5, training=True),
        "feature alpha": F.feature_alpha_dropout(x, 0.5, training=True),
        "native": torch.native_dropout(x, 0.5, True),
        "rrelu": F.rrelu(x - 15, training=True),
        "gumbel": F.gumbel_softmax(x, hard=True).argmax(-1),
        "trunc": nn.init.trunc_normal_(torch.empty(3, 4)),
        "kaiming": nn.init.kaiming_uniform_(torch.empty(3, 4)),
        "xavier": nn.init.xavier_normal_(torch.empty(3, 4)),
        "sparse": nn.init.sparse_(torch.empty(4, 3), 0.5),
    }


X = torch.arange(30.0).reshape(SHAPE)


def alone(f, *args, key=KEY):
    """What a function of plain tensors gives on one rank, as plain tensors."""
    given = [distribute(x, ONE.layout(), ALONE) for x in args]
    return full(spmd(f)(*given, key=key))


def full(tree):
    if isinstance(tree, dict):
        return {name: full(part) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return [full(part) for part in tree]
    return tree.full()


def same(a, b):
    if isinstance(a, dict):
        assert list(a) == list(b)
        return all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


def test_numbers_do_not_know_how_they_are_sharded():
    count = max(4, settings.default.max_examples // 12)
    assert_same_on_every_layout(_draws, X, key=KEY, rtol=0, atol=0, max_examples=count)


def test_numbers_lie_as_results_are_asked_to_lie():
    wants = dict.fromkeys(_draws(X))
    wants |= {"rand": SQUARE.layout("dp", "tp"), "rand_like": SQUARE.layout(None, ("tp", "dp"))}
    wants["native"] = (SQUARE.layout(("tp", "dp")), None)
    found = spmd(_draws, out_layouts=wants)(distribute(X, SQUARE.layout(), COMM), key=KEY)
    assert found["rand"].layout == wants["rand"]
    assert found["native"][0].layout == wants["native"][0]
    assert same(full(found), alone(_draws, X))


def test_numbers_need_no_traffic_and_each_rank_draws_its_block():
    def f(x):
        return F.dropout(x, 0.5) + torch.rand_like(x)

    for dims in (("dp",), (None, "tp"), ("dp", "tp"), (("tp", "dp"),)):
        type = TensorType((8, 8), torch.float32, SQUARE.layout(*dims))
        program = trace(f, type, out_layouts=type.layout, key=KEY)
        assert program.received_bytes == 0
        drawn = [eqn for eqn in program.eqns if "draw" in str(eqn.op)]
        assert [program.type_of(eqn.outs[0]).layout for eqn in drawn] == [type.layout] * 2


@pytest.mark.parametrize("size", [(5, 6), (0, 3), (), (7,)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_row_of_the_draws_holds(size, count):
    kinds = [
        ("uniform", [-1.0, 2.0], torch.float64),
        ("normal", [], torch.float32),
        ("bernoulli", [0.3], torch.bool),
        ("bits", [], torch.int64),
    ]
    samples = [(KEY.tensor(), 4, kind, ends, list(size), dtype) for kind, ends, dtype in kinds]
    assert verify(DRAW, samples, count=count) == []


@pytest.mark.parametrize("size", [(5, 6), (0, 3), (), (7, 10_000)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_row_of_draws_by_many_keys_holds(size, count):
    keys = torch.stack([key.tensor() for key in split(KEY, 6)]).view(3, 2, 2)
    samples = [
        (keys, None, "truncated_normal", [-1.0, 2.0], list(size), torch.bfloat16),
        (keys[0], None, "gumbel", [], list(size), torch.float64),
        (keys[0, 0], None, "exponential", [], list(size), torch.float32),
    ]
    assert verify(DRAW, samples, count=count) == []


def test_every_row_of_hashes_holds():
    words = torch.randint(-(2**31), 2**31, (4, 3, 5), dtype=torch.int32)
    samples = [tuple(words), (words[0, 0], words[0, 1, 0], words[1], words[2, :, :1])]
    assert verify(HASH, samples) == []


LAWS = {
    "rand": (lambda n: torch.rand(n), "uniform", ()),
    "double": (lambda n: torch.rand(n, dtype=torch.float64), "uniform", ()),
    "randn": (lambda n: torch.randn(n), "norm", ()),
    "normal": (lambda n: torch.normal(2.0, 3.0, (n,)), "norm", (2, 3)),
    "complex": (lambda n: torch.randn(n, dtype=torch.complex64).imag, "norm", (0, 0.5**0.5)),
    "uniform_": (lambda n: torch.empty(n).uniform_(-1, 3), "uniform", (-1, 4)),
    "exponential_": (lambda n: torch.empty(n).exponential_(4.0), "expon", (0, 0.25)),
    "cauchy_": (lambda n: torch.empty(n).cauchy_(1.0, 2.0), "cauchy", (1, 2)),
    "log_normal_": (lambda n: torch.empty(n).log_normal_(0.5, 0.7).log(), "norm", (0.5, 0.7)),
    "trunc": (lambda n: nn.init.trunc_normal_(torch.empty(n)), "truncnorm", (-2, 2)),
    "rrelu": (
        lambda n: -F.rrelu(-torch.ones(n), 0.25, 0.75, training=True),
        "uniform",
        (0.25, 0.5),
    ),
}
COUNTS = {
    "bernoulli": (lambda n: torch.full((n,), 0.3).bernoulli(), [0.7, 0.3]),
    "dropout": (lambda n: F.dropout(torch.ones(n), 0.4) * 0.6, [0.4, 0.6]),
    "randint": (lambda n: torch.randint(5, (n,)), [0.2] * 5),
    "randperm": (lambda n: torch.randperm(n) // (n // 4), [0.25] * 4),
    "random_": (lambda n: torch.empty(n).random_(3, 7) - 3, [0.25] * 4),
    "bool": (lambda n: torch.empty(n, dtype=torch.bool).random_(), [0.5] * 2),
    "geometric_": (
        lambda n: torch.empty(n).geometric_(0.5).clamp(max=4) - 1,
        [0.5, 0.25, 0.125, 0.125],
    ),
    "multinomial": (
        lambda n: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), n, replacement=True),
        [0.25, 0, 0.75],
    ),
    "multinomial first": (
        lambda n: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]).expand(n, 3), 2)[:, 0],
        [0.25, 0, 0.75],
    ),
    "gumbel": (
        lambda n: F.gumbel_softmax(torch.tensor([1.0, 3.0]).log().expand(n, 2)).argmax(-1),
        [0.25, 0.75],
    ),
}


def sampled(f, n):
    return spmd(lambda _: f(n))(distribute(X, ONE.layout(), ALONE), key=KEY).full()


@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_distribution_of_the_op_that_they_stand_for(name):
    f, kind, args = LAWS[name]
    found = sampled(f, 20_000)
    assert scipy.stats.kstest(found.double().numpy(), kind, args).pvalue > 1e-3


@pytest.mark.parametrize("name", COUNTS)
def test_draws_are_as_frequent_as_those_of_the_op_that_they_stand_for(name):
    f, wanted = COUNTS[name]
    found = sampled(f, 20_000)
    counts = torch.bincount(found.float().round().long(), minlength=len(wanted))
    assert len(counts) == len(wanted)
    shares = torch.tensor(wanted, dtype=torch.float64) * found.numel()
    held = shares > 0
    assert (counts[~held] == 0).all()
    assert scipy.stats.chisquare(counts[held].numpy(), shares[held].numpy()).pvalue > 1e-3


def test_without_replacement_no_category_comes_twice():
    found = sampled(lambda n: torch.multinomial(torch.ones(n, 6), 6), 50)
    assert torch.equal(found.sort().values, torch.arange(6).expand(50, 6))


def test_each_op_has_a_stream_of_its_own_and_a_call_without_draws_takes_none():
    def f(x):
        return torch.rand(50), torch.rand(50), F.dropout(x, 0.0), torch.rand(50)

    a, b, _, c = alone(f, X)
    assert len({*a.tolist(), *b.tolist(), *c.tolist()}) == 150
    again = alone(lambda x: (torch.rand(50), torch.rand(50), torch.rand(50)), X)
    assert same([a, b, c], again)


def test_streams_are_not_those_of_split_keys():
    (found,) = alone(lambda x: [torch.rand(30)], X)
    for key in (KEY, *random.split(KEY, 4), *random.split(random.split(KEY)[0], 4)):
        assert not torch.equal(found, random.uniform(key, (30,)))


def test_other_keys_draw_other_numbers_with_the_same_program():
    function = spmd(lambda x: torch.rand_like(x))
    x = distribute(X, SQUARE.layout("dp"), COMM)
    found = [function(x, key=random.key(i)).full() for i in range(5)]
    assert len({tuple(f.flatten().tolist()) for f in found}) == 5
    assert len(function.keyed.programs) == 1
    for key in (KEY, KEY.tensor(), distribute(KEY.tensor(), SQUARE.layout(), COMM)):
        assert torch.equal(function(x, key=key).full(), alone(lambda x: torch.rand_like(x), X))


def test_a_function_with_an_argument_for_the_key_is_given_it():
    def f(x, key):
        return random.uniform(key, (3,)), torch.rand(3)

    mine, torchs = spmd(f)(distribute(X, SQUARE.layout("dp"), COMM), key=KEY)
    assert torch.equal(mine.full(), random.uniform(KEY, (3,)))
    assert same(torchs.full(), alone(lambda x: torch.rand(3), X))


def test_key_stays_the_name_of_what_is_no_random_key():
    x = torch.randn(2, 4, 8)
    d = distribute(x, SQUARE.layout("dp"), COMM)
    found = call(F.scaled_dot_product_attention, d, key=d, value=d)
    torch.testing.assert_close(found.full(), F.scaled_dot_product_attention(x, x, x))


def test_torchs_own_generator_stays_where_it_is():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    alone(_draws, X)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_in_the_function_draws_the_same_again():
    def f(x):
        found = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            found.append(torch.rand_like(x))
        return found

    a, b, c = alone(f, X)
    assert torch.equal(a, c)
    assert not torch.equal(a, b)


# --- derivatives -----------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.again = again
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = x + F.dropout(self.attention(x, x, x, need_weights=False)[0], 0.1)
        args = x, self.up.weight, self.up.bias, self.down.weight, self.down.bias
        return x + (checkpoint(mlp, *args, use_reentrant=False) if self.again else mlp(*args))


def mlp(x, up, b, down, c):
    return F.dropout(F.linear(F.dropout(F.gelu(F.linear(x, up, b)), 0.4), down, c), 0.2)


def _loss(model):
    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    return loss


def _batch(dims, comm):
    torch.manual_seed(0)
    model = Model().double()
    laid = comm.mesh.layout
    params = {n: distribute(p.detach(), laid(), comm) for n, p in model.named_parameters()}
    for n, d in dims.items():
        if n != "x":
            params[n] = params[n].redistribute(laid(*d))
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    return params, distribute(x, laid(*dims.get("x", ())), comm)


DIMS = [
    {"x": (None, ("tp", "dp"))},
    {"x": ("dp",), "up.weight": ("tp",), "up.bias": ("tp",), "down.weight": (None, "tp")},
    {"x": ("dp",), "attention.in_proj_weight": ("tp",), "attention.in_proj_bias": ("tp",)},
    {"x": (None, None, "tp"), "attention.out_proj.weight": (None, "dp")},
]


def valued(loss):
    """The loss and its gradients by autograd, which checkpoints allow."""

    def f(params, x):
        params = {n: p.detach().requires_grad_() for n, p in params.items()}
        value = loss(params, x)
        grads = torch.autograd.grad(value, list(params.values()))
        return value, dict(zip(params, grads, strict=True))

    return f


WANTED = functools.cache(
    lambda: full(spmd(valued(_loss(Model())))(*_batch({}, ALONE), key=KEY)),
)


@pytest.mark.few(4)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dims", DIMS)
def test_a_model_with_dropout_has_one_loss_and_one_gradient_under_every_layout(dims, again):
    value, grads = spmd(valued(_loss(Model(again))))(*_batch(dims, COMM), key=KEY)
    assert_close(value.full(), WANTED()[0])
    for name, grad in grads.items():
        assert_close(grad.full(), WANTED()[1][name])


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_backward_outside_gives_the_same_gradients(again):
    params, x = _batch(DIMS[1], COMM)
    params = {n: leaf_of(p) for n, p in params.items()}
    loss = spmd(_loss(Model(again)))(params, x, key=KEY)
    torch.autograd.backward(loss.local)
    assert_close(loss.full().detach(), WANTED()[0])
    for name, p in params.items():
        grad = DTensor(tuple(t.grad for t in p.local), p.type, p.comm)
        assert_close(grad.full(), WANTED()[1][name])


def leaf_of(x):
    return x.__class__(tuple(t.clone().requires_grad_() for t in x.local), x.type, x.comm)


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_the_numbers_that_were_drawn():
    """Against finite differences: a backward that drew again would give others."""
    for again in (False, True):
        model = Model(again).double().requires_grad_(False)
        x = torch.randn(2, 3, 8, dtype=torch.float64)
        step = torch.randn_like(x) * 1e-6

        def loss(x, model=model):
            return model(x).square().sum()

        up, down = alone(loss, x + step), alone(loss, x - step)
        (grad,) = alone(
            lambda x, loss=loss: valued(lambda p, _: loss(p["x"]))({"x": x}, 0)[1], x
        ).values()
        torch.testing.assert_close((up - down) / 2, (grad * step).sum(), rtol=1e-5, atol=1e-12)


def test_backward_outside_uses_the_numbers_of_the_forward():
    x = leaf_of(distribute(X, SQUARE.layout("dp"), COMM))
    out = spmd(lambda x: F.dropout(x, 0.5) * 3)(x, key=KEY)
    sum(t.sum() for t in out.local[::2]).backward()
    kept = alone(lambda x: F.dropout(torch.ones_like(x), 0.5), X) * 3
    found = x.local[0].grad + x.local[1].grad if x.local[1].grad is not None else x.local[0].grad
    torch.testing.assert_close(found, kept[:3])


def test_each_example_of_a_batch_has_its_numbers_under_vmap():
    x = distribute(torch.ones(8, 50), SQUARE.layout("dp"), COMM)
    for randomness, count in (("different", 8), ("same", 1)):
        f = torch.vmap(lambda row: F.dropout(row, 0.5), randomness=randomness)
        found = spmd(f)(x, key=KEY).full()
        assert len({tuple(row) for row in found.tolist()}) == count


# --- on replicated operands ------------------------------------------------------------------


def test_what_cannot_be_traced_draws_from_the_key_too():
    def f(x):
        return F.dropout(x[x > 3], 0.5) + torch.rand(26) + torch.empty(26).uniform_(2, 3)

    x = distribute(X, SQUARE.layout("dp", "tp"), COMM)
    wanted = call(f, distribute(X, ONE.layout(), ALONE), key=KEY).full()
    found = call(f, x, key=KEY)
    assert all(torch.equal(t, wanted) for t in found.local)
    with pytest.raises(TraceError) as error:
        call(f, x)
    assert str(error.value) == NO_KEY.format("aten.bernoulli_.float")


# --- mistakes --------------------------------------------------------------------------------


def test_ops_without_a_key_are_refused():
    x = distribute(X, SQUARE.layout("dp"), COMM)
    with pytest.raises(TraceError) as error:
        spmd(lambda x: F.dropout(x))(x)
    assert "F.dropout" in error.value.facts.pop("line")
    assert str(error.value) == NO_KEY.format("aten.bernoulli.p")
    with pytest.raises(TraceError) as error:
        spmd(torch.poisson)(x, key=KEY)
    assert "torch.poisson" in error.value.facts.pop("line")
    assert str(error.value) == NO_DRAWS
    with pytest.raises(TraceError) as error:
        spmd(lambda x: torch.rand(3, generator=torch.Generator()) + x[0, :3])(x, key=KEY)
    assert "torch.Generator()" in error.value.facts.pop("line")
    assert str(error.value) == GENERATOR


@pytest.mark.parametrize("key", [3, 0.5, None, "key", torch.zeros(3), torch.zeros(2)])
def test_what_is_no_key_is_refused(key):
    x = distribute(X, SQUARE.layout("dp"), COMM)
    with pytest.raises(FdtensorError, match="is not a key"):
        spmd(lambda x: F.dropout(x))(x, key=key)


OP_BY_OP = {
    "torch.nn.functional.dropout": lambda x: F.dropout(x),
    "torch.nn.functional.dropout ": nn.Dropout(),
    "torch.randn_like": torch.randn_like,
    "torch.bernoulli": torch.bernoulli,
    "torch.Tensor.bernoulli": lambda x: x.bernoulli(),
    "torch.normal": lambda x: torch.normal(x, 1.0),
    "torch.ops.aten.bernoulli.default": torch.ops.aten.bernoulli.default,
}


@pytest.mark.parametrize("name", OP_BY_OP)
def test_op_by_op_the_call_that_takes_a_key_is_advised(name):
    x = distribute(torch.rand(4, 4), SQUARE.layout("dp"), COMM)
    with pytest.raises(TraceError) as error:
        OP_BY_OP[name](x)
    advised = ADVISED.format(name.strip())
    assert error.value.hint == advised
    code = advised.removeprefix("Write ").partition(", or")[0].replace("...", "x")
    assert eval(code, {"fd": fd, "torch": torch, "random": random, "x": x}).shape == x.shape


def test_words_of_32_bits_are_those_of_64():
    key = random.key(-3)  # whose words are negative in int32
    x = distribute(X, SQUARE.layout("dp"), COMM)
    narrow = distribute(key.tensor().to(torch.int32), SQUARE.layout(), COMM)
    found = spmd(lambda x: torch.rand_like(x))(x, key=narrow)
    assert torch.equal(found.full(), alone(lambda x: torch.rand_like(x), X, key=key))


def test_no_placement_of_a_key_is_lost():
    x = distribute(X, SQUARE.layout("dp"), COMM)
    cut = distribute(KEY.tensor(), Layout(SQUARE, [Shard(0), Shard(0)]), COMM)
    found = spmd(lambda x: torch.rand_like(x))(x, key=cut)
    assert torch.equal(found.full(), alone(lambda x: torch.rand_like(x), X))


NO_KEY = """\
{} draws random numbers, and has no key to draw from.

Pass one in the call: key=random.key(0); or switch dropout off with eval(), and \
build modules outside, or on the meta device."""

ADVISED = (
    "Write fd.call({}, ..., key=random.key(0)), or call the function around it so; or switch "
    "dropout off with eval()."
)

NO_DRAWS = """\
aten.poisson.default draws random numbers, and nothing is known that draws them from a key.

Pass the numbers in as an argument, or switch dropout off with eval()."""

GENERATOR = """\
aten.rand.generator draws from a generator, and each rank would draw its own numbers.

Leave the generator out, and pass key=random.key(0) in the call."""
