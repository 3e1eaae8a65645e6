"""`own_op`: an op of this library, which recorded functions keep as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["own_op"]

_LIBRARY = torch.library.Library("fdtensor", "FRAGMENT")


def own_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    batched: Callable[..., Any] | None = None,
) -> Any:
    """The op of a schema `name(operands) -> results`, which `run` computes on any device.

    `fake` gives results of the same types where operands have no numbers, `run` itself if it is
    None; `batched` is what `torch.library.register_vmap` takes.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    if fake is not None:  # register_fake would look for its caller in each module there is
        _LIBRARY.impl(name, fake, "Meta")
    if batched is not None:
        torch.library.register_vmap(f"fdtensor::{name}", batched, lib=_LIBRARY)
    return getattr(torch.ops.fdtensor, name).default
