"""A DTensor computes as a tensor does: operators, methods, functions of torch, and backward."""

import ast
import operator
import warnings

import einops
import einops.layers.torch
import numpy as np
import optree
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from fdtensor import func
from fdtensor.layouts.errors import FdtensorError, NotTorchError, ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tree import flatten
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor, is_dtensor
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import types
from fdtensor.testing.tensor_strategies import sharded
from fdtensor.testing.values import full_tensor

A = torch.arange(-6.0, 6.0, dtype=torch.float64).reshape(3, 4)
B = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).flip(1) - 3
ANY = {"a": A, "b": B}

few = settings(max_examples=settings.default.max_examples // 5)
"""For laws that trace several programs an example."""

BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
)
FORMS = (
    "-a, +a, abs(a), (a / 2).round(), a ** 2",
    "a @ b.T, a.T @ b, a.mT.matmul(b)",
    "a[0], a[-1, 1:], a[..., None], a[:, ::2], a[[2, 0]], a[1, 2]",
    "a.sum(), a.sum(0), a.mean(-1, keepdim=True), a.max(1).values, a.amin((0, 1))",
    "a.view(12), a.reshape(2, -1), a.transpose(0, 1), a.unsqueeze(0), a.expand(2, 3, 4)",
    "torch.relu(a), torch.stack([a, b]), torch.cat([a, b], 1), torch.where(a > b, a, 0)",
    "torch.einsum('ij,kj->ik', a, b), torch.zeros_like(a), torch.nn.functional.pad(a, (1, 0))",
    "(a > 0) & (b > 0), (a > 0) | (b > 0), (a > 0) ^ (b > 0), ~(a > 0)",
    "a.to(torch.int64) << 1, 1 << b.abs().long(), a.float().half().dtype, a.to(b).dtype",
    "a.shape, type(a.shape), a.shape.numel(), a.size(), a.size(0), a.dim(), a.numel(), a.nbytes",
    "len(a), a.element_size()",
    "[row.sum() for row in a], [*a.split(2)], a.unbind(1), a.chunk(2)",
    "a.sum().item(), float(b.sum()), int(a.sum()), bool((a == a).all()), a.tolist(), 3 in b",
    "f'{a.sum():.2f}', sum(a), max(a.sum(), b.sum()), a is None, a != 'a', a == None",
    "np.asarray(a).tolist(), a.numpy().shape, np.float64(2) * a, a * np.int64(3), a.device",
    "a.clone(), a.detach(), a.cumsum(0), a.sort(1), a.topk(2), a.isnan().any(), a.is_cuda",
    "a.clamp(min=1), a.new_zeros(3), a.type_as(b), torch.allclose(a, a), a.equal(b)",
)


def same(given, wanted):
    """Whether two pytrees are equal, where one has DTensors for the tensors of the other."""
    ours, spec = flatten(given, is_leaf=is_dtensor)
    plain, wanted_spec = flatten(wanted)
    assert len(ours) == len(plain), (spec, wanted_spec)
    for x, y in zip(ours, plain, strict=True):
        if isinstance(y, torch.Tensor):
            full = x.full() if isinstance(x, DTensor) else x
            assert full.dtype is y.dtype
            assert full.shape == y.shape
            assert torch.allclose(full, y, rtol=0, atol=0, equal_nan=True), (full, y)
        else:
            assert type(x) is type(y) or isinstance(y, tuple)
            assert x == y


@given(st.data(), sharded(ANY), st.sampled_from(FORMS))
def test_what_is_written_for_tensors_goes_for_dtensors(data, pair, form):
    names = {"torch": torch, "np": np}
    part = data.draw(st.sampled_from(_parts(form)))
    same(eval(part, {**names, **pair}), eval(part, {**names, **ANY}))


def _parts(form):
    """The expressions of a tuple that is written out."""
    return [ast.unparse(part) for part in ast.parse(form, mode="eval").body.elts]


