"""On real ranks too, a function is recorded once for all sizes of a dim."""

import torch
import torch.nn.functional as F

from fdtensor import Mesh, connect, distribute, spmd

HEADS, WIDTH = 4, 8


def attend(params, x, keys, values):
    """A step of generation: the next position, and the caches with one more entry."""
    batch = x.shape[0]
    q, k, v = [
        t.view(batch, 1, HEADS, -1).transpose(1, 2) for t in (x @ params["qkv"]).chunk(3, -1)
    ]
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    out = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).reshape(batch, 1, -1)
    return out @ params["out"], keys, values


def given():
    draw = torch.Generator().manual_seed(0)
    width = HEADS * WIDTH
    params = {
        "qkv": torch.randn(width, 3 * width, generator=draw) / width**0.5,
        "out": torch.randn(width, width, generator=draw) / width**0.5,
    }
    cache = torch.randn(2, 4, HEADS, 3, WIDTH, generator=draw)
    return params, torch.randn(4, 1, width, generator=draw), *cache


def generates(count):
    mesh = Mesh(dp=2, tp=2)
    comm = connect(mesh)
    params, x, keys, values = given()
    heads = mesh.layout("dp", "tp")
    layouts = {"qkv": mesh.layout(None, "tp"), "out": mesh.layout("tp")}
    params = {name: distribute(t, layouts[name], comm) for name, t in params.items()}
    x = distribute(x, mesh.layout("dp"), comm)
    keys, values = (distribute(t, heads, comm) for t in (keys, values))
    next_token = spmd(
        attend, dynamic={"keys": 2, "values": 2}, out_layouts=(x.layout, heads, heads)
    )
    for _ in range(count):
        x, keys, values = next_token(params, x, keys, values)
    sizes = sum(len(family.forward) for family in next_token.families.values())
    return x.full(), keys.shape, sizes


def test_a_cache_grows(pool4):
    params, x, keys, values = given()
    for _ in range(5):
        x, keys, values = attend(params, x, keys, values)
    for out, shape, recordings in pool4.run(generates, 5):
        torch.testing.assert_close(out, x, rtol=1e-5, atol=1e-5)
        assert shape == keys.shape
        assert recordings == 1


def last_batch(sizes):
    comm = connect(mesh := Mesh(dp=4))
    w = distribute(torch.arange(12.0).view(4, 3), mesh.layout(), comm).requires_grad_()
    loss = spmd(lambda w, x: torch.relu(x @ w).square().mean(), dynamic={"x": 0})
    for size in sizes:
        x = torch.arange(4.0 * size).view(size, 4) % 5 - 2
        loss(w, distribute(x, mesh.layout("dp"), comm)).backward()
    return w.grad.full(), [len(family.both) for family in loss.families.values()]


def test_batches_may_be_short(pool4):
    sizes = (8, 8, 5, 3, 2)
    w = torch.arange(12.0).view(4, 3).requires_grad_()
    for size in sizes:
        x = torch.arange(4.0 * size).view(size, 4) % 5 - 2
        torch.relu(x @ w).square().mean().backward()
    for gradient, recordings in pool4.run(last_batch, sizes):
        torch.testing.assert_close(gradient, w.grad)
        assert recordings == [1]
