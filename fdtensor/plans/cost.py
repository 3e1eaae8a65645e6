"""`CostModel`: seconds of a step from its bytes, as data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import attrs
import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.record import Record
from fdtensor.layouts.remembered import remembered
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.cost_fields import (
    by_dtype,
    check_link,
    duration,
    flag,
    no_model,
    rate,
    table,
    text,
)
from fdtensor.plans.traffic import most_received

__all__ = [
    "A100",
    "ETHERNET",
    "GLOO",
    "H100",
    "H200",
    "INFINIBAND",
    "LOCAL",
    "NAMED_LINKS",
    "NCCL",
    "NVLINK",
    "TPU_V5P",
    "CostModel",
    "Link",
    "linked",
    "model_of",
    "seconds",
]


LOCAL = "local"
"""The kind of launch of an op that a rank runs by itself."""


@attrs.frozen(eq=False)
class Link(Record):
    """What connects the ranks along an axis, for `CostModel.with_links`.

    `latency` is in seconds for one more message, `bandwidth` in bytes per second into one rank.

    >>> pods = fd.cost.H100.with_links(dp=fd.cost.Link(latency=20e-6, bandwidth=5e9))
    """

    latency: float = attrs.field(converter=duration)
    bandwidth: float = attrs.field(converter=rate)


@attrs.frozen(eq=False)
class CostModel(Record):
    """Seconds of a step from bytes, as data: `launch + messages * latency + bytes / bandwidth`.

    Raises `PlanError` for times under 0, rates of 0 or less, and what is not finite.

    >>> import attrs
    >>> slow = attrs.evolve(fd.cost.NCCL, name="slow", latency=0.5, launch=[])
    >>> mesh = Mesh(x=2)
    >>> p = plan(TensorType((4,), torch.int64, mesh.layout("x")), mesh.layout(), cost=slow)
    >>> round(p.seconds, 6), p.cost.name
    (0.5, 'slow')
    """

    name: str = attrs.field(converter=text)
    latency: float = attrs.field(converter=duration)
    """Seconds for one more message."""
    bandwidth: float = attrs.field(converter=rate)
    """Bytes per second into one rank."""
    copy: float = attrs.field(converter=rate)
    """Bytes per second of a local copy, read and written."""
    flops: tuple[tuple[str, float], ...] = attrs.field(converter=by_dtype)
    """Floating-point operations per second of one rank by dtype, "" for all others; or a number."""
    launch: tuple[tuple[str, float], ...] = attrs.field(converter=table(duration))
    """Seconds that a call takes by itself, by kind of collective; "local" is an op of one rank."""
    slowdown: tuple[tuple[str, float], ...] = attrs.field(converter=table(duration))
    """How many times longer than `bandwidth` says, by kind; 1 where it is silent."""
    axes: tuple[tuple[str, float, float], ...] = attrs.field(
        default=(), converter=table(duration, rate)
    )
    """Axes with a latency and bandwidth of their own, whatever link a mesh names for them."""
    torus: bool = attrs.field(default=False, converter=flag)
    """Whether the ranks of an axis are a ring, where a message passes the ranks between."""

    def flops_of(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second on operands of this dtype."""
        return _flops_of(self, dtype)

    def with_links(self, **links: Link) -> CostModel:
        """The same model with links of their own for some axes of a mesh.

        A mesh can name its links too, `Mesh(dp=2, links={"dp": "infiniband"})`; these go before.

        >>> pods = fd.cost.H100.with_links(dp=fd.cost.INFINIBAND)
        >>> pods.axes
        (('dp', 1e-05, 40000000000.0),)
        """
        for axis, link in links.items():
            check_link(axis, link, Link)
        rest = [row for row in self.axes if row[0] not in links]
        rows = [(axis, link.latency, link.bandwidth) for axis, link in links.items()]
        return attrs.evolve(self, axes=(*rest, *rows))

    def link(self, axes: Sequence[str] | None) -> tuple[float, float]:
        """The latency and bandwidth of the slowest of `axes`."""
        own = {axis: (latency, bandwidth) for axis, latency, bandwidth in self.axes}
        links = [own[axis] for axis in axes or own if axis in own]
        plain = [(self.latency, self.bandwidth)] if not axes or len(links) < len(axes) else []
        return max(a for a, _ in links + plain), min(b for _, b in links + plain)


def model_of(cost: object) -> CostModel:
    """A cost model; that of NCCL for None. Raises `PlanError` for anything else."""
    if cost is None or isinstance(cost, CostModel):
        return cost or NCCL
    raise no_model(cost)


def _accelerator(
    name: str, peaks: Mapping[str, float], memory: float, link: float, torus: bool = False
) -> CostModel:
    """A model from the figures of a data sheet, of which a part is reached in practice."""
    return CostModel(
        name,
        latency=2e-6,
        bandwidth=0.8 * link,
        copy=0.85 * memory,
        flops=tuple((dtype, 0.7 * peak) for dtype, peak in peaks.items()),
        launch=(("", 10e-6),),
        slowdown=(("peer_to_peer", 1.3), ("exchange", 1.2)),
        torus=torus,
    )


_HOPPER = {"": 67e12, "bf16": 989e12, "f16": 989e12, "float8_e4m3fn": 1979e12}

H100 = _accelerator("h100", _HOPPER, memory=3.35e12, link=450e9)
"""NVIDIA H100 SXM, linked by NVLink.

Source: its data sheet (dense flops without TF32, bytes per second of memory, NVLink one way); of
flops 0.7, of memory 0.85 and of links 0.8 are taken to be reached.
"""

