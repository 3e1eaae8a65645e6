"""Styles: which modules a name means, and how their parameters are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fdtensor import (
    Colwise,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Rowwise,
    SequenceParallel,
    Shard,
    SimulatedComm,
    StridedShard,
    VocabParallel,
    distribute,
    layouts_for,
    spmd,
)
from fdtensor.layouts.errors import MeshError, TraceError
from fdtensor.parallel.styles import matched, styled

MESH = Mesh(dp=2, tp=2)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(self.norm(h))


STYLES = {
    "emb": VocabParallel(),
    "layers.*.up": Colwise(),
    "layers.*.down": Rowwise(),
    "norm": SequenceParallel(),
    "head": VocabParallel(),
}


def cut(dim):
    return Layout(MESH, [Replicate(), Shard(dim)])


def test_layouts_of_a_model():
    found = layouts_for(Model(), MESH, STYLES)
    whole = MESH.layout()
    assert found["emb.weight"] == found["head.weight"] == cut(0)
    for i in range(2):
        assert found[f"layers.{i}.up.weight"] == found[f"layers.{i}.up.bias"] == cut(0)
        assert found[f"layers.{i}.down.weight"] == cut(1)
        assert found[f"layers.{i}.down.bias"] == whole
    assert found["norm.weight"] == found["norm.bias"] == whole
    assert list(found) == [name for name, _ in Model().named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize(
    ("module", "colwise", "rowwise"),
    [
        (nn.Linear(4, 6), 0, 1),
        (nn.Embedding(4, 6), 1, 0),
        (nn.EmbeddingBag(4, 6), 1, 0),
        (nn.Conv2d(4, 6, 3), 0, 1),
        (nn.ConvTranspose1d(4, 6, 3), 1, 0),
        (nn.Bilinear(4, 5, 6), 0, 1),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_layers_are_cut_by_what_they_give_or_read(module, colwise, rowwise):
    whole = nn.ModuleDict({"m": module})
    assert layouts_for(whole, MESH, {"m": Colwise()})["m.weight"] == cut(colwise)
    assert layouts_for(whole, MESH, {"m": Rowwise()})["m.weight"] == cut(rowwise)
    if getattr(module, "bias", None) is not None:
        assert layouts_for(whole, MESH, {"m": Colwise()})["m.bias"] == cut(0)
        assert layouts_for(whole, MESH, {"m": Rowwise()})["m.bias"] == MESH.layout()


def test_buffers_are_whole():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = layouts_for(module, MESH, {"0": Colwise()})
    assert found["1.running_mean"] == found["1.num_batches_tracked"] == MESH.layout()


def test_several_axes_cut_together():
    found = layouts_for(Mlp(), MESH, {"up": Colwise()}, axis=("dp", "tp"))
    assert found["up.weight"] == Layout(MESH, [Shard(0), Shard(0)])


def test_styles_of_torch_are_styles():
    from torch.distributed.tensor import Partial as P
    from torch.distributed.tensor import Replicate as R
    from torch.distributed.tensor import Shard as S
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
    )
    from torch.distributed.tensor.parallel import SequenceParallel as Sequence

    assert styled(ColwiseParallel) == styled(ColwiseParallel()) == styled(Colwise) == Colwise()
    assert styled(RowwiseParallel()) == Rowwise()
    assert styled(Sequence(sequence_dim=2)) == SequenceParallel(2)
    made = styled(ColwiseParallel(input_layouts=S(1), output_layouts=R()))
    assert made == Colwise(input=1, output=Replicate())
    assert styled(RowwiseParallel(output_layouts=S(1))) == Rowwise(output=1)
    assert styled(RowwiseParallel(output_layouts=P("sum"))) == Rowwise(output=Partial())


names = st.lists(st.sampled_from(["a", "b", "ab", "0", "1"]), min_size=1, max_size=3).map(".".join)


@given(st.sets(names, min_size=1), st.data())
def test_a_glob_means_the_names_that_it_stands_for(known, data):
    name = data.draw(st.sampled_from(sorted(known)))
    parts = name.split(".")
    k = data.draw(st.integers(0, len(parts) - 1))
    glob = ".".join([*parts[:k], "*", *parts[k + 1 :]])
    found = matched({glob: Colwise()}, known)
    like = {n for n in known if _same_but(n.split("."), parts, k)}
    assert set(found) == like
    assert name in like


def _same_but(a, b, k):
    return len(a) == len(b) and all(x == y for i, (x, y) in enumerate(zip(a, b)) if i != k)


def test_styles_print_as_they_are_written():
    styles = (Colwise(), Colwise(parts=3), Rowwise(output=Replicate()), SequenceParallel(2))
    assert [repr(s) for s in styles] == [
        "Colwise()",
        "Colwise(parts=3)",
        "Rowwise(output=Replicate())",
        "SequenceParallel(dim=2)",
    ]
    assert all(eval(repr(s)) == s for s in styles)


def test_parts_of_a_weight_are_cut_each_by_itself():
    found = layouts_for(nn.Sequential(nn.Linear(4, 12)), MESH, {"0": Colwise(parts=3)})
    assert found["0.weight"] == found["0.bias"]
    assert found["0.weight"] == Layout(MESH, [Replicate(), StridedShard(0, 3)])
    with pytest.raises(TraceError, match=r"'0.weight' is cut into 3 layers that have not one size"):
        layouts_for(nn.Sequential(nn.Linear(4, 64)), MESH, {"0": Colwise(parts=3)})


def test_a_star_means_several_parts_where_one_would_mean_nothing():
    names = ["", "layers", "layers.0", "layers.0.attn.q_proj", "layers.1.attn.q_proj", "q_proj2"]
    both = {"layers.0.attn.q_proj", "layers.1.attn.q_proj"}
    for glob in ("*.q_proj", "*q_proj", "layers.*.q_proj", "layers.*.attn.q_proj"):
        assert set(matched({glob: Colwise()}, names)) == both
    assert set(matched({"layers.*": Colwise()}, names)) == {"layers.0"}
    assert set(matched({"*": Colwise()}, names)) == {"layers", "q_proj2"}


def test_a_glob_does_not_mean_the_whole():
    assert set(matched({"*": Colwise()}, ["", "up", "up.a"])) == {"up"}
    assert set(matched({"": Colwise()}, ["", "up"])) == {""}


def test_a_name_means_more_than_a_glob():
    found = matched({"up": Rowwise(), "*": Colwise()}, ["up", "down"])
    assert found == {"up": Rowwise(), "down": Colwise()}


@pytest.mark.parametrize("mesh", [Mesh(tp=3), MESH], ids=["3", "2x2"])
def test_a_styled_model_trains_as_one_process_does(mesh):
    model = Model().double()
    tokens = torch.randint(0, 10, (3, 5))

    def loss(params, tokens):
        out = torch.func.functional_call(model, params, (tokens,))
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())

    step = torch.func.grad_and_value(loss)
    params = {n: p.detach() for n, p in model.named_parameters()}
    comm = SimulatedComm(mesh)
    layouts = layouts_for(model, mesh, STYLES)
    held = {n: distribute(p, layouts[n], comm) for n, p in params.items()}
    grads, value = spmd(step)(held, distribute(tokens, mesh.layout(), comm))
    wanted, expected = step(params, tokens)
    assert torch.allclose(value.full(), expected)
    for n, grad in grads.items():
        assert grad.layout == layouts[n]
        assert torch.allclose(grad.full(), wanted[n])


def test_mistakes_say_what_to_do():
    model = Model()
    for styles, text in MISTAKES:
        with pytest.raises(TraceError) as error:
            layouts_for(model, MESH, styles)
        assert str(error.value) == text
    for axis, mesh, text in AXES:
        with pytest.raises(MeshError) as error:
            layouts_for(model, mesh, STYLES, axis=axis)
        assert str(error.value) == text


MISTAKES = [
    (
        {"layer.*.up": Colwise(), "hed": Rowwise()},
        """\
