"""`torch.distributions` in traced functions: torch's default checks of values are left out."""

import threading

import pytest
import torch
from torch import distributions as D

import fdtensor as fd

MESH = fd.Mesh(dp=2, tp=2)
COMM = fd.connect(MESH)
V = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) + 0.1
KEY = fd.random.key(0)

DENSITIES = {
    "normal": lambda v: D.Normal(v, 1.0).log_prob(v + 1),
    "categorical": lambda v: D.Categorical(logits=v).log_prob(v.argmax(-1)),
    "entropy": lambda v: D.Categorical(probs=v).entropy(),
    "bernoulli": lambda v: D.Bernoulli(logits=v).log_prob((v > 0.5).float()),
    "multivariate_normal": lambda v: D.MultivariateNormal(v, torch.eye(3)).log_prob(2 * v),
    "dirichlet": lambda v: D.Dirichlet(v).log_prob(v / v.sum(-1, keepdim=True)),
    "independent": lambda v: D.Independent(D.Normal(v, 1.0), 1).log_prob(v),
    "kl_divergence": lambda v: D.kl_divergence(D.Normal(v, 1.0), D.Normal(0.0, v)),
    "of_mixtures": lambda v: D.MixtureSameFamily(
        D.Categorical(logits=v), D.Normal(v, 1.0)
    ).log_prob(v[:, 0]),
}

DRAWS = {
    "normal": lambda v: D.Normal(v, 1.0).rsample(),
    "many": lambda v: D.Normal(v, 1.0).sample((5,)),
    "categorical": lambda v: D.Categorical(logits=v).sample(),
    "bernoulli": lambda v: D.Bernoulli(logits=v).sample(),
    "multivariate_normal": lambda v: D.MultivariateNormal(v, torch.eye(3)).rsample(),
    "uniform": lambda v: D.Uniform(v - 1, v + 1).rsample(),
    "laplace": lambda v: D.Laplace(v, 1.0).rsample(),
}


def laid(*dims):
    return fd.distribute(V, MESH.layout(*dims), COMM)


@pytest.mark.parametrize("f", DENSITIES.values(), ids=DENSITIES)
def test_a_density_is_that_of_one_process(f):
    x = laid("dp", "tp")
    for y in (fd.spmd(f)(x), fd.call(f, x)):
        torch.testing.assert_close(y.full(), f(V))
    assert fd.trace(f, x.type).out_types[0].shape == f(V).shape
    grad = fd.spmd(torch.func.grad(lambda v: f(v).sum()))(x)
    torch.testing.assert_close(grad.full(), torch.func.grad(lambda v: f(v).sum())(V))


@pytest.mark.parametrize("f", DRAWS.values(), ids=DRAWS)
def test_a_sample_depends_on_the_key_and_not_on_the_layout(f):
    one, other = (fd.spmd(f)(x, key=KEY) for x in (laid("dp"), laid(("tp", "dp"))))
    torch.testing.assert_close(one.full(), other.full())
    torch.testing.assert_close(fd.call(f, laid(None, "tp"), key=KEY).full(), one.full())


def test_checks_that_are_asked_for_are_refused_with_the_cure():
    with pytest.raises(fd.DataDependentError) as raised:
        fd.spmd(lambda v: D.Normal(v, 1.0, validate_args=True).log_prob(v))(laid("dp"))
    assert "if not" in raised.value.facts["inside"]
    assert raised.value.facts["inside"].startswith("torch/distributions/distribution.py:")
    assert raised.value.hint == (
        "Leave out validate_args=True: by default a distribution in a traced function checks no "
        "values."
    )


def validates():
    try:
        D.Normal(0.0, -1.0)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("default", [True, False])
def test_the_setting_of_torch_comes_back_also_after_an_error(default):
    before = validates()
    D.Distribution.set_default_validate_args(default)
    try:
        fd.spmd(DENSITIES["normal"])(laid("dp"))
        assert validates() is default
        with pytest.raises(fd.DataDependentError):
            fd.spmd(lambda v: v + D.Normal(v, 1.0).log_prob(v).sum().item())(laid("dp"))
        assert validates() is default
        threads = [
            threading.Thread(target=fd.trace, args=(f, laid("dp").type))
            for f in (*DENSITIES.values(),)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert validates() is default
    finally:
        D.Distribution.set_default_validate_args(before)
