"""`by_torch`: the bytes that a rank receives with PyTorch's DTensor, as one would write it.

Modules are cut by `parallelize_module`; the MLP reduces its gradients as data parallel does, Llama
has sequence parallelism and `fully_shard`. Processes are pretended and tensors are fake: bytes are
counted, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from tests.bench.choice_cases import GROUPS, HEAD, HEADS, HIDDEN, WIDTH, Case, turned
from tests.bench.count import Received

__all__ = ["by_torch"]


def by_torch(case: Case, mesh: Mesh) -> int | str:
    """The bytes that rank 0 receives; or why torch does not run the case.

    The process must have no process group, and keeps the pretended one.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
    _real_meshes()
    params, x, *rest = case.types(mesh)
    step = _mlp if case.name.startswith("MLP") else _llama
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return step(device_mesh, params, x, *rest)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]


def _real_meshes() -> None:
    """Lets `fully_shard` make meshes of real ranks while all other tensors are fake."""
    made = DeviceMesh.__init__

    def real(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            made(self, *args, **kwargs)

    DeviceMesh.__init__ = real  # type: ignore[method-assign]


def _mlp(mesh: DeviceMesh, params: Mapping[str, TensorType], x: TensorType) -> int:
    names = mesh.mesh_dim_names or ()
    torch.set_default_dtype(x.dtype)
    model = nn.Sequential(*[nn.Linear(*t.shape, bias=False) for t in params.values()])
    model.insert(1, nn.GELU())
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    batch = tuple(name for name in names if name != "tp")
    group = (mesh[batch]._flatten() if len(batch) > 1 else mesh[batch]).get_group()
    with Received() as received:
        model(torch.empty(x.local_shape(0))).square().mean().backward()
        for p in model.parameters():
            grad: Any = p.grad
            dist.all_reduce(grad.to_local() if "tp" in names else grad, group=group)
    return received.bytes


def _llama(mesh: DeviceMesh, params: list[Any], x: TensorType, *_: TensorType) -> int:
    names = mesh.mesh_dim_names or ()
    torch.set_default_dtype(x.dtype)
    model = nn.Sequential(*[_Layer() for _ in params])
    shape = list(x.local_shape(0))
    if "tp" in names:
        shape[1] //= mesh["tp"].size()
    for layer in model:
        if "tp" in names:
            parallelize_module(layer, mesh["tp"], _styles())
        fully_shard(layer, mesh=mesh["dp", "fs"] if "dp" in names else mesh["fs"])
    fully_shard(model, mesh=mesh["dp", "fs"] if "dp" in names else mesh["fs"])
    with Received() as received:
        model(torch.empty(shape)).square().mean().backward()
    return received.bytes


def _styles() -> dict[str, Any]:
    """Sequence parallelism around tensor parallel attention and MLP."""
    enter = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    found: dict[str, Any] = {f"norm{i}": SequenceParallel() for i in (1, 2)}
    found |= {part: PrepareModuleInput(**enter) for part in ("attention", "mlp")}
    found |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    found |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    for name in ("attention.out", "mlp.down"):
        found[name] = RowwiseParallel(output_layouts=Shard(1))
    return found


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), _Attention()
        self.norm2, self.mlp = nn.RMSNorm(WIDTH), _Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        cos = sin = torch.empty(h.shape[1], HEAD)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))