no module has the name 'layer.*.up' or 'hed'.

  layer.*.up: near it: layers.1.up, layers.0.up, layers.1
  hed:        near it: head

Names are those of model.named_modules(); "layers.*.mlp.up" is a glob.""",
    ),
    (
        {"norm": Colwise()},
        """\
Colwise has no meaning for module 'norm'.

  parameters: weight, bias

It is for linear layers, embeddings and convolutions: name those inside it, or give norms \
SequenceParallel().""",
    ),
    (
        {"layers.0": Rowwise()},
        """\
Rowwise has no meaning for module 'layers.0'.

  parameters: none of its own

It is for linear layers, embeddings and convolutions: name those inside it, or give norms \
SequenceParallel().""",
    ),
    (
        {"layers.*.up": Colwise(), "layers.0.*": Rowwise()},
        """\
module 'layers.0.up' is given two styles.

  layers.*.up: Colwise()
  layers.0.*:  Rowwise()

Name it without a glob, or make the globs narrower.""",
    ),
    (
        {"emb": Colwise(), "head": Colwise()},
        """\
'emb.weight' and 'head.weight' are one parameter, to be cut in two ways.

  emb.weight:  S(1)
  head.weight: S(0)

Give both modules styles that agree, such as VocabParallel().""",
    ),
    (
        {"head": "colwise"},
        """\
'colwise' is not a parallel style.

Use Colwise(), Rowwise(), VocabParallel() or SequenceParallel().""",
    ),
]

AXES = [
    (
        "pp",
        MESH,
        """\
the mesh has no axis 'pp'.

  mesh: Mesh(dp=2, tp=2)

Pass axis='tp', or another of its axes.""",
    ),
    (
        None,
        Mesh(x=2, y=2),
        """\
none of the 2 axes was named, and none is called 'tp'.

  mesh: Mesh(x=2, y=2)

Pass axis='y', or another of them.""",
    ),
    (
        (),
        MESH,
        """\
axis=() names no axis.

  mesh: Mesh(dp=2, tp=2)

Pass axis='tp', or another of its axes.""",
    ),
    (
        ("tp", "tp"),
        MESH,
        """\
axis=('tp', 'tp') names an axis twice.

  mesh: Mesh(dp=2, tp=2)

Pass axis='tp', or another of its axes.""",
    ),
]
