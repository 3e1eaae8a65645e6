"""Private names of torch are used in one place, which gives each a public name of ours."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fdtensor
from fdtensor.layouts import torch_private

ROOT = Path(fdtensor.__file__).parent

HOME = sorted((ROOT / "layouts" / "torch_private").glob("*.py"))

NOT_OF_TORCH = {"_current_frames", "_exit", "_getframe"}
"""Private names of Python, which documents them."""

FILES = sorted(file for file in ROOT.rglob("*.py") if file not in HOME)


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is not one of Python's own."""
    return name.startswith("_") and not name.startswith("__") and name not in NOT_OF_TORCH


def is_own(node: ast.expr) -> bool:
    """Whether an attribute is one of `self`, `cls`, `super()`, or the name of an op."""
    match node:
        case ast.Name("self" | "cls" | "aten"):
            return True
        case ast.Attribute(_, "aten") | ast.Call(ast.Name("super")):
            return True
        case ast.Attribute(ast.Attribute(ast.Name("torch"), "ops")):
            return True
    return False


def private_names(source: str) -> Iterator[str]:
    """The private names of other packages that a file imports, reads or passes by keyword."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (n.name for n in names if any(map(is_private, n.name.split("."))))
            case ast.ImportFrom(module, names) if module and not module.startswith("fdtensor"):
                full = [f"{module}.{n.name}" for n in names]
                yield from (name for name in full if any(map(is_private, name.split("."))))
            case ast.Attribute(value, name) if is_private(name) and not is_own(value):
                yield name
            case ast.keyword(str() as name) if is_private(name):
                yield name
            case ast.Constant(str() as text) if text in NAMES:
                yield text


def own_names() -> Iterator[str]:
    """The private names of torch that the home of them reads."""
    for node in (node for file in HOME for node in ast.walk(ast.parse(file.read_text()))):
        match node:
            case ast.ImportFrom(module, names) if module and module.startswith("torch"):
                yield from (n.name for n in names if is_private(n.name))
            case ast.Attribute(ast.Attribute(_, "ops")):
                pass  # a namespace of ops, whose name programs hold as a text
            case ast.Attribute(_, name) if is_private(name):
                yield name
            case ast.Constant(str() as text) if is_private(text) and text.isidentifier():
                yield text


NAMES = frozenset(own_names())


@pytest.mark.parametrize("name", torch_private.__all__)
def test_each_name_is_there(name):
    assert getattr(torch_private, name) is not None


def test_the_functions_find_what_they_name():
    import torch

    relu, module = torch.ops.aten.relu, torch.nn.Linear(2, 2)
    op = torch.library.custom_op("fdtensor_test::twice", lambda x: x * 2, mutates_args=(), schema=
                                 "(Tensor x) -> Tensor")  # fmt: skip
    found = [
        torch_private.schema_of(relu.default).name == "aten::relu",
        torch_private.qualified_name(relu) == "aten::relu",
        torch_private.jit_overload(torch.ops.aten.add, (torch.ones(1), 1), {}) == "Tensor",
        torch_private.overload_in(op) is torch.ops.fdtensor_test.twice.default,
        torch_private.op_function(op)(3) == 6,
        torch_private.abstract_function(op) is None,
        torch_private.backward_function(op) is None,
        torch_private.setup_context_function(op) is None,
        torch_private.has_schema(relu.default) and not torch_private.has_schema(torch.relu),
        torch_private.packet_of(relu.default) is relu,
        torch_private.packet_name(relu.default) == "relu",
        torch_private.overload_name(relu.default) == "default",
        torch_private.qualified_name_or(relu) == "aten::relu",
        torch_private.qualified_name_or(torch.relu) is torch.relu,
        relu.default in torch_private.decomposition_table(),
        torch_private.has_kernel("aten::relu", "CPU"),
        torch_private.version_of(torch.ones(1).add_(1)) == 1,
        torch_private.storage_number(torch.ones(1).untyped_storage()) > 0,
        torch_private.proxy_mode() is None,
        torch_private.current_autograd_node() is None,
        torch_private.current_graph_task() == -1,
        not torch_private.forward_active(),
        torch_private.forward_level() == -1,
        torch_private.module_tensors(module)[0].keys() == {"weight", "bias"},
        [len(group) for group in torch_private.forward_hooks(module)] == [2, 2],
        torch_private.has_init_group(torch.optim.Adam),
        callable(torch_private.init_group(torch.optim.Adam(module.parameters()))),
        hasattr(torch.nn.MultiheadAttention, torch_private.RESETS[1]),
        torch_private.strided_shard().__name__ == "_StridedShard",
        hasattr(torch_private.dtensor_spec_module(), "TensorMeta"),
    ]
    assert all(found), found


def test_saving_hooks_are_left_and_work_in_one_gradient_alone():
    import torch

    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    x = torch.arange(3.0, requires_grad=True)
    with hooks, torch_private.without_saving_hooks():
        x.sin()
    assert not packed

    def f(x):
        with hooks:
            return x.sin().sum()

    plain = torch.func.grad(torch.func.grad(lambda x: f(x)))
    with torch_private.recorded_saving_hooks(lambda f: f):
        assert torch.equal(torch.func.grad(f)(x.detach()), x.detach().cos())
        assert len(packed) == 1
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            plain(torch.ones(()))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(f)(x.detach())


def test_within_a_nested_jvp_forward_ad_keeps_its_level():
    import torch

    with torch.autograd.forward_ad.dual_level(), torch_private.nested_jvp():
        torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))
        assert torch_private.forward_level() == 0


def test_a_truncated_normal_is_drawn_by_the_function_that_is_given():
    import torch

    with torch_private.truncated_normal_by(lambda tensor, *_, **__: tensor.fill_(3)):
        assert torch.nn.init.trunc_normal_(torch.empty(1)) == 3
    assert torch.nn.init.trunc_normal_(torch.empty(1)) != 3


def test_as_if_compiling_ends():
    import torch

    with torch_private.as_if_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_other_file_uses_a_private_name_of_torch(file):
    assert list(private_names(file.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._ops import OpOverload",
        "from torch.overrides import _push_mode",
        "torch._C._functorch()",
        "op._schema",
        "DeviceMesh(x, _init_backend=False)",
        "getattr(op, '_schema')",
        "torch.ops._c10d_functional",
    ],
)
def test_a_private_name_is_seen(source):
    assert list(private_names(source)) != []


def test_names_of_our_own_and_of_ops_are_none():
    assert list(private_names("self._x; cls._y; super()._z(); torch.ops.aten._softmax")) == []


WITHOUT_COMPILER = """
import sys
import torch
import fdtensor as fd
mesh = fd.Mesh(x=2)
comm = fd.SimulatedComm(mesh)
x = fd.distribute(torch.ones(4, 4), mesh.layout("x"), comm)
step = fd.spmd(torch.func.grad(lambda x: torch.relu(x @ x.T).softmax(0).square().sum()))
step(x)
assert "torch._dynamo" not in sys.modules
flags = sys.modules["torch._dynamo.config"]

compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo
assert torch._dynamo.config is flags is sys.modules["torch._dynamo.config"]
assert torch._dynamo.compiled_autograd is sys.modules["torch._dynamo.compiled_autograd"]

again = fd.spmd(torch.func.grad(lambda x: torch.tanh(x @ x.T).le(0.5).float().mul(x).sum()))
again(x)
from torch._subclasses.fake_tensor import FakeTensorMode
kept = FakeTensorMode.__torch_dispatch__.__wrapped__.__dynamo_disable
assert kept is not FakeTensorMode.__torch_dispatch__.__wrapped__
assert hasattr(kept, "_torchdynamo_disable"), kept
assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
"""


def test_a_trace_imports_no_compiler_and_what_compiles_later_has_all_of_it():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_names_of_the_compiler_are_those_of_its_modules_when_somebody_asks():
    source = """
import sys
import torch
from fdtensor.layouts.torch_private import fake_mode
with fake_mode():
    assert torch.ones(2).add(1).shape == (2,)
assert "torch._dynamo" not in sys.modules
assert torch._dynamo.is_compiling() is False  # which imports it
assert torch._dynamo is sys.modules["torch._dynamo"]
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


IMPORTED_WITHIN = """
import sys
import torch
import fdtensor as fd
mesh = fd.Mesh(x=2)
x = fd.distribute(torch.ones(4, 4), mesh.layout("x"), fd.SimulatedComm(mesh))
assert "torch._dynamo" not in sys.modules
either = lambda x, *, f: torch.cond(x.sum() > 0, f, lambda a: a - 1, (x,))
assert torch.equal(fd.spmd(lambda x: either(x, f=lambda a: a + 1))(x).full(), torch.full((4, 4), 2))
assert "torch._dynamo" in sys.modules
assert type(torch._dynamo.__spec__.loader) is type(torch._higher_order_ops.__spec__.loader)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return either(x, f=lambda a: self.layer(a))

torch.export.export(Model(), (torch.ones(2, 4),))
ran = []
torch.compile(lambda x: x + 1, backend=lambda g, _: ran.append(g) or g.forward)(torch.ones(2))
assert len(ran) == 1  # it compiles again, once the recording is over
"""


def test_a_recording_that_imports_the_compiler_leaves_it_as_torch_has_it():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_WITHIN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_transforms_and_functions_take_is_seen_by_some_modes():
    import torch
    from torch.overrides import TorchFunctionMode

    taken = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            taken.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def f(x):
        return torch.func.vmap(torch.func.grad(torch.sin))(x)

    due = f(torch.zeros(2))
    seen = lambda mode: isinstance(mode, Sees)  # noqa: E731
    with torch_private.seen_by_modes(seen, seen), Sees():
        f(torch.zeros(2))
    names = {"_add_batch_dim", "_wrap_for_grad", "_unwrap_for_grad", "_remove_batch_dim"}
    assert names <= {*taken}
    taken.clear()
    with Sees():
        assert torch.equal(f(torch.zeros(2)), due)
    assert names.isdisjoint(taken)


def test_fewer_transforms_surround_code_for_a_while():
    import torch

    def f(x):
        with torch_private.within_transforms(1):
            outside = torch_private.transforms_around()
        assert (outside, torch_private.transforms_around()) == (1, 2)
        return x.sin()

    assert torch.equal(
        torch.func.vmap(torch.func.grad(f))(torch.zeros(2)), torch.ones(2)
    )  # and both go on