@given(sharded(ANY), st.sampled_from(BINARY), st.sampled_from([2, 3.0, True, None]), st.booleans())
def test_operators_take_numbers_and_tensors_on_both_sides(pair, op, number, swapped):
    assume(not (op is operator.sub and number is True))  # which torch refuses
    other = (pair["b"], B) if number is None else (number, number)
    ours, plain = (pair["a"], other[0]), (A, other[1])
    same(op(*(ours[::-1] if swapped else ours)), op(*(plain[::-1] if swapped else plain)))


@few
@given(sharded(ANY))
def test_backward_is_that_of_one_process(pair):
    a, b = (x.detach().requires_grad_() for x in (pair["a"], pair["b"]))
    (a * b + a).sum().backward()
    p, q = A.clone().requires_grad_(), B.clone().requires_grad_()
    (p * q + p).sum().backward()
    same((a.grad, b.grad), (p.grad, q.grad))
    assert a.requires_grad
    assert (a * b).detach().grad is None


@few
@given(sharded(ANY), sharded(ANY))
def test_backward_takes_a_cotangent_in_any_layout(pair, others):
    a = pair["a"].detach().requires_grad_()
    wanted = others["b"].full()
    if others["b"].mesh is not a.mesh:
        others = {"b": distribute(B, a.layout.mesh.layout(), a.comm)}
    else:
        others = {"b": DTensor(others["b"].local, others["b"].type, a.comm)}
    (a * a).backward(others["b"])
    same(a.grad, 2 * A * wanted)


@few
@given(sharded(ANY), sharded(ANY))
def test_gradients_by_autograd_are_those_of_one_process(pair, others):
    a, b = (x.detach().requires_grad_() for x in (pair["a"], pair["b"]))
    p, q = A.clone().requires_grad_(), B.clone().requires_grad_()
    wanted = torch.autograd.grad((p * q * p).sum(), (p, q), create_graph=True)
    grads = torch.autograd.grad((a * b * a).sum(), (a, b), create_graph=True)
    same(grads, wanted)
    (again,) = torch.autograd.grad(grads[0].sum(), b)
    same(again, torch.autograd.grad(wanted[0].sum(), q)[0])
    (weighted,) = torch.autograd.grad(a * b, a, grad_outputs=b.detach())
    same(weighted, B * B)


def test_gradients_by_autograd_take_what_torch_takes():
    x, y = (X.detach().requires_grad_() for _ in range(2))
    named = torch.autograd.grad((x * x).sum(), {"x": x})
    same(named, {"x": 2 * A})
    assert torch.autograd.grad((x * x).sum(), (x, y), allow_unused=True)[1] is None
    same(torch.autograd.grad(x.sum(), [y], materialize_grads=True), (0 * A,))
    with pytest.raises(FdtensorError, match="input 1 has no part in the outputs"):
        torch.autograd.grad((x * x).sum(), (x, y))
    with pytest.raises(NotTorchError, match="is no single number"):
        torch.autograd.grad(x * x, x)
    with pytest.raises(FdtensorError, match="takes no batch"):
        torch.autograd.grad(x * x, x, x, is_grads_batched=True)
    assert torch.equal(spmd(_double)(X).full(), 2 * A)


def _double(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x * x).sum(), x)[0]


@given(types(dtype=torch.float32))
def test_a_value_that_has_several_elements_is_no_number(type):
    x = distribute(full_tensor(type, 0), type.layout.mesh.layout(), _comm(type))
    if type.numel == 1:
        assert x.item() == full_tensor(type, 0).item()
        return
    for read in (bool, float, int, lambda x: x.item(), lambda x: x.backward()):
        with pytest.raises(NotTorchError, match="is no single number"):
            read(x)


def _comm(type):
    return SimulatedComm(Mesh(world=1 + max(type.mesh.ranks)))


MESH = Mesh(dp=2, tp=2)
COMM = SimulatedComm(MESH)
X = distribute(A, MESH.layout("dp", "tp"), COMM)

WRITES = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]


@pytest.mark.parametrize("name", sorted({*WRITES} - {"requires_grad_"}))
def test_no_method_writes(name):
    assert not hasattr(X, name)
    with pytest.raises(NotTorchError, match=r"never changes: write x = "):
        getattr(X, name)
    assert name not in dir(X)


