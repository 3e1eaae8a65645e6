"""`init_device_mesh`: that of torch, once for each question in a process.

Each one has process groups of its own, which stay, and gloo looks a hundred times a second into
each: with those of all tests, ranks are busy with nothing else.
"""

import functools

from torch.distributed import device_mesh

__all__ = ["init_device_mesh"]

init_device_mesh = functools.cache(device_mesh.init_device_mesh)
