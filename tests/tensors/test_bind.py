"""`bind`: what a module writes to its buffers comes out, or is refused by its name."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fdtensor as fd
from fdtensor.errors import FdtensorError, TraceError

MESH = fd.Mesh(dp=2, tp=2)
COMM = fd.connect(MESH)
X = torch.arange(24.0).reshape(4, 6).sin()


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


def laid(tensors, layout=None):
    held = {name: t.detach() for name, t in tensors}
    return fd.distribute(held, layout or MESH.layout(), COMM)


def tensors_of(module):
    return laid(module.named_parameters()), laid(module.named_buffers())


@pytest.mark.parametrize("options", [{}, {"out_layouts": MESH.layout("dp")}])
def test_a_call_that_updates_gives_what_the_module_would_hold(options):
    module = normed()
    params, buffers = tensors_of(module)
    buffers["1.running_mean"] = buffers["1.running_mean"].redistribute(MESH.layout("tp"))
    x = fd.distribute(X, MESH.layout("dp"), COMM)

    y, bound = fd.bind(module, {**params, **buffers}, **options).updated(x)
    again, bound = bound.updated(x)

    plain = copy.deepcopy(module)
    for out in (y, again):
        torch.testing.assert_close(out.full(), plain(X))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(bound.params[name].full(), buffer)
        assert bound.params[name].layout is buffers[name].layout
    assert not module[1].num_batches_tracked, "the module stays as it is"
    assert y.layout is MESH.layout("dp")


def test_a_call_that_updates_is_differentiable():
    module = normed()
    params, buffers = tensors_of(module)
    params = {name: p.requires_grad_() for name, p in params.items()}
    y, _ = fd.bind(module, {**params, **buffers}).updated(fd.distribute(X, MESH.layout(), COMM))
    y.square().sum().backward()
    module(X).square().sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(params[name].grad.full(), p.grad, atol=1e-4, rtol=1e-4)


def test_a_write_to_a_buffer_that_is_not_given_names_it():
    module = normed()
    params, _ = tensors_of(module)
    x = fd.distribute(X, MESH.layout("dp"), COMM)
    for f in (fd.bind(module, params), fd.spmd(module), lambda x: fd.call(module, x)):
        with pytest.raises(fd.TraceError) as raised:
            f(x)
        assert raised.value.sentence == (
            "Sequential writes to its own '1.num_batches_tracked', which the function closes over."
        )
        assert ".updated(x)" in raised.value.hint
        assert "test_bind.py:" in raised.value.facts["line"]
    module[1].num_batches_tracked = None
    with pytest.raises(fd.TraceError, match=r"its own '1.running_mean'"):
        fd.spmd(module)(x)


def test_what_is_lost_is_told_at_the_line_of_the_caller():
    module = normed()
    params, buffers = tensors_of(module)
    bound = fd.bind(module, {**params, **buffers})
    with pytest.warns(fd.FallbackWarning, match="num_batches_tracked") as told:
        bound(fd.distribute(X, MESH.layout("dp"), COMM))
    assert [one.filename for one in told] == [__file__]
    assert "functional_call(module, (params, buffers), (x,))" in str(told[0].message)


def test_a_module_in_a_transform_of_dtensors_says_where_it_goes():
    module = nn.Linear(6, 3)
    params, _ = tensors_of(module)

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).sum()

    x = fd.distribute(X, MESH.layout("dp"), COMM)
    with pytest.raises(fd.TraceError, match=r"is not an instance of torch\.Tensor") as raised:
        fd.grad(loss)(params, x)
    assert "write fd.spmd(torch.func.grad(f))" in raised.value.hint
    assert fd.spmd(torch.func.grad(loss))(params, x)["bias"].full().tolist() == [4.0] * 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_gives_the_same(copied):
    module = normed().eval()
    params, _ = tensors_of(module)
    bound = fd.bind(module, params, out_layouts=MESH.layout("dp"))
    x = fd.distribute(X, MESH.layout("dp"), COMM)
    other = copied(bound)
    own = fd.distribute(X, MESH.layout("dp"), next(iter(other.params.values())).comm)
    assert torch.equal(other(own).full(), bound(x).full())
    assert other(own).layout == bound(x).layout
    assert str(other) == str(bound)
    assert "Sequential" in str(other.trace(own))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, i):
        return self.head(torch.tanh(self.emb(i)))


def test_all_names_of_a_tied_parameter_may_be_given():
    module, i = Tied(), torch.arange(3)
    held = fd.distribute(module.emb.weight.detach(), MESH.layout("dp"), COMM).requires_grad_()
    other = fd.distribute(module.emb.weight.detach(), MESH.layout("dp"), COMM)
    own = fd.distribute(i, MESH.layout(), COMM)
    for names in (("emb.weight", "head.weight"), ("head.weight",), ("head.weight", "emb.weight")):
        bound = fd.bind(module, dict.fromkeys(names, held))
        assert [*bound.params] == ["emb.weight"]
        torch.testing.assert_close(bound(own).full(), module(i))
    bound(own).sum().backward()
    module(i).sum().backward()
    torch.testing.assert_close(held.grad.full(), module.emb.weight.grad)
    with pytest.raises(fd.errors.ValueTreeError) as error:
        fd.bind(module, {"emb.weight": held, "head.weight": other})
    assert str(error.value).startswith(
        "'emb.weight' and 'head.weight' are one tensor of the module, with two DTensors."
    )


class Recomputed(nn.Module):
    """A linear layer, some of which runs again for a derivative, after the module was called."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(6, 6), way

    def step(self, x, _=None):
        return self.linear(x).square(), None

    def forward(self, x):
        if self.way == "scan":
            return fd.scan(self.step, x, None, length=2)[0]
        inner = checkpoint(lambda x: self.step(x)[0], x, use_reentrant=False)
        return checkpoint(self.step, inner, use_reentrant=False)[0]


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("way", ["scan", "checkpoint"])
def test_what_runs_again_reads_the_parameters_that_were_given(way, transformed):
    module = Recomputed(way)
    given = {n: torch.randint(-2, 3, p.shape).float() for n, p in module.named_parameters()}
    plain = {n: t.clone().requires_grad_() for n, t in given.items()}
    x = torch.randint(-2, 3, (4, 6)).float()
    y = x
    for _ in range(2):
        y = nn.functional.linear(y, plain["linear.weight"], plain["linear.bias"]).square()
    y.sum().backward()
    params = laid(given.items())
    rows = fd.distribute(x, MESH.layout("dp"), COMM)
    if transformed:
        grads = fd.grad(lambda p: fd.bind(module, p)(rows).sum())(params)
    else:
        params = {n: t.requires_grad_() for n, t in params.items()}
        fd.bind(module, params)(rows).sum().backward()
        grads = {n: t.grad for n, t in params.items()}
    assert {n: t.full().tolist() for n, t in grads.items()} == {
        n: t.grad.tolist() for n, t in plain.items()
    }