def test_augmented_assignment_gives_another_one():
    x = X
    x += 1
    x *= X
    x @= X.T
    assert torch.equal(X.full(), A)
    assert torch.equal(x.full(), ((A + 1) * A) @ A.T)


def test_each_method_of_a_tensor_is_there_or_says_why_not():
    missing = {n for n in dir(torch.Tensor) if _public(n) and not hasattr(X, n)}
    for name in missing:
        with pytest.raises(NotTorchError) as raised:
            getattr(X, name)
        assert raised.value.hint
    kept = [n for n in dir(torch.Tensor) if _public(n) and n not in missing]
    assert len(kept) > 400


def _public(name):
    return not name.startswith("_") and name != "imag"  # torch too raises for that of reals


def test_a_module_takes_dtensors_by_its_tensors_alone_where_it_has_none():
    relu = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Flatten(0))
    same(relu(X), relu(A))
    with pytest.raises(ValueTreeError, match=r"fd.bind\(module, params\)"):
        torch.nn.Linear(4, 2, dtype=torch.float64)(X)


EINOPS = {
    "rearrange": lambda x: einops.rearrange(x, "a (b c) -> b a c", c=2),
    "rearrange a list": lambda x: einops.rearrange([x, x + 1], "n a b -> a n b"),
    "reduce": lambda x: einops.reduce(x, "a (b c) -> a b", "max", c=2),
    "mean": lambda x: einops.reduce(x, "a b -> ()", "mean"),
    "repeat": lambda x: einops.repeat(x, "a b -> b (a r)", r=3),
    "einsum": lambda x: einops.einsum(x, x, "a b, a c -> b c"),
    "pack": lambda x: einops.pack([x, x[0]], "* b")[0],
    "unpack": lambda x: einops.unpack(x, [[2], []], "* b")[0],
    "layer": lambda x: einops.layers.torch.Rearrange("a b -> b a")(x),
}


@pytest.mark.parametrize("f", EINOPS.values(), ids=EINOPS)
def test_functions_of_einops_take_dtensors(f):
    same(f(X), f(A))
    same(spmd(f)(X), f(A))
    own = func.grad(lambda x: f(x * x).sum())(X)
    same(own, torch.func.grad(lambda x: f(x * x).sum())(A))


def test_it_is_still_no_tensor():
    assert not torch.is_tensor(X)
    assert not isinstance(X, torch.Tensor)
    assert optree.tree_leaves([X]) == [X]
    assert len({X, X}) == 1
    same(call(torch.add, X, 1), A + 1)


# --- what torch says of one ----------------------------------------------------------------------


def of_a_row():
    mesh = Mesh(x=2)
    return distribute(torch.ones(4), mesh.layout("x"), SimulatedComm(mesh))


def test_optimizers_and_modules_of_torch_name_what_takes_one():
    x = of_a_row()
    with pytest.raises(TypeError, match=r"DTensor, for which fd.optim has .*local_tensors\(params"):
        torch.optim.AdamW([x])
    with pytest.raises(TypeError, match=r"DTensor, with which fd.bind\(module, {name: x}\)"):
        torch.nn.Linear(4, 4).weight = x
    assert not hasattr(x, "__name__")
    assert DTensor.__name__ == "DTensor"


def test_a_gradient_of_no_leaf_is_warned_of_at_the_line_that_asks():
    x = of_a_row().requires_grad_()
    source = torch.ones(4, requires_grad=True)
    given, owed = distribute(source, x.layout, x.comm), x.reshape(2, 2) @ x.reshape(2, 2)
    given.sum().backward()
    for y in (given, owed, x * 2, x.redistribute(x.mesh.layout())):
        with pytest.warns(UserWarning, match="is no leaf of autograd") as told:
            assert y.grad is None
        assert [one.filename for one in told] == [__file__]
        assert "requires_grad_()" in str(told[0].message)
    assert source.grad is not None
    assert x.grad is None
    assert x.detach().grad is None
    assert (x.detach().reshape(2, 2) @ x.detach().reshape(2, 2)).grad is None


