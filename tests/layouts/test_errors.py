"""Tests of layouts/errors.py, and the whole text of one error of each kind that values raise."""

import copy
import pickle

import pytest

from fdtensor.layouts import dtypes, errors, layout, placement, tensor_type
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate


def test_an_error_is_a_sentence_then_aligned_facts_then_a_hint():
    error = FdtensorError("a is not b.", a=1, longer="x\ny", hint="Do this.")
    assert str(error) == "a is not b.\n\n  a:      1\n  longer: x\n          y\n\nDo this."


def test_facts_and_hint_may_be_left_out():
    assert str(FdtensorError("a is not b.")) == "a is not b."
    assert str(FdtensorError("a is not b.", a=1)) == "a is not b.\n\n  a: 1"
    assert str(FdtensorError("a is not b.", hint="Do.")) == "a is not b.\n\nDo."


KINDS = [name for name in errors.__all__ if not issubclass(getattr(errors, name), Warning)]


@pytest.mark.parametrize("name", KINDS)
def test_an_error_crosses_processes_whole(name):
    error = getattr(errors, name)("a is not b.", layout="R", hint="Do.")
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert (back.sentence, back.facts, back.hint) == (error.sentence, error.facts, error.hint)


def test_every_error_is_a_value_error():
    assert all(issubclass(getattr(errors, name), ValueError) for name in KINDS)


def pytest_generate_tests(metafunc):
    if "source" in metafunc.fixturenames:
        metafunc.parametrize("source", TEXTS)


def test_the_text_of_an_error(source):
    mesh = Mesh(dp=2, tp=4)
    names = {"mesh": mesh, "rows": mesh.layout("dp"), "R": Replicate()}
    names |= vars(placement) | vars(layout) | vars(tensor_type) | vars(dtypes)
    with pytest.raises(FdtensorError) as raised:
        eval(source, names)
    assert f"{type(raised.value).__name__}: {raised.value}\n" == TEXTS[source]


