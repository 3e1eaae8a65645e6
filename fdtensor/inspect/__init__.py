"""Why a plan or program is what it is, and pictures of them.

It imports from all rooms up to `io`. It offers `explain`, `show`, `calibrate` and `estimate`, and
gives the values of the rooms below what they show of themselves: their HTML in a notebook, the
explanation of a program, the module of one of its ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.display import displays


@displays("html")
def _html(value: Any) -> str:
    from fdtensor.inspect.pictures import show

    return show(value).html


@displays("explanation")
def _explanation(program: Any, name: str | None) -> str:
    from fdtensor.inspect.explanation import explained

    return explained(program, name)


@displays("graph_module")
def _graph_module(program: Any, rank: int) -> torch.fx.GraphModule:
    from fdtensor.runtime.fx import to_fx

    return to_fx(program, rank)
