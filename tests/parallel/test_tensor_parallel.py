"""`tensor_parallel`: the programs of all ranks together give what the exported one gives."""

import copy
import io
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export
from torch.utils._pytree import tree_leaves

from fdtensor import (
    Colwise,
    Mesh,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    layouts_for,
    shards,
    tensor_parallel,
)
from fdtensor.layouts.errors import DataDependentError, MeshError, TraceError
from tests.support.lockstep import together

# what torch warns of in code of its own
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)

LINE = Mesh(tp=4)
THREE = Mesh(tp=3)
SQUARE = Mesh(dp=2, tp=2)


class Mlp(nn.Module):
    def __init__(self, d=8, h=16, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(d, h, bias=bias), nn.Linear(h, d, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Normed(nn.Module):
    def __init__(self, h=16):
        super().__init__()
        self.fc, self.bn = nn.Linear(8, h), nn.BatchNorm1d(h)

    def forward(self, x):
        return self.bn(self.fc(x))


class Block(nn.Module):
    def __init__(self, d=16, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.mlp = Mlp(d, 2 * d)

    def forward(self, x):
        n, t, d = x.shape
        y = self.n1(x)
        q, k, v = (
            f(y).view(n, t, self.heads, d // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(self.n2(x))


class Gpt(nn.Module):
    def __init__(self, words=20):
        super().__init__()
        self.emb, self.pos = nn.Embedding(words, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList([Block()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, words, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class Odd(nn.Module):
    """Writes to buffers, lifts constants, branches, returns a dict with numbers."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(18, 8)
        self.up, self.bn = nn.Linear(8, 30), nn.BatchNorm1d(30)
        self.down, self.head = nn.Linear(30, 8, bias=False), nn.Linear(8, 18, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.ones(8))
        self.register_buffer("unsaved", torch.arange(8.0), persistent=False)
        self.offset = torch.arange(8.0)

    def forward(self, x, twice=True):
        h = self.emb(x)
        with torch.no_grad():
            z = h.sum()
        b = self.bn(F.relu(self.up(h)).transpose(1, 2)).transpose(1, 2)
        self.count.add_(1)
        h = h + self.down(b) * self.count + self.offset * self.unsaved + z + torch.tensor(2.0)
        h = torch.cond(h.sum() > 0, lambda a: a + 1, lambda a: a - 1, (h,))
        n = h.shape[0]
        return {"y": self.head(h).view(n * 5, 18), "three": 3, "size": n * 2, "h": h, "x": x}


@torch.library.custom_op("exported::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1) * 2


@summed.register_fake
def _(x):
    return torch.empty_like(x)


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp.down(torch.ops.exported.summed(self.mlp.up(x)))


class Named(nn.Module):
    """Takes keywords, returns what is no tensor."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x, *, mask=None, scale=2.0):
        y = self.mlp(x) * scale
        return y if mask is None else y.masked_fill(mask, 0), None, {"rest": [x, 1.5, "s"]}


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.mlp(x), lambda x: x * 2, (x,))


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, a, b, c):
        rows = torch.cat([a, b, c])
        return self.mlp(rows) * torch.arange(rows.shape[0])[:, None], rows.shape[0]


MLP = {"up": Colwise(), "down": Rowwise()}
MLPS = {"*.up": Colwise(), "*.down": Rowwise()}
ODD = {"emb": VocabParallel(), "head": Colwise(), **MLP}
GPT = {
    "emb": VocabParallel(),
    "layers.*.[qkv]": Colwise(),
    "layers.*.o": Rowwise(),
    "layers.*.mlp.up": Colwise(),
    "layers.*.mlp.down": Rowwise(),
    "head": VocabParallel(),
}
SEQUENCE = GPT | {"layers.*.n?": SequenceParallel(), "norm": SequenceParallel()}
ROWS = (torch.randn(6, 8),)
WORDS = (torch.randint(0, 18, (4, 5)),)
BATCH = Dim("batch", min=2, max=64)
STEPS = Dim("steps", min=2, max=8)


class Case(NamedTuple):
    make: object
    args: tuple
    styles: dict
    sent: dict
    mesh: Mesh = LINE
    dims: object = None
    later: tuple = ()
    options: tuple = ()


CASES = {
    "an mlp": Case(Mlp, ROWS, MLP, {"all_reduce": 1}),
    "two of them": Case(
        lambda: nn.Sequential(Mlp(), Mlp(8, 16, False)), ROWS, MLPS, {"all_reduce": 2}
    ),
    "uneven": Case(lambda: Mlp(8, 14), ROWS, MLP, {"all_reduce": 1}, THREE),
    "fewer columns than ranks": Case(lambda: Mlp(8, 3), ROWS, MLP, {"all_reduce": 1}),
    "no style": Case(Mlp, ROWS, {}, {}),
    "columns alone": Case(Mlp, ROWS, {"up": Colwise()}, {"all_gather_into_tensor": 1}),
    "rows alone": Case(Mlp, ROWS, {"down": Rowwise()}, {"all_reduce": 1}),
    "output cut": Case(
        Mlp,
        ROWS,
        {"up": Colwise(), "down": Rowwise(output=0)},
        {"all_to_all_single": 2},
    ),
    "one axis of two": Case(
        lambda: nn.Sequential(Mlp(), Mlp()), ROWS, MLPS, {"all_reduce": 2}, SQUARE
    ),
    "the other": Case(Mlp, ROWS, MLP, {"all_reduce": 1}, SQUARE, options=(("axis", "dp"),)),
    "both": Case(Mlp, ROWS, MLP, {"all_reduce": 1}, SQUARE, options=(("axis", ("dp", "tp")),)),
    "a batch norm": Case(Normed, ROWS, {"fc": Colwise()}, {"all_gather_into_tensor": 1}),
    "one that only reads": Case(
        lambda: Normed().eval(), ROWS, {"fc": Colwise()}, {"all_gather_into_tensor": 1}
    ),
    "any batch": Case(
        lambda: Mlp(8, 14),
        ROWS,
        MLP,
        {"all_reduce": 1},
        THREE,
        ({0: BATCH},),
        ((torch.randn(9, 8),), (torch.randn(2, 8),)),
    ),
    "any batch of four": Case(
        Odd, WORDS, ODD, None, LINE, ({0: BATCH},), ((torch.randint(0, 18, (7, 5)),),)
    ),
    "queries, keys and values in one": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        (torch.randn(2, 5, 8),),
        {
            "self_attn": Colwise(parts=3),
            "self_attn.out_proj": Rowwise(),
            "linear1": Colwise(),
            "linear2": Rowwise(),
        },
        {"all_reduce": 2},
        Mesh(tp=2),
    ),
    "an op without a rule": Case(
        Unknown,
        ROWS,
        {"mlp.up": Colwise(), "mlp.down": Rowwise()},
        {"all_gather_into_tensor": 1, "all_reduce": 1},
        Mesh(tp=2),
    ),
    "a branch with parameters": Case(
        Branch, ROWS, {"mlp.up": Colwise()}, {"all_gather_into_tensor": 1}, Mesh(tp=2)
    ),
    "sizes of sizes": Case(
        Joined,
        (torch.randn(4, 8), torch.randn(8, 8), torch.randn(3, 8)),
        {"mlp.up": Colwise(), "mlp.down": Rowwise()},
        {"all_reduce": 1},
        Mesh(tp=2),
        ({0: BATCH}, {0: 2 * BATCH}, {0: Dim("other")}),
        ((torch.randn(3, 8), torch.randn(6, 8), torch.randn(5, 8)),),
    ),
    "convolutions": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=1)),
        (torch.randn(2, 3, 6, 6),),
        {"0": Colwise(), "2": Rowwise()},
        {"all_reduce": 1},
        SQUARE,
    ),
    "an odd one": Case(
        Odd,
        WORDS,
        ODD,
        {"all_reduce": 2, "all_gather_into_tensor": 2},
        SQUARE,
        ({0: BATCH},),
        ((torch.randint(0, 18, (7, 5)),),),
    ),
    "a transformer": Case(
        Gpt,
        (torch.randint(0, 20, (3, 8)),),
        GPT,
        {"all_reduce": 3, "all_gather_into_tensor": 1},
        Mesh(tp=2),
        ({0: BATCH, 1: STEPS},),
        ((torch.randint(0, 20, (2, 5)),),),
    ),
    "sequence parallel": Case(
        Gpt,
        (torch.randint(0, 20, (3, 8)),),
        SEQUENCE,
        {"reduce_scatter_tensor": 3, "all_gather_into_tensor": 4},
    ),
}


def sent(program):
    """The collectives of a program by kind."""
    names = [str(n.target).split(".") for n in program.graph.nodes]
    return dict(
        Counter(n[1] for n in names if n[0] == "_c10d_functional")
        - Counter({"wait_tensor": 1 << 30})
    )


def made(case, exported):
    return {
        rank: tensor_parallel(exported, case.mesh, case.styles, rank=rank, **dict(case.options))
        for rank in case.mesh.ranks
    }


def alike(wanted, found):
    pairs = list(zip(tree_leaves(wanted), tree_leaves(found), strict=True))
    for a, b in pairs:
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        else:
            assert a == b
    assert pairs


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
def test_ranks_together_give_what_one_device_gives(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    exported = export(model, case.args, dynamic_shapes=case.dims)
    before = str(exported), {k: v.clone() for k, v in exported.state_dict.items()}
    programs = made(case, exported)
    assert str(exported) == before[0]
    alike(before[1], dict(exported.state_dict))
    whole = copy.deepcopy(model)
    modules = {rank: p.module() for rank, p in programs.items()}
    for args in (case.args, *case.later):
        wanted = whole(*args)
        for found in together(modules, case.mesh, *args).values():
            alike(wanted, found)
    for name, buffer in whole.named_buffers():
        for module in modules.values():
            alike(buffer, dict(module.named_buffers())[name])
    assert case.sent is None or sent(programs[case.mesh.order[0]]) == case.sent


@pytest.mark.parametrize("name", ["an odd one", "a transformer", "uneven"])
def test_a_program_is_true_to_itself(name):
    case = CASES[name]
    model = case.make()
    exported = export(model, case.args, dynamic_shapes=case.dims)
    layouts = layouts_for(model, case.mesh, case.styles)
    for rank in case.mesh.order[:2]:
        program = tensor_parallel(exported, case.mesh, case.styles, rank=rank)
        program.validate()
        for key, tensor in exported.state_dict.items():
            block = program.state_dict[key]
            assert isinstance(block, nn.Parameter) == isinstance(tensor, nn.Parameter)
            assert block.requires_grad == tensor.requires_grad
            mine = shards(tensor.detach(), layouts[key])[case.mesh.order.index(rank)]
            alike(mine, block.detach())
        if "emb.weight" in program.state_dict:
            assert program.state_dict["emb.weight"] is program.state_dict["head.weight"]
        kinds = [(s.kind, s.target) for s in program.graph_signature.input_specs]
        old = exported.run_decompositions({}).graph_signature.input_specs
        assert [k for k in kinds if "fdtensor" not in str(k[1])] == [
            (s.kind, s.target) for s in old
        ]
        shapes = {k: tuple(v.shape) for k, v in program.state_dict.items()}
        targets = {s.arg.name: s.target for s in program.graph_signature.input_specs}
        for node in program.graph.nodes:
            if node.op == "placeholder" and targets[node.name] in shapes:
                assert tuple(node.meta["val"].shape) == shapes[targets[node.name]]
            if node.op == "call_function":
                assert "val" in node.meta
                if isinstance(node.meta["val"], torch.Tensor):
                    assert node.meta["tensor_meta"].shape == node.meta["val"].shape
                    assert node.meta["nn_module_stack"]


def test_nodes_say_which_module_they_are_of():
    program = tensor_parallel(export(Mlp(), ROWS), LINE, MLP, rank=0)
    where = {}
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            where.setdefault(list(stack.values())[-1][0], []).append(str(node.target))
    assert set(where) == {"up", "down", ""}
    assert "aten.addmm.default" in where["up"]
    assert "aten.addmm.default" in where["down"]
    assert "aten.gelu.default" in where[""]


def test_a_program_can_be_saved():
    exported = export(Odd(), WORDS, dynamic_shapes=({0: BATCH},))
    program = tensor_parallel(exported, SQUARE, ODD, rank=1)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file)
    for key, tensor in program.state_dict.items():
        alike(tensor, again.state_dict[key])
    assert sent(again) == sent(program)
    assert again.graph_signature.buffers == program.graph_signature.buffers


def test_a_loaded_program_can_be_split():
    file = io.BytesIO()
    model = Mlp()
    torch.export.save(export(model, ROWS, dynamic_shapes=({0: BATCH},)), file)
    file.seek(0)
    exported = torch.export.load(file)
    programs = {r: tensor_parallel(exported, THREE, MLP, rank=r) for r in THREE.ranks}
    rows = torch.randn(7, 8)
    for found in together({r: p.module() for r, p in programs.items()}, THREE, rows).values():
        alike(model(rows), found)


def test_outputs_have_the_layouts_that_are_asked_for():
    model = nn.Sequential(Mlp(), nn.ReLU())
    wanted = model(*ROWS)
    for layout in (SQUARE.layout(None, "tp"), SQUARE.layout("dp"), SQUARE.layout(("tp", "dp"))):
        programs = {
            r: tensor_parallel(export(model, ROWS), SQUARE, MLPS, rank=r, out_layouts=layout)
            for r in SQUARE.ranks
        }
        found = together({r: p.module() for r, p in programs.items()}, SQUARE, *ROWS)
        for rank, block in zip(SQUARE.order, shards(wanted.detach(), layout)):
            alike(block, found[rank])


def test_outputs_of_a_dict_have_layouts_of_their_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x):
            return {"z": self.mlp(x), "a": self.mlp.up(x)}

    model = Two()
    layouts = {"z": None, "a": LINE.layout(None, "tp")}
    styles = {"mlp.up": Colwise(), "mlp.down": Rowwise()}
    programs = {
        r: tensor_parallel(export(model, ROWS), LINE, styles, rank=r, out_layouts=layouts)
        for r in LINE.ranks
    }
    assert sent(programs[0]) == {"all_reduce": 1}
    found = together({r: p.module() for r, p in programs.items()}, LINE, *ROWS)
    wanted = model(*ROWS)
    for rank, block in zip(LINE.order, shards(wanted["a"].detach(), layouts["a"])):
        alike(wanted["z"], found[rank]["z"])
        alike(block, found[rank]["a"])


def test_arguments_may_come_by_keyword():
    model, mesh = Named(), Mesh(tp=2)
    mask = torch.rand(6, 8) > 0.5
    exported = export(model, ROWS, {"mask": mask})
    styles = {"mlp.up": Colwise(), "mlp.down": Rowwise()}
    modules = {r: tensor_parallel(exported, mesh, styles, rank=r).module() for r in mesh.ranks}
    for found in together(modules, mesh, *ROWS, mask=mask).values():
        alike(model(*ROWS, mask=mask), found)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp(8, 14)

    def forward(self, x, y):
        return ((self.mlp(x) - y) ** 2).mean()


def test_an_exported_training_step_gives_the_blocks_of_gradients():
    from torch.export.experimental import _export_forward_backward

    model, args = Loss(), (torch.randn(4, 8), torch.randn(4, 8))
    joint = _export_forward_backward(export(model, args))
    styles = {"mlp.up": Colwise(), "mlp.down": Rowwise()}
    programs = {r: tensor_parallel(joint, THREE, styles, rank=r) for r in THREE.ranks}
    assert sent(programs[0]) == {"all_reduce": 1}
    loss = model(*args)
    loss.backward()
    layouts = layouts_for(model, THREE, styles)
    modules = {r: Plain(p, args) for r, p in programs.items()}
    for rank, (value, *grads) in together(modules, THREE).items():
        alike(loss.detach(), value)
        specs = programs[rank].graph_signature.output_specs[1:]
        for spec, grad in zip(specs, grads, strict=True):
            full = model.get_parameter(spec.target).grad
            alike(shards(full, layouts[spec.target])[rank], grad)


def test_results_have_no_derivatives_of_one_rank_alone():
    program = tensor_parallel(export(Mlp(), ROWS), LINE, {"up": Colwise()}, rank=0)
    whole = tensor_parallel(export(Mlp(), ROWS), LINE, {}, rank=0)
    last = [p.graph.output_node().args[0][0].target for p in (program, whole)]
    assert last == [torch.ops.aten.detach.default, torch.ops.aten.addmm.default]
    assert whole.module()(*ROWS).requires_grad


class Plain(torch.fx.GraphModule):
    """The graph of an exported program with all of its inputs."""

    def __init__(self, program, args):
        super().__init__(program.graph_module, program.graph)
        state = {k: v.detach() for k, v in program.state_dict.items()}
        rest = iter(args)
        self.given = [state.get(s.target) for s in program.graph_signature.input_specs]
        self.given = [next(rest) if g is None else g for g in self.given]
        self.graph._codegen.process_inputs = lambda: self.given
        self.graph._codegen.process_outputs = lambda outs: outs


def test_styles_of_torch_give_the_same_program():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    exported = export(Mlp(), ROWS)
    ours = tensor_parallel(exported, LINE, MLP, rank=2)
    theirs = tensor_parallel(
        exported, LINE, {"up": ColwiseParallel, "down": RowwiseParallel()}, rank=2
    )
    assert ours.graph_module.code == theirs.graph_module.code


def test_mistakes_say_what_to_do():
    exported = export(nn.Sequential(nn.LayerNorm(8), Mlp()), ROWS)
    for kind, options, text in MISTAKES:
        with pytest.raises(kind) as error:
            tensor_parallel(exported, LINE, **{"rank": 0, "styles": {}} | options)
        assert str(error.value) == text


def test_shapes_that_depend_on_values_are_refused():
    class Chosen(nn.Module):
        def forward(self, x):
            return x[x > 0].sum()

    with pytest.raises(DataDependentError) as error:
        tensor_parallel(export(Chosen(), ROWS), LINE, {}, rank=0)
    assert str(error.value) == CHOSEN


def test_random_numbers_are_refused_in_branches_too():
    class Noisy(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: x * 2, (x,))

    for model in (nn.Dropout(0.5), Noisy()):
        with pytest.raises(TraceError, match="draws random numbers"):
            tensor_parallel(export(model, ROWS), LINE, {}, rank=0)


def test_sizes_that_are_not_known_are_not_cut():
    exported = export(Mlp(), ROWS, dynamic_shapes=({0: BATCH},))
    with pytest.raises(TraceError) as error:
        tensor_parallel(exported, LINE, {"up": Colwise(input=0)}, rank=0)
    assert str(error.value) == UNKNOWN.format("node 'linear'")
    with pytest.raises(TraceError) as error:
        tensor_parallel(exported, LINE, {}, rank=0, out_layouts=LINE.layout("tp"))
    assert str(error.value) == UNKNOWN.format("a result")


def splits_and_runs(name):
    """What the program of this rank gives, made here and loaded from a file."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    exported = export(model, case.args, dynamic_shapes=case.dims)
    program = tensor_parallel(exported, case.mesh, case.styles)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    args = case.later[0] if case.later else case.args
    with torch.no_grad():
        return (
            model(*args),
            program.module()(*args),
            torch.export.load(file).module()(*args),
            sorted({n.args[-1] for n in program.graph.nodes if "all_reduce" in str(n.target)}),
        )


@pytest.mark.few(2)
@pytest.mark.mesh
@pytest.mark.parametrize(
    "name", ["an mlp", "one axis of two", "any batch of four", "sequence parallel"]
)
def test_programs_run_on_real_ranks(pool4, name):
    for wanted, found, again, _ in pool4.run(splits_and_runs, name, timeout=480):
        alike(wanted, found)
        alike(wanted, again)


MISTAKES = [
    (
        TraceError,
        {"styles": {"0": Colwise()}},
        """\
Colwise has no meaning for module '0'.

  parameters: weight, bias

It is for linear layers, embeddings and convolutions: name those inside it, or give norms \
SequenceParallel().""",
    ),
    (
        TraceError,
        {"styles": {"1.upp": Colwise()}},
        """\
no module has the name '1.upp'.

  1.upp: near it: 1.up

Names are those of model.named_modules(); "layers.*.mlp.up" is a glob.""",
    ),
    (
        MeshError,
        {"axis": "pp"},
        """\
the mesh has no axis 'pp'.

  mesh: Mesh(tp=4)

Pass axis='tp', or another of its axes.""",
    ),
    (
        MeshError,
        {"rank": 4},
        """\
rank 4 runs nothing: it is not in the mesh.

  mesh: Mesh(tp=4)

Ask for a rank of the mesh.""",
    ),
    (
        TraceError,
        {"styles": {"0": SequenceParallel(2)}},
        """\
module '0' is to cut dim 2 of a value that has 2 dims.

Give a dim that it has.""",
    ),
]

CHOSEN = """\
node 'index' of the exported program depends on the values of tensors.

  found: the shape of what index gives depends on the values of f32[6,8], which a traced \
function does not know.

Export the model in parts, without what chooses shapes by values."""

UNKNOWN = """\
dim 0 of {} is to be cut, and its size is not known yet.

  layout: (tp=S(0))

Export the program with that size fixed, or cut another dim."""


def test_a_number_that_is_not_equal_to_itself():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x):
            return self.linear(x).masked_fill(x[:, :1] > 0, float("nan"))

    exported = export(Masked(), (torch.randn(3, 4),))
    program = tensor_parallel(exported, Mesh(tp=2), {"linear": Colwise()}, rank=0)
    assert "nan" in program.graph_module.code
