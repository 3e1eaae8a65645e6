"""Pipelines on real ranks: the numbers of one process, and what travels while ranks compute."""

import pytest
import torch
import torch.distributed as dist

import fdtensor as fd
from fdtensor import Mesh, connect, distribute, optim, pipeline
from fdtensor.errors import CommError, FdtensorError

pytestmark = pytest.mark.mesh

WIDTH, BATCH = 8, 16
mse = torch.nn.functional.mse_loss


def stage(p, x):
    return torch.tanh(x @ p["w"]) @ p["v"] + p["b"]


def full_of(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (WIDTH, 2 * WIDTH), "v": (2 * WIDTH, WIDTH), "b": (WIDTH,)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def batch():
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in "xy"]


def expected(count, steps):
    """The losses of plain torch."""
    params, (x, y) = [full_of(i) for i in range(count)], batch()

    def loss(params):
        out = x
        for p in params:
            out = stage(p, out)
        return mse(out, y)

    losses = []
    for _ in range(steps):
        grads, value = torch.func.grad_and_value(loss)(params)
        losses.append(value.item())
        params = [
            {k: v - 0.1 * g[k] for k, v in p.items()} for p, g in zip(params, grads, strict=True)
        ]
    return losses


def meshes_of(kind):
    """Two places of two ranks, or four of one."""
    if kind == "four":
        return [Mesh.from_ranks([i], "dp") for i in range(4)]
    return [Mesh.from_ranks([2 * i, 2 * i + 1], kind) for i in range(2)]


def layouts(mesh, kind):
    match kind:
        case "tp":
            return {"w": mesh.layout(None, "tp"), "v": mesh.layout("tp"), "b": mesh.layout()}
        case "fsdp":
            return {"w": mesh.layout("fsdp"), "v": mesh.layout("fsdp"), "b": mesh.layout()}
        case _:
            return dict.fromkeys("wvb", mesh.layout())


def losses(kind, schedule, steps):
    """The losses of a few steps of gradient descent, on this rank."""
    comm = connect(Mesh(all=4))
    meshes = meshes_of(kind)
    meshes = meshes * 2 if schedule == "interleaved" else meshes
    params = []
    for i, mesh in enumerate(meshes):
        where = layouts(mesh, kind)
        params.append({k: distribute(v, where[k], comm) for k, v in full_of(i).items()})
    rows = [m.layout() if kind == "tp" else m.layout(m.axes[0]) for m in (meshes[0], meshes[-1])]
    x, y = (distribute(t, layout, comm) for t, layout in zip(batch(), rows, strict=True))
    parts = 4
    step = pipeline(
        [stage] * len(meshes), mse, meshes=meshes, microbatches=parts, schedule=schedule
    )
    opt = optim.SGD(lr=0.1)
    states = [opt.init(p) for p in params]
    values = []
    for _ in range(steps):
        grads, value = step(params, x, y)
        values.append(value.item())
        moved = [opt.step(p, g, s) for p, g, s in zip(params, grads, states, strict=True)]
        params, states = [m[0] for m in moved], [m[1] for m in moved]
    assert step.waited is not None
    return values