def test_a_gradient_that_was_asked_to_be_kept_is_there():
    x = of_a_row().requires_grad_()
    y = x * 2
    for leaf in y.local:
        leaf.retain_grad()
    y.sum().backward()
    assert torch.equal(y.grad.full(), torch.ones(4))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def hooked():
    module = torch.nn.Tanh()
    module.register_full_backward_hook(lambda module, grads, given: (grads[0] * 5,))
    return module


@pytest.mark.parametrize(
    "function",
    [
        Square.apply,
        hooked(),
        lambda x: checkpoint(lambda x: x * x, x, use_reentrant=True),
    ],
)
def test_what_would_lose_a_derivative_of_a_dtensor_is_refused(function):
    comm = SimulatedComm(Mesh(x=2))
    x = distribute(torch.arange(4.0), comm.mesh.layout("x"), comm)
    with pytest.raises(NotTorchError, match="takes derivatives of tensors of torch"):
        function(x.requires_grad_())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch looks for tensors that require a gradient
        assert torch.equal(function(x).full(), function(x.full()))


@pytest.mark.parametrize("function", [Square.apply, hooked()])
def test_call_takes_the_derivatives_of_functions_and_hooks(function):
    comm = SimulatedComm(Mesh(x=2))
    x = distribute(torch.arange(4.0), comm.mesh.layout("x"), comm).requires_grad_()
    plain = torch.arange(4.0, requires_grad=True)
    call(function, x).sum().backward()
    function(plain).sum().backward()
    assert torch.equal(x.grad.full(), plain.grad)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (2 * x, w.detach()),
        lambda x, w: (x * w.detach(), x),
        lambda x, w: (torch.where(x > w, x, 3 * x), w > 1),
        lambda x, w: (x * w, x),
        lambda x, w: (x + 0 * w.view(2, 2).t().reshape(4), x),
        lambda x, w: (x + w[1] * 2, w.clone()),
    ],
)
def test_what_has_a_gradient_is_what_has_one_in_one_process(function):
    comm = SimulatedComm(Mesh(x=2))
    plain = [torch.arange(4.0, requires_grad=True) for _ in "xw"]
    ours = [
        distribute(torch.arange(4.0), comm.mesh.layout("x"), comm).requires_grad_() for _ in "xw"
    ]
    function(*plain)[0].sum().backward()
    spmd(function)(*ours)[0].sum().backward()
    same([t.grad for t in ours], [t.grad for t in plain])
    end, due = spmd(function)(*ours)[0].sum(), function(*plain)[0].sum()
    grads = torch.autograd.grad(end, ours, allow_unused=True)
    same(grads, torch.autograd.grad(due, plain, allow_unused=True))


def test_what_nothing_reads_has_no_gradient():
    comm = SimulatedComm(Mesh(x=2))
    x, w = (
        distribute(torch.arange(4.0), comm.mesh.layout("x"), comm).requires_grad_() for _ in "xw"
    )
    double = spmd(lambda x, w: 2 * x)
    double(x, w).sum().backward()
    assert x.grad.full().tolist() == [2.0] * 4
    assert w.grad is None
    assert not double(x.detach(), w).requires_grad
    assert torch.autograd.grad(double(x, w).sum(), [w], allow_unused=True) == (None,)
    with pytest.raises(FdtensorError, match="has no part in the outputs"):
        torch.autograd.grad(double(x, w).sum(), [w])


def test_backward_of_several_leaves_gradients_in_the_inputs_that_are_named():
    comm = SimulatedComm(Mesh(x=2))

    def gradients(values, named):
        x, w = values
        torch.autograd.backward([(x * x).sum(), x * w], [None, w.detach()], **named(x, w))
        (x * w).sum().backward(inputs=[w])
        return x.grad, w.grad

    for named in (lambda x, w: {}, lambda x, w: {"inputs": [w]}, lambda x, w: {"inputs": {"a": x}}):
        ours = [
            distribute(torch.arange(4.0) + k, comm.mesh.layout("x"), comm).requires_grad_()
            for k in range(2)
        ]
        plain = [(torch.arange(4.0) + k).requires_grad_() for k in range(2)]
        same(gradients(ours, named), gradients(plain, named))
    with pytest.raises(FdtensorError, match="marked by requires_grad_"):
        torch.autograd.backward((ours[0] * ours[1]).sum(), inputs=ours[0])  # torch takes its rows
    with pytest.raises(RuntimeError, match="cannot be empty"):
        (ours[0] * ours[1]).sum().backward(inputs=[])
    for derivative in (torch.autograd.backward, lambda ends: torch.autograd.grad(ends, ours)):
        with pytest.raises(FdtensorError, match="not of both together"):
            derivative([(ours[0] * ours[1]).sum(), (plain[0] * plain[1]).sum()])


