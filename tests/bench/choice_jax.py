"""The bytes that a rank receives as JAX cuts a case; to be run by a Python that has JAX, as a file.

    python tests/bench/choice_jax.py '{"axes": ["dp"], "sizes": [8], "args": [...]}'

An argument is a shape, a dtype and for each dim its axes; gradients have the layouts of parameters.
The partitioner of the version that is there cuts the function for CPU devices that XLA pretends,
and the collectives of the compiled text are counted. XLA computes in float32 on a CPU, so numbers
count for what they have in the case. Tests do not run this file: they have no JAX.
"""

from __future__ import annotations

import json
import os
import re
import sys
from math import prod
from typing import Any

_SHAPE = re.compile(r"(?:pred|[bsuf]+\d+)\[([\d,]*)\]")
_LINE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\}|mesh\[(.*?)\] \{(.*?)\})")
_AXIS = re.compile(r"'(\w+)'(?:=(\d+))?")


def received(text: str, itemsize: int) -> int:
    """The bytes of the collectives of a compiled module, by the formulas of `Received`."""
    total = 0
    for line in text.splitlines():
        if not (found := _LINE.search(line)):
            continue
        count = _members(line)
        shapes = [s.split(",") if s else [] for s in _SHAPE.findall(found[1])]
        out = itemsize * sum(prod(map(int, shape)) for shape in shapes)
        match found[2]:
            case "all-reduce":
                total += 2 * out * (count - 1) // count
            case "reduce-scatter":
                total += out * (count - 1)
            case "collective-permute":
                total += out
            case _:
                total += out * (count - 1) // count
    return total


def _members(line: str) -> int:
    """How many devices a collective has: `[4,2]<=[8]`, `{{0,1},{2,3}}` or axes of a mesh."""
    found = _GROUPS.search(line)
    if found is None:
        return 1
    if found[3]:
        sizes = dict(_AXIS.findall(found[3]))
        return prod(int(sizes[name]) for name, _ in _AXIS.findall(found[4]))
    return int(found[1] or found[2].count(",") + 1)


def main(case: dict[str, Any]) -> int:
    """The bytes of a case."""
    flags = f"--xla_force_host_platform_device_count={prod(case['sizes'])}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    import jax
    from jax import numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh(
        tuple(case["sizes"]),
        tuple(case["axes"]),
        axis_types=(jax.sharding.AxisType.Auto,) * len(case["axes"]),
    )

    def typed(shape: Any, dtype: str, dims: Any) -> Any:
        spec = PartitionSpec(*[tuple(axes) or None for axes in dims])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def mlp(p: Any, x: Any) -> Any:
        return jnp.square(jax.nn.gelu(x @ p["up"], approximate=False) @ p["down"]).mean()

    def layer(p: Any, x: Any, cos: Any, sin: Any) -> Any:
        def normed(x: Any, weight: Any) -> Any:
            return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight

        def heads(name: str) -> Any:
            return (h @ p[name]).reshape(*h.shape[:2], -1, cos.shape[-1])

        def turned(x: Any) -> Any:
            first, second = jnp.split(x, 2, -1)
            return x * cos[:, None] + jnp.concatenate([-second, first], -1) * sin[:, None]

        h = normed(x, p["norm1"])
        seen = jax.nn.dot_product_attention(
            turned(heads("q")), turned(heads("k")), heads("v"), is_causal=True
        )
        x = x + seen.reshape(*h.shape[:2], -1) @ p["out"]
        h = normed(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def llama(params: Any, x: Any, cos: Any, sin: Any) -> Any:
        for p in params:
            x = layer(p, x, cos, sin)
        return jnp.square(x).mean()

    params, *rest = case["args"]
    args = [{n: typed(*t) for n, t in p.items()} for p in params], *[typed(*t) for t in rest]
    f = llama if len(rest) == 3 else lambda params, x: mlp(params[0], x)
    shardings = jax.tree.map(lambda t: t.sharding, args[0])
    compiled = jax.jit(jax.grad(f), out_shardings=shardings).lower(*args).compile()
    return received(compiled.as_text(), jax.numpy.dtype(rest[0][1]).itemsize)


if __name__ == "__main__":
    print(main(json.loads(sys.argv[1])))
