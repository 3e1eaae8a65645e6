"""Pipelines: schedules are those of the papers, and a step is what one process computes."""

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor import Mesh, SimulatedComm, distribute, pipeline
from fdtensor.errors import (
    ArgumentError,
    CommError,
    FallbackWarning,
    FdtensorError,
    TraceError,
)
from fdtensor.parallel.pipelines.running import Prepared
from fdtensor.parallel.pipelines.schedules import schedule_of

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
mse = torch.nn.functional.mse_loss

# --- schedules -------------------------------------------------------------------------------


@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_bubbles_are_those_of_the_papers(name, count, each, times):
    each = each if name == "interleaved" else 1
    parts = times * count
    schedule = schedule_of(name, [*range(count)] * each, parts)
    work = {"zero_bubble": 3 * parts, "interleaved": each * parts}.get(name, parts)
    assert schedule.bubble == pytest.approx((count - 1) / (work + count - 1))


@given(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]), st.integers(1, 6), st.integers(1, 9))
def test_parts_in_flight(name, count, parts):
    held = schedule_of(name, range(count), parts).in_flight
    most = {
        "gpipe": [parts] * count,
        "1f1b": [min(parts, count - i) for i in range(count)],
        "zero_bubble": [min(parts, count)] * count,
    }
    assert list(held) == most[name]


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_every_action_runs_once_and_after_what_it_needs(name, count, each, times):
    each = each if name == "interleaved" else 1
    stages, parts = count * each, count * times
    schedule = schedule_of(name, [*range(count)] * each, parts)
    kinds = "FBW" if name == "zero_bubble" else "FB"
    assert len({s.action for s in schedule.slots}) == len(schedule.slots)
    assert len(schedule.slots) == stages * parts * len(kinds)
    stops = {slot.action: slot.stop for slot in schedule.slots}
    for slot in schedule.slots:
        assert all(stops[need] <= slot.start for need in slot.action.needs(stages))


def test_a_schedule_prints():
    text = str(schedule_of("1f1b", [0, 1], 4))
    assert text.splitlines() == [
        "1f1b: 2 stages on 2 meshes, 4 parts, 20 % of the time waiting",
        "  mesh 0  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -",
        "  mesh 1  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .",
    ]


# --- steps -----------------------------------------------------------------------------------


