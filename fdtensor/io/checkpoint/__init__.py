"""Checkpoints: pytrees of DTensors as `torch.distributed.checkpoint` stores them, for any mesh.

Each file defines one thing, in this order:

    names            a pytree as named leaves, with the names of torch's state dicts
    stored contents  what files hold: names, shapes and dtypes
    headers places   the same of safetensors files, and where these are written
    boxes            blocks as rectangles, the pieces that files have
    records catalog  the metadata of a checkpoint, read without running it, and what it says
    folder           a directory with such metadata, under its own checksum
    request          what is asked of files against what they hold; every mistake at once
    fresh            memory that is filled piece by piece
    together         how all ranks fail where one does
    read elsewhere   pieces from files, and from what a StorageReader reads
    load             what loads a checkpoint
    fingerprint same what ranks claim to hold alike
    shares           what each rank writes
    siblings         the checkpoints beside one: which is the newest, which are deleted
    write background how one is written, and how while the ranks go on
    save             what saves one
"""

from fdtensor.io.checkpoint.background import Saving
from fdtensor.io.checkpoint.contents import checkpoint_contents
from fdtensor.io.checkpoint.load import load_checkpoint
from fdtensor.io.checkpoint.save import save_checkpoint
from fdtensor.io.checkpoint.siblings import latest_checkpoint
from fdtensor.io.checkpoint.stored import Contents, Stored

__all__ = [
    "Contents",
    "Saving",
    "Stored",
    "checkpoint_contents",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
