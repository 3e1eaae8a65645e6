"""`spmd(f, donate=...)`: arguments that a call frees where it has read them last."""

import gc
import weakref

import pytest
import torch

from fdtensor import FdtensorError, Mesh, SimulatedComm, connect, distribute, random, spmd, trace
from fdtensor.errors import TraceError
from fdtensor.runtime.local_program import local_program
from fdtensor.runtime.source import written

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)


def stepped(params, x, *, rate=0.5):
    return {name: p - rate * x.sum() for name, p in params.items()}, x.sum()


def params_of(comm=COMM):
    layout = comm.mesh.layout("x")
    return {name: distribute(torch.arange(4.0) + i, layout, comm) for i, name in enumerate("ab")}


X = distribute(torch.ones(2), MESH.layout(), COMM)


@pytest.mark.parametrize("donate", ["params", 0, ("params",), [0], ("params", "x")])
def test_results_are_those_without(donate):
    wanted, _ = spmd(stepped)(params_of(), X)
    x = distribute(torch.ones(2), MESH.layout(), COMM)
    got, _ = spmd(stepped, donate=donate)(params_of(), x)
    assert all(torch.equal(got[name].full(), wanted[name].full()) for name in wanted)


def test_what_was_donated_cannot_be_read():
    step, params = spmd(stepped, donate="params"), params_of()
    step(params, X)
    for read in (lambda: params["a"].full(), lambda: params["a"] + 1, lambda: step(params, X)):
        with pytest.raises(FdtensorError) as error:
            read()
        assert error.value.sentence.startswith("this DTensor was donated to ")
    assert X.full().tolist() == [1, 1]
    assert params["a"].shape == (4,)


def test_it_may_be_donated_again_and_again():
    step, params = spmd(stepped, donate="params"), params_of()
    for _ in range(3):
        params, _ = step(params, X)
    assert params["a"].full().tolist() == [-3, -2, -1, 0]


def test_a_look_at_the_program_frees_nothing():
    step, params = spmd(stepped, donate="params"), params_of()
    step.trace(params, X)
    assert params["a"].full().tolist() == [0, 1, 2, 3]


def test_mistakes_are_told():
    with pytest.raises(TraceError, match="donate names argument 'weights', which was not given"):
        spmd(stepped, donate="weights")(params_of(), X)
    x = distribute(torch.ones(2, requires_grad=True), MESH.layout(), COMM)
    with pytest.raises(TraceError, match="is given tensors that require grad, and frees"):
        spmd(stepped, donate="params")(params_of(), x)


def test_with_a_key_too():
    def noisy(p, x):
        return p + torch.rand_like(p) * x.sum()

    p = distribute(torch.zeros(4), MESH.layout("x"), COMM)
    q = distribute(torch.zeros(4), MESH.layout("x"), COMM)
    plain, donated = spmd(noisy), spmd(noisy, donate="p")
    assert torch.equal(
        plain(p, X, key=random.key(3)).full(), donated(q, X, key=random.key(3)).full()
    )
    with pytest.raises(FdtensorError, match="was donated"):
        q.full()


def test_a_rank_drops_each_where_it_is_read_last():
    program = trace(lambda a, b, c: (a * 2).exp() + b, *[X.type] * 3)
    source, _ = written(local_program(program, 0, None), None, (), donated=frozenset({0, 2}))
    lines = [line.strip() for line in source.splitlines()]
    assert lines[1:4] == ["(v0, v1, v2,) = values", "values.clear()", "del v2"]
    assert lines[5] == "del v0"
    assert not any(line.startswith("del") and "v1" in line for line in lines)


def owner_of_memory():
    """What happens to the memory of arguments on a rank, with others in it and without."""
    comm = connect(Mesh(x=4))
    layout = comm.mesh.layout("x")
    step = spmd(lambda p, q: ((p * 2 + 1).exp(), q * 3), donate=("p", "q"))
    told = []

    def given():
        return [distribute(torch.arange(8.0) + i, layout, comm) for i in range(2)]

    for hold in (lambda t: None, lambda t: t, lambda t: t[:1], lambda t: t.numpy()):
        p, q = given()
        held, refs = hold(p.local), [weakref.ref(p.local), weakref.ref(q.local)]
        before = None if held is None else held.copy() if hasattr(held, "copy") else held.clone()
        places = [p.local.data_ptr(), q.local.data_ptr()]
        a, b = step(p, q)
        wanted = [
            (x.full() * 2 + 1).exp() if i == 0 else x.full() * 3 for i, x in enumerate(given())
        ]
        assert torch.equal(a.full(), wanted[0])
        assert torch.equal(b.full(), wanted[1])
        assert before is None or bool((held == before).all())
        gc.collect()
        same = [x.local.data_ptr() == place for x, place in zip((a, b), places, strict=True)]
        told.append((same, [ref() is not None for ref in refs]))
    return told


@pytest.mark.mesh
def test_real_ranks_take_the_memory_of_what_is_donated_if_nobody_else_is_in_it(pool4):
    for alone, held, viewed, as_numpy in pool4.run(owner_of_memory):
        assert alone[0] == [True, True]
        assert held == ([False, False], [True, False])
        assert viewed[0] == [False, False]
        assert as_numpy[0] == [False, False]