def linear(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def gated(p, x):
    return torch.nn.functional.silu(x @ p["w"]) * (x @ p["v"])


def normed(p, x):
    return torch.nn.functional.layer_norm(x, (WIDTH,), p["b"], p["b"])


def two(p, pair):
    x, gate = pair if isinstance(pair, tuple) else (pair, pair)
    return x @ p["w"], gate * p["b"]


def back(p, pair):
    x, gate = pair
    return x + gate * p["b"]


WIDTH = 4


def parameters(generator, *names):
    shapes = {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "b": (WIDTH,)}
    return {n: torch.randn(shapes[n], generator=generator, dtype=torch.float64) for n in names}


FUNCTIONS = {linear: "wb", gated: "wv", two: "wb", back: "b", normed: "b"}
CHAINS = [
    [linear, linear],
    [linear, gated],
    [two, back],
    [linear, gated, linear],
    [gated],
    [linear, normed],
]


def cut(mesh, layout, dims):
    """A layout of so many dims, of the kinds that people give parameters and data."""
    axis = mesh.axes[0]
    match layout:
        case "column" if dims == 2:
            return mesh.layout(None, axis)
        case "rows":
            return mesh.layout(axis)
        case _:
            return mesh.layout()


@given(
    st.sampled_from(CHAINS),
    st.sampled_from(SCHEDULES),
    st.sampled_from([1, 2]),
    st.sampled_from([(2, 2, 2), (1, 2, 1), (2, 1, 3)]),
    st.sampled_from(["whole", "rows", "column"]),
    st.sampled_from(["whole", "rows"]),
    st.sampled_from(["follow", "cheapest"]),
    st.integers(0, 9),
)
@settings(max_examples=40)
def test_a_step_gives_what_one_process_gives(
    chain, name, times, sizes, of_parameters, of_data, choice, seed
):
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes[: len(chain)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    meshes = [Mesh.from_ranks([*range(i, i + n)], "x") for i, n in zip(starts, sizes, strict=True)]
    if name == "interleaved" and chain != [two, back]:
        chain, meshes = chain * 2, meshes * 2
    comm = SimulatedComm(Mesh(all=sum(sizes)))
    full = [parameters(generator, *FUNCTIONS[f]) for f in chain]
    parts = len(sizes) * times
    x, y = (torch.randn(parts * 4, WIDTH, generator=generator).double() for _ in "xy")
    params = [
        {k: distribute(v, cut(m, of_parameters, v.ndim), comm) for k, v in p.items()}
        for p, m in zip(full, meshes, strict=True)
    ]
    data = [distribute(t, cut(m, of_data, 2), comm) for t, m in ((x, meshes[0]), (y, meshes[-1]))]
    step = pipeline(chain, mse, meshes=meshes, microbatches=parts, schedule=name, choice=choice)
    grads, value = step(params, *data)

    def whole(full):
        out = x
        for f, p in zip(chain, full, strict=True):
            out = f(p, out)
        return mse(out, y)

    expected, number = torch.func.grad_and_value(whole)(full)
    torch.testing.assert_close(value.full(), number)
    for own, p, theirs in zip(grads, params, expected, strict=True):
        for key, grad in theirs.items():
            torch.testing.assert_close(own[key].full(), grad)
            assert own[key].layout is p[key].layout


def simple(schedule="1f1b", microbatches=4, dtype=torch.float32, layout="rows", batch=8):
    meshes = [Mesh.from_ranks([0, 1], "x"), Mesh.from_ranks([2, 3], "x")]
    comm = SimulatedComm(Mesh(all=4))
    params = [
        {"w": distribute(torch.eye(WIDTH, dtype=dtype), cut(m, layout, 2), comm)} for m in meshes
    ]
    data = [distribute(torch.ones(batch, WIDTH, dtype=dtype), m.layout("x"), comm) for m in meshes]

    def stage(p, x):
        return x @ p["w"]

    step = pipeline(
        [stage, stage], mse, meshes=meshes, microbatches=microbatches, schedule=schedule
    )
    return step, params, data


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_parameters_are_gathered_once_and_gradients_reduced_once(schedule):
    bytes_of = []
    for microbatches in (2, 4):
        step, params, data = simple(schedule, microbatches)
        plans = step.trace(params, *data)
        bytes_of.append(plans.received_bytes)
        for stage in plans.stages:
            assert stage.prepare.program.received_bytes > 0
            assert stage.finish.received_bytes > 0
            each = [phase.program.received_bytes for phase in stage.phases.values()]
            assert sum(each) <= 4 * WIDTH  # what is reduced of a loss
    assert bytes_of[0] + 16 >= bytes_of[1]  # more parts send no more, but for losses


def test_half_precision_adds_up_in_float32():
    step, params, data = simple(dtype=torch.bfloat16)
    plans = step.trace(params, *data)
    assert {g.type.dtype for s in plans.stages for g in s.gradients} == {torch.float32}
    grads, _ = step(params, *data)
    assert grads[0]["w"].dtype == torch.bfloat16


def test_a_pipeline_prints_draws_and_tells_its_time():
    step, params, data = simple("zero_bubble")
    plans = step.trace(params, *data)
    text = str(plans)
    assert "to stage 1: " in text
    assert "a step on" in text
    assert plans.seconds == plans.schedule.seconds > 0
    assert "mesh 1" in fd.show(plans).text()
    assert "<svg" in fd.show(step.schedule).svg
    assert "W" in str(step.schedule)


def test_what_a_stage_reads_besides_its_arguments_makes_another_program():
    step, params, data = simple()
    scale = [1.0]

    def stage(p, x):
        return x @ p["w"] * scale[0]

    step = pipeline([stage, stage], mse, meshes=step.meshes, microbatches=2)
    _, before = step(params, *data)
    scale[0] = 3.0
    _, after = step(params, *data)
    assert before.item() == 0.0
    assert after.item() == 64.0


def test_settings_of_torch_make_another_program():
    step, params, data = simple()
    stage = lambda p, x: (x @ p["w"]) / 3  # noqa: E731
    step = pipeline([stage, stage], mse, meshes=step.meshes, microbatches=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = step.trace(params, *data)
        step(params, *data)
    outside = step.trace(params, *data)
    assert "bf16" in str(inside.stages[0].forward.program)
    assert "bf16" not in str(outside.stages[0].forward.program)
    assert len(step.known) == 2


def test_moves_of_rows_to_their_parts_are_counted():
    meshes = [Mesh.from_ranks([0, 1], "dp"), Mesh.from_ranks([2, 3], "dp")]
    comm = SimulatedComm(Mesh(all=4))
    x, y = (distribute(torch.ones(10, 4), m.layout("dp"), comm) for m in meshes)
    w = distribute(torch.tensor(1.0), meshes[1].layout(), comm)
    step = pipeline([lambda _, x: x, lambda w, x: x * w], mse, meshes=meshes, microbatches=2)
    plans = step.trace([{}, w], x, y)
    moved = [program.received_bytes for program in plans.split]
    assert moved == [16, 16]
    sent = sum(p.received_bytes for p in plans.sends[0].forward) * 2
    assert plans.received_bytes_on(meshes[0]) == moved[0]
    assert plans.received_bytes_on(meshes[1]) >= moved[1] + sent
    assert "parts of x: 16 B received per rank" in str(plans)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_parameters_are_gathered_again_for_each_use(schedule):
    meshes = [Mesh.from_ranks([0, 1], "dp"), Mesh.from_ranks([2, 3], "dp")]
    comm = SimulatedComm(Mesh(all=4))
    x, y = (distribute(torch.ones(8, 16), m.layout("dp"), comm) for m in meshes)
    params = [distribute(torch.eye(16) * 2, m.layout("dp"), comm) for m in meshes]
    steps = [
        pipeline(
            [lambda w, x: torch.sin(x @ w)] * 2,
            mse,
            meshes=meshes,
            microbatches=2,
            schedule=schedule,
            regather=regather,
        )
        for regather in (False, True)
    ]
    once, again = (step.trace(params, x, y) for step in steps)
    for stages in (once.stages, again.stages):
        counts = [len(p.collectives) for p in stages[1].programs.values()]
        assert counts[0] == (stages is once.stages)
    assert not again.stages[1].prepare.gives
    assert len(again.stages[1].forward.program.collectives) > len(
        once.stages[1].forward.program.collectives
    )
    for a, b in zip(*(step(params, x, y)[0] for step in steps), strict=True):
        assert torch.equal(a.full(), b.full())


def test_integers_and_python_values_pass_between_stages():
    meshes = [Mesh.from_ranks([0, 1], "x"), Mesh.from_ranks([2], "x")]
    comm = SimulatedComm(Mesh(all=3))

    def embed(p, ids):
        return {"h": p[ids], "ids": ids, "scale": 2}

    def head(p, x):
        return (x["h"] * x["scale"]) @ p, x["ids"]

    def loss(y, target):
        logits, ids = y
        return torch.nn.functional.cross_entropy(logits, target) + 0 * ids.sum()

    torch.manual_seed(0)
    full = [torch.randn(5, 3), torch.randn(3, 5)]
    ids, target = torch.randint(5, (8,)), torch.randint(5, (8,))
    params = [distribute(p, m.layout(), comm) for p, m in zip(full, meshes, strict=True)]
    step = pipeline([embed, head], loss, meshes=meshes, microbatches=2, schedule="gpipe")
    data = (
        distribute(ids, meshes[0].layout("x"), comm),
        distribute(target, meshes[1].layout(), comm),
    )
    grads, value = step(params, *data)
    expected, number = torch.func.grad_and_value(
        lambda p: loss(head(p[1], embed(p[0], ids)), target)
    )(full)
    torch.testing.assert_close(value.full(), number)
    for own, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(own.full(), theirs)


def test_parameters_without_gradients_and_stages_without_parameters():
    meshes = [Mesh.from_ranks([i], "x") for i in range(3)]
    comm = SimulatedComm(Mesh(all=3))
    eye = torch.eye(WIDTH)
    count = distribute(torch.tensor(3), meshes[0].layout(), comm)
    params = [
        {"w": distribute(eye, meshes[0].layout(), comm), "n": count},
        {},
        {"w": distribute(eye, meshes[2].layout(), comm)},
    ]
    stages = [lambda p, x: x @ p["w"] * p["n"], lambda p, x: x * 2, lambda p, x: x @ p["w"]]
    x, y = (distribute(torch.ones(4, WIDTH), m.layout(), comm) for m in (meshes[0], meshes[2]))
    step = pipeline(stages, mse, meshes=meshes, microbatches=2)
    grads, value = step(params, x, y)
    assert value.item() == 25.0
    assert grads[0]["n"] is None
    assert grads[1] == {}
    assert grads[0]["w"].full().sum() == 4 * 2 * 5 * 6 * WIDTH / WIDTH


# --- random numbers --------------------------------------------------------------------------


def dropping(p, x):
    return torch.nn.functional.dropout(x @ p["w"], 0.5)


def noisy(p, x, key):
    return x @ p["w"] + fd.random.normal(key, (x.shape[0], 1), dtype=x.dtype)


def of_some(y, target):
    return mse(torch.nn.functional.dropout(y, 0.25), target)


@given(
    st.lists(st.sampled_from([dropping, noisy, linear]), min_size=2, max_size=2),
    st.sampled_from([mse, of_some]),
    st.sampled_from(SCHEDULES),
    st.sampled_from(["whole", "rows", "column"]),
    st.integers(0, 9),
)
@settings(max_examples=20)
def test_each_part_draws_from_a_key_of_its_own(stages, loss, name, layout, seed):
    """What stages give for each part is what they give alone, for the key of the part."""
    generator, key = torch.Generator().manual_seed(seed), fd.random.key(seed)
    meshes = [Mesh.from_ranks([0, 1], "x"), Mesh.from_ranks([2, 3], "x")]
    stages, meshes = (stages * 2, meshes * 2) if name == "interleaved" else (stages, meshes)
    comm = SimulatedComm(Mesh(all=4))
    full = [parameters(generator, "w", "b") for _ in stages]
    x, y = (torch.randn(8, WIDTH, generator=generator).double() for _ in "xy")
    params = [
        {k: distribute(v, cut(m, layout, v.ndim), comm) for k, v in p.items()}
        for p, m in zip(full, meshes, strict=True)
    ]
    data = [distribute(t, m.layout("x"), comm) for t, m in ((x, meshes[0]), (y, meshes[-1]))]
    step = pipeline(stages, loss, meshes=meshes, microbatches=4, schedule=name)
    grads, value = step(params, *data, key=key)

    one = Mesh(x=1)
    whole = SimulatedComm(one)
    params = [
        {k: distribute(v, one.layout(), whole).detach().requires_grad_() for k, v in p.items()}
        for p in full
    ]
    total = 0.0
    for part in range(4):
        out, target = (distribute(t[part::4], one.layout(), whole) for t in (x, y))
        for i, f in enumerate(stages):
            own = fd.random.fold_in(fd.random.fold_in(key, i), part)
            if i < len(stages) - 1:
                out = fd.spmd(f)(params[i], out, key=own)
            else:
                out = fd.spmd(ending(f, loss))(params[i], out, target, key=own)
        (out / 4).backward()
        total += out.item() / 4
    torch.testing.assert_close(value.item(), total)
    for own, theirs in zip(grads, params, strict=True):
        for k, p in theirs.items():
            if p.grad is not None:
                torch.testing.assert_close(own[k].full(), p.grad.full())


def ending(f, loss):
    """The last stage with the loss; it has an argument `key` if the stage has one."""
    if f is noisy:
        return lambda p, x, target, key: loss(f(p, x, key), target)
    return lambda p, x, target: loss(f(p, x), target)


def test_what_draws_needs_a_key():
    step, params, data = simple()
    step = pipeline([dropping, dropping], mse, meshes=step.meshes, microbatches=2)
    with pytest.raises(TraceError, match="has no key to draw from"):
        step(params, *data)
    with pytest.raises(FdtensorError, match="3 is not a key"):
        step(params, *data, key=3)
    plans = step.trace(params, *data, key=fd.random.key(0))
    losses = [step(params, *data, key=fd.random.key(k).tensor())[1].item() for k in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert step.trace(params, *data, key=fd.random.key(5)) is plans


# --- mistakes --------------------------------------------------------------------------------


def test_mistakes_are_told():
    step, params, data = simple()
    meshes, stage = list(dict.fromkeys(step.meshes)), step.functions[False][0]
    with pytest.raises(TraceError, match="schedule='1f1' is no option"):
        pipeline([stage, stage], mse, meshes=meshes, microbatches=2, schedule="1f1")
    with pytest.raises(ArgumentError, match="pipeline has no argument 'shedule'"):
        pipeline([stage, stage], mse, meshes=meshes, microbatches=2, shedule="1f1b")
    with pytest.raises(TraceError, match="microbatches=0 is no number"):
        pipeline([stage, stage], mse, meshes=meshes, microbatches=0)
    with pytest.raises(TraceError, match="2 stages have 1 meshes"):
        pipeline([stage, stage], mse, meshes=meshes[:1], microbatches=2)
    with pytest.raises(TraceError, match="ranks in common"):
        pipeline([stage, stage], mse, meshes=[meshes[0], Mesh(y=2)], microbatches=2)
    with pytest.raises(TraceError, match="1f1b has one stage a mesh, not 4 on 2"):
        pipeline([stage] * 4, mse, meshes=meshes * 2, microbatches=2)
    with pytest.raises(TraceError, match="as many stages on each mesh: not 3 on 2"):
        pipeline([stage] * 3, mse, meshes=(meshes * 2)[:3], microbatches=4, schedule="interleaved")
    with pytest.raises(TraceError, match="3 is no loss of a pipeline"):
        pipeline([stage, stage], 3, meshes=meshes, microbatches=2)
    with pytest.raises(TraceError, match="takes 2 parts at a time"):
        pipeline([stage] * 4, mse, meshes=meshes * 2, microbatches=3, schedule="interleaved")
    with pytest.raises(TraceError, match="cannot be split into 3 parts"):
        pipeline([stage, stage], mse, meshes=meshes, microbatches=3)(params, *data)
    few = distribute(torch.ones(4), data[0].type.mesh.layout(), data[0].comm)
    with pytest.raises(TraceError, match="several numbers of rows") as refused:
        step(params, {"x": data[0], "few": few}, data[1])
    assert "x['few']: 4 rows" in str(refused.value)
    with pytest.raises(TraceError, match="params has 1 entries for 2 stages"):
        step(params[:1], *data)
    with pytest.raises(TraceError, match="on another mesh than its stage"):
        step(params[::-1], *data)
    with pytest.raises(CommError, match="takes DTensors on one Comm"):
        step(params, torch.ones(8, WIDTH), data[1])
    with pytest.raises(TraceError, match="is no one number"):
        pipeline([stage, stage], lambda y, t: y - t, meshes=meshes, microbatches=2)(params, *data)
    whole = [lambda p, x: (x @ p["w"]).long(), lambda p, x: x.float()]
    with pytest.raises(TraceError, match="has no derivative"):
        pipeline(whole, mse, meshes=meshes, microbatches=2)([params[0], {}], *data)


def test_buffers_of_a_batch_norm_may_be_among_the_parameters():
    """Of those of which torch takes no derivative the gradient is None, as of integers."""
    step, params, data = simple()
    meshes, stage = list(dict.fromkeys(step.meshes)), step.functions[False][0]
    norm = torch.nn.BatchNorm1d(WIDTH).eval()
    norm.running_var.mul_(3)
    named = {**norm.state_dict(), **dict(norm.named_parameters())}
    given = distribute({k: v.detach() for k, v in named.items()}, meshes[1].layout(), data[0].comm)

    def second(p, x):
        return torch.func.functional_call(norm, p, (x,))

    both = pipeline([stage, second], mse, meshes=meshes, microbatches=2)
    (_, own), value = both([params[0], given], *data)
    loss = mse(norm(torch.ones(8, WIDTH)), torch.ones(8, WIDTH))
    loss.backward()
    torch.testing.assert_close(value.full(), loss.detach())
    torch.testing.assert_close(own["weight"].full(), norm.weight.grad)
    assert {k for k, v in own.items() if v is None} == {*dict(norm.named_buffers())}


def test_no_gradient_of_a_pipeline_is_lost_in_silence():
    step, params, data = simple()
    meshes, stage = list(dict.fromkeys(step.meshes)), step.functions[False][0]
    linear = torch.nn.Linear(WIDTH, WIDTH)

    def of(first, loss=mse):
        return pipeline([first, stage], loss, meshes=meshes, microbatches=2)

    with pytest.raises(TraceError, match="closes over a tensor that requires grad"):
        of(lambda p, x: linear(stage(p, x)))(params, *data)
    with pytest.raises(TraceError, match="closes over a tensor that requires grad"):
        of(stage, lambda y, t: mse(y * linear.weight.sum(), t))(params, *data)
    of(lambda p, x: stage(p, x) * linear.weight.detach().sum())(params, *data)
    x = data[0].detach().requires_grad_()
    with pytest.warns(FallbackWarning, match="x requires grad"):
        step(params, x, data[1])
    step(params, x, data[1])


# --- messages --------------------------------------------------------------------------------


@given(st.sampled_from(SCHEDULES), st.integers(1, 3), st.integers(2, 4))
@settings(max_examples=20)
def test_ranks_begin_their_messages_in_one_order(name, times, count):
    each = 2 if name == "interleaved" else 1
    meshes = [Mesh.from_ranks([i], "x") for i in range(count)] * each
    comm = SimulatedComm(Mesh(all=count))
    params = [distribute(torch.ones(2, 2), m.layout(), comm) for m in meshes]
    step = pipeline(
        [lambda w, x: x @ w] * len(meshes),
        mse,
        meshes=meshes,
        microbatches=times * count,
        schedule=name,
    )
    x, y = (
        distribute(torch.ones(times * count, 2), m.layout(), comm) for m in (meshes[0], meshes[-1])
    )
    plans = step.trace(params, x, y)
    orders = []
    for rank in range(count):
        here = type("Here", (), {"rank": rank, "compiled": {}})()
        orders.append(Prepared(plans, here).messages)
    every = Prepared(plans, comm).messages
    for own in orders:
        assert own == [action for action in every if action in set(own)]
    assert optree.tree_leaves(orders)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_a_stage_does_not_read_has_a_gradient_of_zeros(schedule):
    meshes = [Mesh.from_ranks([0], "dp"), Mesh.from_ranks([1], "dp")]
    comm = SimulatedComm(Mesh(all=2))
    params = [
        {name: distribute(torch.ones(2, 2), mesh.layout(), comm) for name in "uw"}
        for mesh in meshes
    ]
    x, target = (distribute(torch.ones(4, 2), mesh.layout("dp"), comm) for mesh in meshes)
    stages = [lambda p, x: (x * 2, x @ p["w"]), lambda p, y: y[1] @ p["w"]]
    step = pipeline(stages, mse, meshes=meshes, microbatches=2, schedule=schedule)
    grads, _ = step(params, x, target)
    due = torch.func.grad(lambda w: mse(x.full() @ w @ torch.ones(2, 2), target.full()))
    assert torch.equal(grads[0]["w"].full(), due(torch.ones(2, 2)))
    assert [g["u"].full().count_nonzero().item() for g in grads] == [0, 0]