def test_and_where_functional_call_put_others_there_it_is_refused():
    module = Recomputed("checkpoint")
    params = {n: t.requires_grad_() for n, t in laid(module.named_parameters()).items()}

    def f(params, x):
        return torch.func.functional_call(module, params, (x,)).sum()

    with pytest.raises(fd.TraceError, match="reads a parameter that it did not read before"):
        fd.spmd(f)(params, fd.distribute(X, MESH.layout("dp"), COMM))


def test_plain_parameters_are_refused_but_where_a_function_is_recorded():
    linear = nn.Linear(6, 3)
    with pytest.raises(fd.errors.ValueTreeError, match="2 of 2 parameters are no DTensors"):
        fd.bind(linear, dict(linear.named_parameters()))

    params, x = laid(linear.named_parameters()), fd.distribute(X, MESH.layout("dp"), COMM)
    inside = fd.spmd(lambda params, x: fd.bind(linear, params)(x))
    torch.testing.assert_close(inside(params, x).full(), linear(X))


RUNS: list[nn.Module] = []
"""Which module ran, each time."""


class Decoder(nn.Module):
    """A layer of attention to all before, whose keys and values are given and come back."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x, cache=None):
        RUNS.append(self)
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        return (q @ k.mT).softmax(-1) @ v, (k, v)


@pytest.mark.parametrize("dynamic", [{"cache": 1}, {1: 1}])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_decoder_with_a_cache_is_recorded_once_for_all_lengths(dynamic, by_name):
    torch.manual_seed(0)
    module, plain, x = Decoder(), Decoder(), torch.randn(2, 3, 6)
    plain.load_state_dict(module.state_dict())
    step = fd.bind(module, laid(module.named_parameters()), dynamic=dynamic)
    _, cache = step(fd.distribute(x, MESH.layout("dp"), COMM))
    _, full = plain(x)
    for i in range(4):
        new = torch.full((2, 1, 6), i / 4)
        token = fd.distribute(new, MESH.layout("dp"), COMM)
        out, cache = step(token, cache=cache) if by_name else step(token, cache)
        due, full = plain(new, full)
        torch.testing.assert_close(out.full(), due)
    assert RUNS.count(module) == 2, "the first tokens, and one more"


@pytest.mark.parametrize("name", [0, "x"])
def test_options_name_the_arguments_of_the_forward(name):
    module = nn.Linear(6, 6) if name == 0 else Decoder()
    params = laid(module.named_parameters(), MESH.layout("tp"))
    x = fd.distribute(torch.randn(2, 3, 6), MESH.layout("dp"), COMM)
    wanted = fd.like(name) if name == 0 else (fd.like(name), None)
    bound = fd.bind(module, params, out_layouts=wanted, donate=name)
    result = bound(x)
    assert (result if name == 0 else result[0]).layout is x.layout
    with pytest.raises(FdtensorError, match="this DTensor was donated"):
        x.full()
    assert pickle.loads(pickle.dumps(bound.function)).options == bound.function.options
    weights = fd.bind(nn.Linear(6, 6), laid(nn.Linear(6, 6).named_parameters()), donate="params")
    assert weights.function.options.donate == "params"


@pytest.mark.parametrize("dynamic", [{"kwargs": 1}, {"params_": 1}])
def test_names_of_arguments_that_the_forward_does_not_have_are_refused(dynamic):
    module = Decoder()
    step = fd.bind(module, laid(module.named_parameters()), dynamic=dynamic)
    with pytest.raises(TraceError, match="which the function does not have") as refused:
        step(fd.distribute(torch.randn(2, 3, 6), MESH.layout(), COMM))
    assert refused.value.facts["arguments"] == "params, x, cache"


def test_positions_that_the_forward_does_not_have_are_refused():
    module = Decoder()
    with pytest.raises(TraceError, match="name argument 2, which the module does not have"):
        fd.bind(module, laid(module.named_parameters()), dynamic={2: 1})
