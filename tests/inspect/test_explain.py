"""What `explain` says of programs, of two programs, and of plans."""

import re

import attrs
import pytest
import torch

from fdtensor import Mesh, TensorType, constrain, trace
from fdtensor.inspect.explanation import explain
from fdtensor.inspect.explanation.options import decisions
from fdtensor.layouts.errors import TraceError
from fdtensor.ops.graph import Var
from fdtensor.plans.cost import GLOO
from fdtensor.programs.regather import views_of_inputs
from tests.support.prices import nodes_of, price_of

MESH = Mesh(dp=2, tp=4)


def typed(shape, *dims, **partial):
    return TensorType(shape, torch.float32, MESH.layout(*dims, partial=partial))


def mlp(x, up, down):
    return torch.relu(x @ up) @ down


def megatron(**options):
    x, up, down = typed((8, 16), "dp"), typed((16, 64), None, "tp"), typed((64, 24), "tp")
    return trace(mlp, x, up, down, **options)


def softmax():
    return trace(lambda x: torch.softmax(x, -1), typed((64, 4096), "dp", "tp"))


def twice(x, w):
    """The gather of `x` serves two, and so does the move of what they make."""
    a = torch.tanh(x @ w)
    return a.softmax(-1), (a * x).sum(0)


PROGRAMS = [
    megatron(),
    softmax(),
    trace(twice, typed((32, 64), "dp", "tp"), typed((64, 64), "tp")),
    trace(twice, typed((32, 64), "dp", tp="sum"), typed((64, 64), "dp"), regather=True),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_an_option_costs_more_is_what_the_whole_costs_more(program):
    for decision in decisions(program):
        least = whole(program, decision, decision.taken.option)
        for other in decision.others:
            more = other.seconds - decision.taken.seconds
            found = whole(program, decision, other.option) - least
            assert more == pytest.approx(found, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_options_that_are_told_are_those_that_the_choice_had(program):
    """Given all other axes, as it was made last: not only those before it."""
    for decision in decisions(program):
        choice = program.origin.choices[decision.axis]
        had = {id(option) for node in choice.problem.nodes for option in node.options}
        assert {id(p.option) for p in (decision.taken, *decision.others)} <= had
        taken, option = choice.calls[decision.call], decision.taken.option
        assert (option.ins, option.outs) == (taken.ins, taken.outs)
        assert decision.taken.compute == option.seconds


def whole(program, decision, option):
    """The seconds of a whole program on one axis with this option for the call of a decision."""
    graph = program.origin.graph
    again = views_of_inputs(graph) if program.origin.regather else ()
    nodes, price, picks = nodes_of(program, decision.axis)
    at = len(graph.inputs) + len(graph.constants) + decision.call
    options = [(o.ins, o.outs) for o in nodes[at].options]
    picks[at] = options.index((option.ins, option.outs))
    return price_of(nodes, picks, price, lambda v: Var(v) not in again)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_other_option_would_cost_less(program):
    for decision in decisions(program):
        assert all(other.seconds >= decision.taken.seconds - 1e-9 for other in decision.others)


def test_a_program_tells_its_moves_and_then_its_values():
    assert megatron().explain() == MEGATRON


def test_a_decomposition_is_told_as_one():
    assert softmax().explain() == SOFTMAX


def test_a_value_tells_all_rows_of_the_call_that_made_it():
    assert megatron().explain("g") == MOVED


def test_a_line_of_a_decomposition_tells_of_the_whole():
    text = softmax().explain("b")
    assert "b is a line of the decomposition that makes h" in text
    assert "S(1) -> S(1) by decomposition" in text


def test_an_input_and_a_constant_were_given():
    table = torch.ones(4)
    program = trace(lambda x: x * table, typed((8, 4), "dp"))
    a, b = program.inputs[0], program.constants[0][0]
    assert f"{a} is an input: its layout is given" in program.explain(str(a))
    assert f"{b} is a tensor that <lambda> closes over: replicated" in program.explain(str(b))


def test_a_pinned_value_says_so():
    program = trace(lambda x: constrain(x, MESH.layout("tp")).exp().sum(0), typed((8, 8), "dp"))
    pinned = next(eqn.ins[0] for eqn in program.eqns if "exp" in str(eqn.op))
    text = program.explain(str(pinned))
    assert f"{pinned} is pinned by constrain" in text
    assert "a is an input: its layout is given" in text


def test_an_output_says_who_chose_its_layout():
    assert "g is output 0, its layout chosen" in megatron().explain("g")
    asked = megatron(out_layouts=MESH.layout("dp"))
    assert "g is output 0, its layout asked for" in asked.explain("g")


def test_what_travels_together_is_one_move():
    def sums(x, y):
        return x.sum(0), y.sum(0)

    types = typed((64, 8), "dp"), typed((64, 4), "dp")
    program = trace(sums, *types, out_layouts=MESH.layout())
    lines = program.explain().splitlines()
    assert lines[2].startswith("1 move, ")
    assert re.search(r"  \w \w = .*reduce_op=sum.*\] \w \w .* -> output", lines[4])


@pytest.mark.parametrize("program", PROGRAMS[2:])
def test_the_most_expensive_move_is_told_first(program):
    title, _, *rows = program.explain().splitlines()[2:]
    spent = [float(re.findall(r"([\d.]+) us", row)[-1]) for row in rows[: int(title.split()[0])]]
    assert spent == sorted(spent, reverse=True)
    assert spent[0] > spent[-1]


def test_a_program_that_sends_nothing_says_so():
    program = trace(torch.exp, typed((8, 8), "dp"), out_layouts=MESH.layout("dp"))
    assert "nothing is sent" in program.explain()


def test_a_program_without_choices_still_tells_its_moves():
    program = attrs.evolve(megatron(), origin=None)
    text = program.explain()
    assert "g = reduce_scatter" in text
    assert text.endswith("what the layouts were chosen from is not known: it was not traced here")
    assert program.explain("f").endswith(
        "is not known to be chosen: the program was not traced here"
    )


def test_a_name_that_the_program_lacks():
    with pytest.raises(TraceError) as caught:
        megatron().explain("zz")
    assert str(caught.value) == NO_VALUE


def test_two_programs_side_by_side():
    assert explain(megatron(), megatron(out_layouts=MESH.layout("dp"))) == APART


def test_programs_of_two_functions_are_told_apart():
    def wider(x, up, down):
        return torch.relu(x @ up + 1) @ down

    types = typed((8, 16)), typed((16, 64), None, "tp"), typed((64, 24), "tp")
    text = explain(megatron(), trace(wider, *types))
    assert re.search(r"name +mlp +wider", text)
    assert "in 0  a:f32[8@dp,16]  a:f32[8,16]" in text


def test_equal_programs_are_equal():
    assert explain(megatron(), megatron()) == "mlp on Mesh(dp=2, tp=4): equal programs"


def test_values_made_in_other_layouts_are_named():
    first = trace(lambda x: x.exp().sin(), typed((64, 64), "dp", "tp"))
    second = trace(lambda x: x.exp().sin(), typed((64, 64), "tp", "dp"))
    text = explain(first, second)
    assert "2 values made in another layout\n  exp  b:f32[64@dp,64@tp]  b:f32[64@tp,64@dp]" in text


def test_a_plan_beside_the_ways_that_it_was_compared_with():
    assert explain(typed((8, 16), "dp", tp="sum"), MESH.layout(None, "tp")) == PLAN


def test_a_plan_that_sends_nothing():
    assert explain(typed((8, 8)), MESH.layout("dp")) == LOCAL


def test_a_program_has_a_cost_model_of_its_own():
    program = trace(torch.relu, TensorType((4,), torch.float32, Mesh(x=2).layout()))
    with pytest.raises(TraceError, match="by its own cost model"):
        explain(program, cost=GLOO)


def test_what_cannot_be_explained():
    with pytest.raises(TraceError) as caught:
        explain(megatron(), MESH.layout())
    assert str(caught.value) == REFUSED


MEGATRON = """\
mlp on Mesh(dp=2, tp=4)

1 move, 1.38 us, launches and latencies counted 1/16: the rest passes behind work
                                                              received  made by -> read by
  g = reduce_scatter[axis=tp dim=1 reduce_op=sum] f  1.38 us     288 B  mm -> output

3 calls with several rows
(seconds as the choice saw them; + is what the whole would take more)
                             compute    moves  received
  d:f32[8@dp,64@tp] = mm a b
    dp  S(0) R -> S(0)       0.00 us  0.00 us       0 B     taken
        R R -> R             0.00 us  0.88 us     256 B  +0.88 us
        P(sum) R -> P(sum)   0.00 us  0.89 us     256 B  +0.89 us
        R S(1) -> S(1)       0.00 us  1.76 us    1024 B  +1.76 us
    tp  R S(1) -> S(1)       0.00 us  0.00 us       0 B     taken
        R P(sum) -> P(sum)   0.01 us  1.41 us     768 B  +1.41 us
        R R -> R             0.01 us  1.46 us    3072 B  +1.47 us
        S(1) S(0) -> P(sum)  0.00 us  2.80 us    1536 B  +2.80 us
  e:f32[8@dp,64@tp] = relu d
    dp  S(0) -> S(0)         0.00 us  0.00 us       0 B     taken
        R -> R               0.00 us  0.88 us     256 B  +0.88 us
        P(max) -> P(max)     0.00 us  0.89 us     256 B  +0.89 us
        P(min) -> P(min)     0.00 us  0.89 us     256 B  +0.89 us
    tp  S(1) -> S(1)         0.00 us  0.00 us       0 B     taken
        R -> R               0.00 us  1.40 us     768 B  +1.40 us
        P(max) -> P(max)     0.00 us  1.40 us     768 B  +1.40 us
        P(min) -> P(min)     0.00 us  1.40 us     768 B  +1.40 us
  f:f32[8@dp,24]{sum:tp} = mm e c
    dp  S(0) R -> S(0)       0.00 us  1.38 us     288 B     taken
        R R -> R             0.00 us  2.27 us     544 B  +0.88 us
        R S(1) -> S(1)       0.00 us  2.28 us     640 B  +0.89 us
        P(sum) R -> P(sum)   0.00 us  2.40 us     672 B  +1.01 us
    tp  S(1) S(0) -> P(sum)  0.00 us  1.38 us     288 B     taken
        R P(sum) -> P(sum)   0.01 us  2.79 us    1056 B  +1.42 us
        R S(1) -> S(1)       0.00 us  2.81 us    1920 B  +1.42 us
        P(sum) R -> P(sum)   0.01 us  2.88 us    4896 B  +1.50 us

program.explain('d') has all rows of one value
the best possible by this cost model"""

SOFTMAX = """\
<lambda> on Mesh(dp=2, tp=4)

2 moves, 4.26 us, launches and latencies counted 1/16: the rest passes behind work
                                                    received  made by -> read by
  c = all_reduce[axis=tp reduce_op=max] b  2.13 us     192 B  amax -> sub.Tensor
  g = all_reduce[axis=tp reduce_op=sum] f  2.13 us     192 B  sum.dim_IntList -> div.Tensor

1 call with several rows
(seconds as the choice saw them; + is what the whole would take more)
                                       compute     moves  received
  h:f32[64@dp,4096@tp] = _softmax a -1 False
    dp  S(0) -> S(0)                   0.26 us   0.00 us       0 B     taken
        R -> R                         0.52 us   4.42 us   128 KiB  +4.68 us
    tp  S(1) -> S(1) by decomposition  5.31 us   0.00 us       0 B     taken
        S(0) -> S(0)                   0.26 us   8.58 us   192 KiB  +3.54 us
        R -> R                         1.05 us  12.52 us   384 KiB  +8.26 us

program.explain('h') has all rows of one value
the best possible by this cost model"""

MOVED = """\
g:f32[8@dp,24@tp]
  g is output 0, its layout chosen
  g is f moved: reduce_scatter[axis=tp dim=1 reduce_op=sum]
  f:f32[8@dp,24]{sum:tp} = mm e c
  `c[i, j] = sum_k a[i, k] * b[k, j]`
  (seconds as the choice saw them; + is what the whole would take more)
                             compute    moves  received
    dp  S(0) R -> S(0)       0.00 us  1.38 us     288 B     taken
        R R -> R             0.00 us  2.27 us     544 B  +0.88 us
        R S(1) -> S(1)       0.00 us  2.28 us     640 B  +0.89 us
        P(sum) R -> P(sum)   0.00 us  2.40 us     672 B  +1.01 us
        S(1) S(0) -> P(sum)  0.00 us  3.28 us    1696 B  +1.89 us
        R P(sum) -> P(sum)   0.00 us  3.28 us     928 B  +1.90 us
    tp  S(1) S(0) -> P(sum)  0.00 us  1.38 us     288 B     taken
        R P(sum) -> P(sum)   0.01 us  2.79 us    1056 B  +1.42 us
        R S(1) -> S(1)       0.00 us  2.81 us    1920 B  +1.42 us
        P(sum) R -> P(sum)   0.01 us  2.88 us    4896 B  +1.50 us
        R R -> R             0.01 us  2.89 us    5376 B  +1.51 us
        S(0) R -> S(0)       0.01 us  4.25 us    4872 B  +2.87 us"""

NO_VALUE = """\
mlp has no value 'zz'.

  values: a to g

Ask for a name that print(program) shows."""

APART = """\
                      first    second
name                    mlp       mlp
lines                     4         4
collectives               1         1
received per rank     288 B     576 B
peak                 3680 B    3584 B
moves take         22.01 us  34.01 us

other types of outputs
  out 0  g:f32[8@dp,24@tp]  g:f32[8@dp,24]

only in first: 1 move
  1 x  reduce_scatter[axis=tp dim=1 reduce_op=sum]  f32[8@dp,24]{sum:tp} -> f32[8@dp,24@tp]  288 B

only in second: 1 move
  1 x  all_reduce[axis=tp reduce_op=sum]  f32[8@dp,24]{sum:tp} -> f32[8@dp,24]  576 B"""

PLAN = """\
f32[8@dp,16]{sum:tp} -> f32[8,16@tp] on Mesh(dp=2, tp=4)
               received  all ranks      time
  taken           256 B     2048 B  36.01 us  reduce_scatter[axis=tp dim=1 reduce_op=sum]
                                              all_gather[axis=dp dim=0]
  other           448 B     3584 B  38.02 us  exchange[axes=(dp,tp) reduce_op=sum way=all_to_all]
  other           448 B     3584 B  48.01 us  all_reduce[axis=tp reduce_op=sum]
                                              slice[axis=tp dim=1]
                                              all_gather[axis=dp dim=0]
  full copies     640 B     5120 B  48.02 us  all_reduce[axis=tp reduce_op=sum]
                                              all_gather[axis=dp dim=0]
                                              slice[axis=tp dim=1]
bound 256 B, reached: n pending terms that k ranks want as one take n + k - 1 transfers
taken for the fewest bytes of all ranks"""

LOCAL = """\
f32[8,8] -> f32[8@dp,8] on Mesh(dp=2, tp=4)
         received  all ranks     time
  taken       0 B        0 B  0.00 us  slice[axis=dp dim=0]
nothing is sent: every rank has what it wants, or can make it"""

REFUSED = """\
explain takes a program, two programs, or a TensorType and where it goes.

  first:  Program
  second: Layout

Write explain(program), explain(program, other) or explain(src, dst)."""