@pytest.mark.parametrize("name", ["max", "min", "cummax", "cummin", "sort", "argmax"])
def test_torch_itself_says_that_it_orders_no_complex_numbers(name):
    comm = SimulatedComm(Mesh(x=2))
    x = distribute(torch.ones(4, 3, dtype=torch.complex64), comm.mesh.layout("x"), comm)
    with pytest.raises(RuntimeError, match="omplex"):
        call(getattr(torch, name), x, 0)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "mul", "matmul", "sub", "pow"])
def test_an_array_of_numpy_is_an_operand_as_a_plain_tensor_is(name):
    function = getattr(operator, name)
    mesh = Mesh(x=2)
    x = distribute(torch.ones(4), mesh.layout("x"), SimulatedComm(mesh))
    for pair in [(x, np.ones(4)), (np.ones(4), x)]:
        with pytest.raises(FdtensorError, match="is a plain tensor of shape"):
            function(*pair)
    if name != "matmul":
        for pair in [(x, np.array(2.0)), (np.array(2.0), x)]:
            expected = function(*(torch.ones(4) if a is x else torch.tensor(2.0) for a in pair))
            assert torch.equal(function(*pair).full(), expected)


def test_functions_of_numpy_take_the_full_array_and_its_operators_compute_as_pythons():
    comm = SimulatedComm(Mesh(x=2))
    full = torch.arange(6.0).view(2, 3) - 2.5
    x, array = distribute(full, comm.mesh.layout(None, "x"), comm), full.numpy()
    assert np.array_equal(np.sqrt(np.abs(x)), np.sqrt(np.abs(array)))
    assert np.array_equal(np.concatenate([x, array]), np.concatenate([array, array]))
    assert (np.sum(x, axis=0) == array.sum(0)).all()
    assert np.linalg.norm(x) == np.linalg.norm(array)
    assert np.array_equal(np.add.reduce(x), array.sum(0))
    assert (np.shape(x), np.ndim(x), np.size(x), np.size(x, 1)) == ((2, 3), 2, 6, 3)
    for name in ("add", "subtract", "multiply", "divide", "remainder", "less", "greater_equal"):
        ufunc = getattr(np, name)
        swapped = ufunc(np.float32(2), x)
        assert isinstance(swapped, DTensor)
        assert torch.equal(swapped.full(), torch.from_numpy(ufunc(np.float32(2), array)))
    array = array.copy()
    array += x
    assert np.array_equal(array, 2 * full.numpy())
    for write in (
        lambda: np.add(array, array, out=x),
        lambda: np.sum(array, axis=0, out=x),
        lambda: np.copyto(x, array),
        lambda: np.fill_diagonal(x, 9),
        lambda: np.put(x, [0], 9),
        lambda: np.add.at(x, [0], 5),
    ):
        with pytest.raises((NotTorchError, ValueError), match=r"never changes|read-only|writ"):
            write()
    assert isinstance(np.subtract(x, 2), DTensor)
    assert isinstance(np.less(x, x), DTensor)
    assert np.array_equal(x.requires_grad_().numpy(force=True), full.numpy())


def test_the_shape_for_numpy_moves_nothing():
    comm = SimulatedComm(Mesh(x=2))
    x = distribute(torch.arange(6.0).view(2, 3), comm.mesh.layout(None, "x"), comm)
    np.shape(x), np.ndim(x), np.size(x)
    assert not any(comm.received.values())