@pytest.mark.parametrize("kind", ["dp", "tp", "fsdp", "four"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_losses_are_those_of_one_process(pool4, kind, schedule):
    count = len(meshes_of(kind)) * (2 if schedule == "interleaved" else 1)
    known = expected(count, 3)
    for own in pool4.run(losses, kind, schedule, 3):
        assert own == pytest.approx(known, rel=1e-10)


def dropping(p, x):
    return torch.nn.functional.dropout(stage(p, x), 0.25)


def drawn(schedule, kind):
    """The loss of a step with dropout; the Comm is simulated where no process group is up."""
    comm = connect(Mesh(all=4))
    meshes = meshes_of("dp")
    params = [
        {k: distribute(v, m.layout(), comm) for k, v in full_of(i).items()}
        for i, m in enumerate(meshes)
    ]
    x, y = (distribute(t, m.layout("dp"), comm) for t, m in zip(batch(), meshes, strict=True))
    step = pipeline([dropping] * 2, mse, meshes=meshes, microbatches=4, schedule=schedule)
    values = []
    for k in range(2):
        own = k + (kind == "apart" and comm.rank == 3)
        try:
            _, value = step(params, x, y, key=fd.random.key(own))
        except CommError as error:
            return str(error).splitlines()[0]
        values.append(value.item())
    return values


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_is_drawn_is_the_same_on_real_ranks(pool4, schedule):
    known = drawn(schedule, "alike")
    for own in pool4.run(drawn, schedule, "alike"):
        assert own == pytest.approx(known, rel=1e-10)


def test_ranks_with_other_keys_are_told(pool4):
    told = pool4.run(drawn, "1f1b", "apart")
    assert all("this key" in text for text in told), told
    works_again(pool4)


def works_again(pool):
    """After an error the Comm computes as before."""
    for own in pool.run(losses, "dp", "1f1b", 1, timeout=180):
        assert own == pytest.approx(expected(2, 1), rel=1e-10)


def differs(what):
    """The error where rank 0 has another number of parts, or another number in its stage."""
    comm = connect(Mesh(all=4))
    meshes = meshes_of("dp")
    x, y = (distribute(t, m.layout("dp"), comm) for t, m in zip(batch(), meshes, strict=True))
    params = [
        {k: distribute(v, m.layout(), comm) for k, v in full_of(i).items()}
        for i, m in enumerate(meshes)
    ]
    parts = 4 if what == "parts" and comm.rank == 0 else 2
    factor = 3.5 if what == "factor" and comm.rank == 0 else 2.5
    scaled = lambda p, x: stage(p, x) * factor  # noqa: E731
    try:
        pipeline([scaled, stage], mse, meshes=meshes, microbatches=parts)(params, x, y)
    except CommError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(("what", "words"), [("parts", "rank 0"), ("factor", " 3.5 at call")])
def test_ranks_with_other_pipelines_are_told(pool4, what, words):
    for text in pool4.run(differs, what):
        assert "this pipeline" in text.splitlines()[0]
        assert words in text
    works_again(pool4)


def raises_on_one_rank():
    comm = connect(Mesh(all=4))
    meshes = meshes_of("dp")

    def failing(p, x):
        if comm.rank == 3:
            raise ValueError("on purpose")
        return stage(p, x)

    x, y = (distribute(t, m.layout("dp"), comm) for t, m in zip(batch(), meshes, strict=True))
    params = [
        {k: distribute(v, m.layout(), comm) for k, v in full_of(i).items()}
        for i, m in enumerate(meshes)
    ]
    try:
        pipeline([stage, failing], mse, meshes=meshes, microbatches=4)(params, x, y)
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    return "none", ""


def test_what_one_rank_raises_all_hear_of(pool4):
    told = pool4.run(raises_on_one_rank)
    works_again(pool4)
    assert told[3] == ("ValueError", "on purpose")
    assert all(name == "CommError" and "rank 3" in text for name, text in told[:3]), told


def with_an_index_out_of_range(kind):
    """What three steps give, of which the second one has an index that the first stage refuses."""
    comm, meshes = connect(Mesh(all=4)), meshes_of(kind)
    table = distribute(torch.ones(5, 4), meshes[0].layout(), comm)
    params = [table, *(distribute(torch.eye(4), m.layout(), comm) for m in meshes[1:])]
    stages = [lambda p, i: p[i], *[lambda p, x: x @ p] * (len(meshes) - 1)]
    step = pipeline(stages, mse, meshes=meshes, microbatches=4)
    y = distribute(torch.zeros(8, 4), meshes[-1].layout(), comm)
    told = []
    for index in (0, 9, 0):
        ids = torch.tensor([0, 0, 0, index, 0, 0, 0, 0])
        try:
            _, value = step(params, distribute(ids, meshes[0].layout(), comm), y)
            told.append(value.item())
        except FdtensorError as error:
            told.append((type(error).__name__, str(error).splitlines()[0]))
    return told


@pytest.mark.parametrize("kind", ["dp", "four"])
def test_all_ranks_hear_of_what_one_stage_refuses_and_go_on(pool4, kind):
    first, names = meshes_of(kind)[0].order, []
    for rank, told in enumerate(pool4.run(with_an_index_out_of_range, kind)):
        assert told[0] == told[2] == 1.0
        name, text = told[1]
        # of two ranks of the stage, one may hear of the error before it raises its own
        assert name == "CommError" or (name == "IndexRangeError" and rank in first)
        assert "index of index" in text or "rank" in text
        names.append(name)
    assert "IndexRangeError" in names


def with_one_wrong_call(who, fault):
    """What three steps give after a first one, where rank `who` calls the second one wrongly."""
    comm, meshes = connect(Mesh(all=4), timeout=10), meshes_of("dp")
    params = [distribute(torch.eye(4), m.layout(), comm) for m in meshes]
    ends = meshes[0], meshes[-1]
    x, y = (distribute(torch.ones(8, 4), m.layout("dp"), comm) for m in ends)
    twice = [distribute(torch.ones(16, 4), m.layout("dp"), comm) for m in ends]
    step, other = (
        pipeline([lambda w, x: x @ w] * 2, mse, meshes=meshes, microbatches=parts)
        for parts in (4, 2)
    )
    for known in (step, other):
        known(params, x, y)
    wrong = {
        "no tensor": lambda: step([*params[:1], 3], x, y),
        "plain": lambda: step(params, torch.ones(8, 4), y),
        "too few": lambda: step(params[:1], x, y),
        "no list": lambda: step(3, x, y),
        "another size": lambda: step(params, *twice),
        "another pipeline": lambda: other(params, x, y),
    }[fault]
    told = []
    for i in range(3):
        try:
            _, value = (wrong if comm.rank == who and i == 0 else lambda: step(params, x, y))()
            told.append(value.item())
        except FdtensorError as error:
            told.append(type(error).__name__)
    return told


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize(
    "fault", ["no tensor", "plain", "too few", "no list", "another size", "another pipeline"]
)
def test_after_a_wrong_call_of_one_rank_a_pipeline_goes_on(pool4, who, fault):
    for rank, (first, *rest) in enumerate(pool4.run(with_one_wrong_call, who, fault)):
        assert first == "CommError" or rank == who
        assert rest == [0.0, 0.0]


def by_hand(parts):
    """The loss and gradients of four stages as messages between processes, and their bytes."""
    rank, last, received = dist.get_rank(), 3, 0
    params = {k: v.requires_grad_() for k, v in full_of(rank).items()}
    x, y = ([t[i::parts] for i in range(parts)] for t in batch())
    kept, losses = [], []
    for i in range(parts):
        taken = x[i].clone()
        if rank:
            taken = torch.empty(BATCH // parts, WIDTH, dtype=torch.float64)
            dist.recv(taken, rank - 1)
            received += taken.nbytes
            taken.requires_grad_()
        out = stage(params, taken)
        if rank == last:
            out = mse(out, y[i]) / parts
            losses.append(out.item())
        else:
            dist.send(out.detach(), rank + 1)
        kept.append((taken, out))
    for taken, out in kept:
        cotangent = None
        if rank < last:
            cotangent = torch.empty_like(out)
            dist.recv(cotangent, rank + 1)
            received += cotangent.nbytes
        out.backward(cotangent)
        if rank:
            dist.send(taken.grad, rank - 1)
    return {k: v.grad for k, v in params.items()}, sum(losses), received


def by_pipeline(parts, schedule):
    """The same by a pipeline, and the bytes that it says this rank receives."""
    comm, meshes = connect(Mesh(all=4)), meshes_of("four")
    params = [
        {k: distribute(v, m.layout(), comm) for k, v in full_of(i).items()}
        for i, m in enumerate(meshes)
    ]
    ends = zip(batch(), (meshes[0], meshes[-1]), strict=True)
    x, y = (distribute(t, m.layout(), comm) for t, m in ends)
    step = pipeline([stage] * 4, mse, meshes=meshes, microbatches=parts, schedule=schedule)
    grads, value = step(params, x, y)
    nbytes = step.trace(params, x, y).received_bytes_on(meshes[comm.rank])
    return {k: g.local for k, g in grads[comm.rank].items()}, value.item(), nbytes


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pipeline_receives_what_hand_written_code_does(pool4, schedule):
    hands = pool4.run(by_hand, 4)
    ours = pool4.run(by_pipeline, 4, schedule)
    for (grads, _, received), (own, value, nbytes) in zip(hands, ours, strict=True):
        torch.testing.assert_close(own, grads)
        assert value == pytest.approx(hands[-1][1], rel=1e-12)
        assert nbytes == received