H200 = _accelerator("h200", _HOPPER, memory=4.8e12, link=450e9)
"""NVIDIA H200 SXM, linked by NVLink; source and parts reached as for `H100`."""

A100 = _accelerator(
    "a100", {"": 19.5e12, "bf16": 312e12, "f16": 312e12}, memory=2.039e12, link=300e9
)
"""NVIDIA A100 SXM of 80 GB, linked by NVLink; source and parts reached as for `H100`."""

TPU_V5P = _accelerator("tpu_v5p", {"": 459e12 / 6, "bf16": 459e12}, 2.765e12, 180e9, torus=True)
"""Google TPU v5p: each axis of the mesh is a ring of a torus.

Source: the documentation of Cloud TPU; float32 is taken as six passes in bfloat16, a link as 90 GB
per second each way, of which an axis has two.
"""

NVLINK = Link(2e-6, 0.8 * 450e9)
"""Eight H100 of one machine."""

INFINIBAND = Link(4e-6, 0.8 * 50e9)
"""Machines with a 400 Gb/s adapter for each accelerator."""

ETHERNET = Link(30e-6, 0.8 * 12.5e9)
"""Machines with 100 Gb/s for each accelerator."""

NAMED_LINKS = {"nvlink": NVLINK, "infiniband": INFINIBAND, "ethernet": ETHERNET}
"""The links that a mesh may name."""

NCCL = CostModel(
    "nccl",
    latency=INFINIBAND.latency,
    bandwidth=INFINIBAND.bandwidth,
    copy=1e12,
    flops=(("", 5e12), *H100.flops[1:]),
    launch=(("", 10e-6),),
    slowdown=(("peer_to_peer", 1.3), ("exchange", 1.2)),
)
"""The default of all: accelerators of many machines, linked by InfiniBand.

Halves are computed as by `H100`. Other work and copies are taken to be slower than they are, so
that a function that is tried with small float32 tensors is cut as a large one is: by the prices of
`H100` it is cheaper to gather these and to compute everything everywhere.
"""

GLOO = CostModel(
    "gloo",
    latency=4e-4,
    bandwidth=0.6e9,
    copy=8e9,
    flops=3e10,
    launch=(
        ("", 1.4e-3),
        ("peer_to_peer", 4e-4),
        ("all_to_all", 5e-5),
        ("exchange", 5e-5),
        ("all_reduce", 8e-4),
        ("reduce_scatter", 3e-3),
    ),
    slowdown=(
        ("all_gather", 1.6),
        ("all_reduce", 1.35),
        ("reduce_scatter", 3.0),
        ("exchange", 1.5),
    ),
)
"""Processes of one machine that talk by gloo: small tensors go best by one all-to-all, large ones
by messages from rank to rank, a reduce_scatter never (gloo runs it as an all_reduce)."""


@functools.cache
def _flops_of(cost: CostModel, dtype: torch.dtype) -> float:
    rates = dict(cost.flops)
    return rates.get(dtype_name(dtype), rates.get("", min(rates.values())))


def linked(cost: CostModel, mesh: Mesh) -> CostModel:
    """`cost` with the links that the mesh names, along axes for which it has none itself."""
    return _linked(cost, mesh) if mesh.links else cost


@remembered(4096)
def _linked(cost: CostModel, mesh: Mesh) -> CostModel:
    own = {axis for axis, _, _ in cost.axes}
    named = [(axis, NAMED_LINKS[link]) for axis, link in mesh.links if axis not in own]
    rows = [(axis, link.latency, link.bandwidth) for axis, link in named]
    return attrs.evolve(cost, axes=(*cost.axes, *rows)) if rows else cost


@remembered(16384)
def seconds(step: Step, cost: CostModel) -> float:
    """The seconds that `cost` gives for a step. Time: constant in the number of messages."""
    collective, moved = step.collective, _moved(step)
    time = collective.copied(step, moved) / cost.copy
    if not is_local(step):
        kind = collective.kind
        latency, bandwidth = _link(step, cost)
        launch, slowdown = dict(cost.launch), dict(cost.slowdown)
        time += launch.get(kind, launch.get("", 0.0)) + collective.messages(step) * latency
        time += moved * slowdown.get(kind, 1.0) * _hops(step, cost) / bandwidth
    return time


@remembered(16384)
def _moved(step: Step) -> int:
    """The bytes that the busiest rank receives, by any cost model."""
    return most_received((step,))


def _link(step: Step, cost: CostModel) -> tuple[float, float]:
    """The latency and bandwidth of the slowest link: of both meshes, and between two of `cost`."""
    axes, mesh, other = step.collective.link(), step.src.mesh, step.dst.mesh
    first = linked(cost, mesh).link(axes)
    if mesh is other:
        return first
    second = linked(cost, other).link(axes)
    return max(first[0], second[0]), min(first[1], second[1])


def _hops(step: Step, cost: CostModel) -> float:
    """How often a byte takes a link: of a ring, those of an exchange pass a quarter, halved by two
    directions; what is gathered or reduced goes from neighbor to neighbor.

    Source: "How to Scale Your Model", https://jax-ml.github.io/scaling-book/sharding
    """
    if not cost.torus or step.collective.kind not in _FAR:
        return 1.0
    mesh = step.src.mesh
    ring = max(mesh.axis_size(axis) for axis in step.collective.link() or mesh.axes)
    return max(1.0, ring / 4)


_FAR = ("all_to_all", "exchange", "peer_to_peer")
