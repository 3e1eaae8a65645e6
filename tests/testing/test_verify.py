"""`rule` and `verify` by themselves: what they take, refuse and report."""

import functools

import pytest
import torch

from fdtensor import Mesh, RuleError, SimulatedComm, TensorType, distribute, explain, rule, trace
from fdtensor.ops.notation.core import P, R, Row, S, rule_of
from fdtensor.testing.row_checks import verify

MESH = Mesh(dp=2)


@torch.library.custom_op("verifying::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by[:, None]


@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)


SAMPLE = torch.arange(12.0).reshape(4, 3), torch.arange(4.0)


def test_what_custom_op_returns_may_have_a_rule():
    @rule(scaled)
    def rows(x, by):
        yield (S(0), S(0)), S(0)
        yield (P, R), P

    overload = torch.ops.verifying.scaled.default
    assert rule_of(overload) is not None
    assert verify(scaled, [SAMPLE]) == verify(overload, [SAMPLE]) == []


def test_a_wrong_row_says_where_it_is_wrong():
    @rule(scaled)
    def rows(x, by):
        yield (P, P), P

    (wrong,) = verify(scaled, [SAMPLE], count=2)
    assert repr(wrong) == f"<{wrong}>"
    head, _, tail = str(wrong).partition(": output 0: ")
    assert head == (
        "verifying.scaled.default: P(sum) P(sum) -> P(sum) is wrong on (f32[4,3], f32[4])"
    )
    assert tail.endswith("of 12 elements are wrong")


@pytest.mark.parametrize(
    ("f", "x", "told"),
    [
        (lambda x: x * torch.inf, torch.tensor([1.0, -1, 0, 2]), "nan"),
        (lambda x: x.sum().exp(), torch.arange(4.0), "instead of 403.429; 1 of 1 elements"),
        (lambda x: x.exp() + 1j, torch.arange(4.0), "4 of 4 elements are wrong"),
    ],
    ids=["infinite", "0-d", "complex"],
)
def test_whatever_is_wrong_can_be_told(f, x, told):
    (wrong,) = verify(f, [(x,)], [Row((P,), (P,))], count=2)
    assert told in wrong.found


def test_a_wrong_answer_can_be_told():
    row = Row((S(0),), (R,))
    (wrong,) = verify(lambda x: x.sum() > 5, [(torch.arange(4),)], [row], count=2)
    assert wrong.found == "output 0: rank 0: 0 instead of 1; 1 of 1 elements are wrong"


def test_infinities_that_agree_are_not_what_is_wrong():
    (wrong,) = verify(
        lambda x: torch.where(x > 2, torch.inf, x + 1),
        [(torch.tensor([9.0, 1, 1, 9]),)],
        [Row((R,), (P,))],
        count=2,
    )
    assert wrong.found.startswith("output 0: 4 instead of 2 at [1]; 2 of 4 ")


def test_a_function_that_is_no_op_has_no_rule():
    with pytest.raises(RuleError) as error:
        rule(torch.mm)(lambda a, b: iter(()))
    assert str(error.value) == NO_OP


def test_nothing_is_verified_without_a_rule():
    op = torch.library.custom_op("verifying::bare", lambda x: x + 1, mutates_args=(), schema=ONE)
    with pytest.raises(RuleError) as error:
        verify(op, [(torch.ones(3),)])
    assert str(error.value) == NO_RULE
    assert verify(op, [(torch.ones(3),)], [Row((S(0),), (S(0),))]) == []


def test_rows_are_given_as_rules_yield_them():
    some = [(torch.randn(4, 3), torch.randn(3, 5))]
    assert verify(torch.mm, some, [((S(0), R), S(0)), ([S(1), S(0)], [P])]) == []
    (wrong,) = verify(torch.mm, some, [((P, P), P)])
    assert wrong.row == Row((P, P), (P,))
    for no_row in (S(0), ((S(0), R),), ((0, R), S(0)), "SR"):
        with pytest.raises(RuleError, match="is not a row"):
            verify(torch.mm, some, [no_row])


def test_texts_are_shown_as_they_are():
    src = TensorType((4, 4), torch.float32, MESH.layout("dp"))
    made = explain(src, MESH.layout())
    assert repr(made) == str(made)
    assert isinstance(made, str)
    program = trace(functools.partial(torch.add, alpha=2), src, src)
    assert program.name == "add"
    assert "add on Mesh(dp=2): 1 line" in program.summary()
    assert repr(program.explain()) == program.explain()


def test_tensors_and_types_have_as_many_dims():
    x = distribute(SAMPLE[0], MESH.layout("dp"), SimulatedComm(MESH))
    assert x.ndim == x.type.ndim == 2


ONE = "(Tensor x) -> Tensor"

NO_OP = """\
mm is no op, so it can have no rule.

Give an overload such as torch.ops.aten.mm.default, or make the function an op with \
torch.library.custom_op."""

NO_RULE = """\
verifying.bare.default has no rule that could be verified.

Give it one with @fdtensor.rule, or pass the rows; discover(op, sample) finds them."""