TEXTS = {
    "Mesh(2, 4)": """\
MeshError: a mesh takes its axes by name.

  got: Mesh(2, 4)

Write Mesh(dp=2, tp=4), or Mesh.from_ranks([[0, 1]], ('dp', 'tp')).
""",
    "Mesh(dp=0)": """\
MeshError: mesh axis 'dp' has size 0.

A size is an int, 1 or more.
""",
    "Mesh(dp=2.0)": """\
MeshError: mesh axis 'dp' has size 2.0.

A size is an int, 1 or more.
""",
    "Mesh(dp=2**40, tp=2**40)": """\
MeshError: a mesh of 1208925819614629174706176 ranks is too large to count its ranks.

  sizes: {'dp': 1099511627776, 'tp': 1099511627776}

Keep the product of the sizes below 9223372036854775807.
""",
    "Mesh(**{f'a{i}': 1 for i in range(33)})": """\
MeshError: a mesh has at most 32 axes, not 33.

Name only the axes along which ranks differ in what they do.
""",
    "Mesh(dp=2, links={'pod': 'nvlink'})": """\
MeshError: links names 'pod', which is no axis of the mesh.

  links: {'pod': 'nvlink'}

Its axes are 'dp'.
""",
    "Mesh(dp=2, links={'dp': 'pcie'})": """\
MeshError: mesh axis 'dp' has link 'pcie', which is none that has a name.

Links are 'nvlink', 'infiniband', 'ethernet'; CostModel.with_links takes others.
""",
    "Mesh(dp=2, links='nvlink')": """\
MeshError: mesh axis 'links' has size 'nvlink'.

A size is an int, 1 or more; links are a mapping: links={'dp': 'infiniband'}.
""",
    "Mesh.from_ranks([0, 1], 'dp', links='nvlink')": """\
MeshError: links='nvlink' is no mapping.

Write links={'dp': 'infiniband', 'tp': 'nvlink'}.
""",
    "Mesh.from_ranks([0, 1], [''])": """\
MeshError: '' is no name for a mesh axis.

Use a short string.
""",
    "Mesh.from_ranks([[0, 1]], ['dp'])": """\
MeshError: 1 axis names for ranks with 2 levels.

  axes:   ('dp',)
  levels: (1, 2)

Give one name for each level of nesting.
""",
    "Mesh.from_ranks([[0, 1], [2, 3]], ['dp', 'dp'])": """\
MeshError: a mesh axis name is given twice.

  axes: ('dp', 'dp')

Name each axis once.
""",
    "Mesh.from_ranks([[0, 1], [1, 2]], ['dp', 'tp'])": """\
MeshError: rank 1 is in the mesh twice.

  ranks: [[0, 1], [1, 2]]

A rank has one place in a mesh.
""",
    "Mesh.from_ranks([0, -1], ['dp'])": """\
MeshError: -1 is not a rank.

Ranks count from 0.
""",
    "Mesh.from_ranks([0, 0.5], ['dp'])": """\
MeshError: 0.5 is not a rank.

  ranks: [0, 0.5]

Ranks are ints.
""",
    "Mesh.from_ranks([[0, 1], [2]], ['dp', 'tp'])": """\
MeshError: the ranks do not form a regular array.

  ranks: [[0, 1], [2]]

Every row must have the same length, 1 or more.
""",
    "Mesh.from_ranks([], ['dp'])": """\
MeshError: a mesh axis has no ranks.

  ranks: []

Every row must have the same length, 1 or more.
""",
    "Layout(mesh, [R, R])['pp']": """\
MeshError: the mesh has no axis 'pp'.

  mesh: Mesh(dp=2, tp=4)

Its axes are 'dp', 'tp'.
""",
    "Shard(-1)": """\
LayoutError: -1 is not a tensor dim.

A dim is an int counted from the front: 0, 1, ...
""",
    "StridedShard(0, 0)": """\
LayoutError: 0 is not a split factor.

A split factor is an int, 1 or more.
""",
    "Ragged(0, (3, -1))": """\
LayoutError: (3, -1) are not the sizes of blocks.

Give one int, 0 or more, for each index along the axis.
""",
    "Partial('mean')": """\
LayoutError: 'mean' is not a reduce op.

The reduce ops are sum, avg, product, max, min, band, bor, bxor.
""",
    "parse_placement('S[0]')": """\
LayoutError: 'S[0]' is not a placement.

Write R, S(0), S(0, f=2), S(0, [3,5]) or P(sum).
""",
    "Layout((2, 4), [R, R])": """\
LayoutError: (2, 4) is not a Mesh.

Write Mesh(dp=2, tp=4).
""",
    "Layout(mesh, [R, None])": """\
LayoutError: None is not a placement.

Use Replicate(), Shard(dim), StridedShard(dim, split_factor), Ragged(dim, sizes) or \
Partial(reduce_op).
""",
    "Layout(mesh, [R])": """\
LayoutError: 1 placements for a mesh that has 2 axes.

  placements: (R)
  mesh:       Mesh(dp=2, tp=4)

Give one placement for each axis.
""",
    "Layout(mesh, [R, R, R])": """\
LayoutError: 3 placements for a mesh that has 2 axes.

  placements: (R, R, R)
  mesh:       Mesh(dp=2, tp=4)

Give one placement for each axis.
""",
    "Layout(mesh, [Shard(0), Shard(0)], {0: ('dp', 'pp')})": """\
LayoutError: the order of dim 0 names 'dp', 'pp', but it is cut by 'dp', 'tp'.

  placements: (dp=S(0), tp=S(0))

Name each axis that cuts the dim once, outermost first.
""",
    "Layout(mesh, [Shard(0), Shard(0)], 0)": """\
LayoutError: 0 is not an order of axes.

Map a dim to the axes that cut it, outermost first: {0: ('tp', 'dp')}.
""",
    "Layout(mesh, [Ragged(0, (1, 2, 3)), R])": """\
LayoutError: mesh axis 'dp' has 2 ranks, but its ragged shard has 3 sizes.

  placement: S(0, [1,2,3])
  mesh:      Mesh(dp=2, tp=4)

Give the size of each index along the axis.
""",
    "Layout(mesh, [Shard(0), Ragged(0, (1, 2, 3, 4))])": """\
LayoutError: the ragged shard of mesh axis 'tp' is not the first cut of dim 0.

  layout: (dp=S(0), tp=S(0, [1,2,3,4]))

Let it come first: order={0: ('tp', ...)}.
""",
    "Layout(mesh, [Partial('sum'), Partial('max')])": """\
LayoutError: mesh axes 'dp' and 'tp' have different reduce ops pending, sum and max: the result \
would depend on which comes first.

  layout: (dp=P(sum), tp=P(max))

Reduce one of them before the other becomes partial.
""",
    "Layout(mesh, [StridedShard(0, 4), Shard(0)]).per_dim()": """\
LayoutError: S(0, f=4) cannot be written per dim.

  layout: (dp=S(0, f=4), tp=S(0))

Write this layout per axis: Layout(mesh, placements).
""",
    "mesh.layout(0)": """\
LayoutError: 0 names no mesh axes.

Write an axis, a tuple of axes from major to minor, or None.
""",
    "mesh.layout('dp', 'tp', partial={'tp': 'sum'})": """\
LayoutError: mesh axis 'tp' is used twice.

  first:  S(1)
  second: P(sum)

An axis does one thing to a tensor.
""",
    "parse_dtype('real')": """\
LayoutError: 'real' is not a dtype.

Write f32, bf16, i64, bool, c64, or float32.
""",
    "TensorType((-1,), torch.float32, rows)": """\
LayoutError: (-1,) is not a shape.

A shape is a tuple of ints, 0 or more.
""",
    "TensorType((2**60, 0, 2), torch.float32, rows)": """\
LayoutError: f32[1152921504606846976, 0, 2] has 2**63 bytes or more, empty dims left out.

  largest: 9223372036854775807 bytes

Give a shape that torch can make a tensor of.
""",
    "TensorType((8,), 'f32', rows)": """\
LayoutError: 'f32' is not a dtype.

Use torch.float32 and the like.
""",
    "TensorType((8,), torch.quint8, rows)": """\
LayoutError: tensors of torch.quint8 cannot be laid out: its elements are not whole bytes of a \
plain dtype.

Convert it, or view it as uint8 first.
""",
    "TensorType((8,), torch.float32, [Shard(0)])": """\
LayoutError: [Shard(0)] is not a Layout.

Write Layout(mesh, [Shard(0)]), with one placement for each axis of the mesh.
""",
    "TensorType((), torch.float32, rows)": """\
LayoutError: mesh axis 'dp' shards dim 0 of a tensor that has 0 dims.

  shape:  ()
  layout: (dp=S(0), tp=R)
  mesh:   Mesh(dp=2, tp=4)

A tensor without dims can only be replicated: leave 'dp' as Replicate().
""",
    "TensorType((8, 16), torch.float32, mesh.layout(None, None, 'tp'))": """\
LayoutError: mesh axis 'tp' shards dim 2 of a tensor that has 2 dims.

  shape:  (8, 16)
  layout: (dp=R, tp=S(2))
  mesh:   Mesh(dp=2, tp=4)

Shard one of dims 0 to 1, or leave 'tp' as Replicate().
""",
    "TensorType((9,), torch.float32, Layout(Mesh(x=2), [Ragged(0, (3, 5))]))": """\
LayoutError: the ragged sizes of mesh axis 'x' add up to 8, but dim 0 has 9.

  shape: (9,)
  sizes: (3, 5)

Make the sizes add up to the size of the dim.
""",
    "TensorType((), torch.int64, Layout(Mesh(x=2), [Partial('avg')]))": """\
LayoutError: i64 has no avg, which mesh axis 'x' has pending.

  layout: (x=P(avg))

Use another reduce op, or a dtype that has avg.
""",
    "TensorType((8,), torch.float32, rows).local_shape(8)": """\
LayoutError: rank 8 holds nothing of this tensor: it is not in the mesh.

  type: f32[8@dp]
  mesh: Mesh(dp=2, tp=4)

Ask for a rank of the mesh.
""",
}
