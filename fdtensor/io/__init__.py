"""Distributed tensors in files, and in torch's own kind.

It imports from all rooms up to `tensors`. It offers checkpoints through
`torch.distributed.checkpoint`, safetensors read by blocks, `to_torch` and `from_torch`,
`shard_batches`, of which each rank reads its own rows, and `dump_calls`, the last calls of a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdtensor.layouts.lazy import lazy_names

if TYPE_CHECKING:
    from fdtensor.io.batches import Batches, shard_batches
    from fdtensor.io.checkpoint import (
        Saving,
        checkpoint_contents,
        latest_checkpoint,
        load_checkpoint,
        save_checkpoint,
    )
    from fdtensor.io.interop import from_torch, to_torch
    from fdtensor.io.safetensors import load_safetensors, save_safetensors
    from fdtensor.runtime.control.flight import dump_calls

__all__ = [
    "Batches",
    "Saving",
    "checkpoint_contents",
    "dump_calls",
    "from_torch",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_safetensors",
    "shard_batches",
    "to_torch",
]

if not TYPE_CHECKING:  # checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "io.batches": ["Batches", "shard_batches"],
            "io.checkpoint": [
                "Saving",
                "checkpoint_contents",
                "latest_checkpoint",
                "load_checkpoint",
                "save_checkpoint",
            ],
            "io.interop": ["from_torch", "to_torch"],
            "io.safetensors": ["load_safetensors", "save_safetensors"],
            "runtime.control.flight": ["dump_calls"],
        },
    )
