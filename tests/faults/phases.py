"""The phases: what each rank does, in order, with what earlier ones have left."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import fdtensor as fd

__all__ = ["DIFFER", "PHASES", "ROWS"]

ROWS = 8

Phase = Callable[[SimpleNamespace], Any]


def connect(has: SimpleNamespace) -> None:
    has.comm = fd.connect(has.mesh, timeout=has.timeout)


def distribute(has: SimpleNamespace) -> None:
    full = torch.arange(float(ROWS * 4)).view(ROWS, 4)
    has.x = fd.distribute(full, has.mesh.layout("x"), has.comm)
    has.w = fd.distribute(torch.ones(4, 4), has.mesh.layout(), has.comm)


def first_call(has: SimpleNamespace) -> None:
    has.step = fd.spmd(lambda x, w: (x @ w).sum())
    has.loss = has.step(has.x, has.w)


def cached_call(has: SimpleNamespace) -> None:
    has.loss = has.step(has.x, has.w)


def other_call(has: SimpleNamespace) -> None:
    has.other = has.step(has.w, has.w)


def local_call(has: SimpleNamespace) -> None:
    fd.call(torch.mul, has.x, 2.0)
    has.y = fd.call(torch.mul, has.x, has.factor)


def redistribute(has: SimpleNamespace) -> None:
    has.columns = has.x.redistribute(has.mesh.layout(None, "x"))


def redistribute_back(has: SimpleNamespace) -> None:
    has.rows = has.columns.redistribute(has.mesh.layout("x"))


def full(has: SimpleNamespace) -> None:
    has.full = has.x.full()


def item(has: SimpleNamespace) -> None:
    has.number = fd.call(torch.Tensor.item, has.loss)


def backward(has: SimpleNamespace) -> None:
    x, w = has.x.detach().requires_grad_(), has.w.detach().requires_grad_()
    has.step(x, w).full().backward()


def shard_map(has: SimpleNamespace) -> None:
    layout = has.mesh.layout("x")
    total = fd.shard_map(lambda x: fd.collectives.psum(x, "x"), has.mesh, layout, has.mesh.layout())
    has.total = total(has.x)


def optimizer(has: SimpleNamespace) -> None:
    opt = fd.optim.AdamW(lr=1e-3)
    params, grads = {"w": has.x}, {"w": has.x}
    has.params, has.state = opt.step(params, grads, opt.init(params))


def random(has: SimpleNamespace) -> None:
    draw = fd.spmd(torch.nn.functional.dropout)
    draw(has.x, key=fd.random.key(1))
    has.drawn = draw(has.x, key=fd.random.key(has.seed))


def save(has: SimpleNamespace) -> None:
    has.path = Path(tempfile.gettempdir()) / has.name
    fd.save_checkpoint({"x": has.x}, has.path, has.comm, overwrite=True)


def save_behind(has: SimpleNamespace) -> None:
    saving = fd.save_checkpoint({"x": has.x}, has.path, has.comm, overwrite=True, wait=False)
    assert saving is not None
    has.y = fd.call(torch.relu, has.x)
    saving.wait()


def load(has: SimpleNamespace) -> None:
    has.loaded = fd.load_checkpoint(has.path, {"x": has.mesh.layout("x")}, has.comm)


PHASES: dict[str, Phase] = {
    f.__name__: f
    for f in (
        connect, distribute, first_call, cached_call, other_call, local_call, redistribute,
        redistribute_back, full, item, backward, shard_map, optimizer, random, save, save_behind,
        load,
    )
}  # fmt: skip
"""By name, in order."""

DIFFER = ("local_call", "random")
"""Those that read a number that may be another one on a rank: a factor or a seed."""
