"""Private names of `torch.distributed`, imported when first asked for: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

__all__ = [
    "NO_GROUPS",
    "any_unwaited",
    "c10d_group",
    "collectives_on_fakes",
    "memory_format_class",
    "default_store",
    "local_store",
    "store_port",
    "dtensor_spec_module",
    "group_tables",
    "local_tensor_of",
    "new_group_helper",
    "prefixed",
    "register_group",
    "rendezvous",
    "spec_of",
    "storage_info_class",
    "set_group_timeout",
    "strided_shard",
    "unregister_group",
]

NO_GROUPS: dict[str, Any] = {"_init_backend": False}
"""The argument that lets a DeviceMesh make no process groups, as on a rank outside of it."""

_C: Any = torch._C


# --- process groups --------------------------------------------------------------------------


def c10d_group(name: str) -> Any:
    """The process group of this name."""
    return _C._distributed_c10d._resolve_process_group(name)


def _c10d() -> Any:
    return import_module("torch.distributed.distributed_c10d")


def group_tables() -> Any:
    """What torch knows of groups: `pg_map` has backends and stores, `pg_group_ranks` the ranks."""
    return _c10d()._world


def register_group(name: str, group: Any) -> None:
    """Gives a group one more name, by which collectives find it."""
    _c10d()._register_process_group(name, group)


def unregister_group(name: str) -> None:
    """Takes a name from the group that has it."""
    _c10d()._unregister_process_group(name)


def set_group_timeout(group: Any, seconds: float) -> None:
    """Sets how long the ranks of a group wait for each other, from the next collective on."""
    _c10d()._set_pg_timeout(timedelta(seconds=seconds), group)


def any_unwaited() -> bool:
    """Whether some functional collective of this process is yet to be waited for."""
    return _C._distributed_c10d._get_work_registry_size() > 0


def default_store() -> Any:
    """The store through which the ranks of the default process group have met."""
    return _c10d()._get_default_store()


def local_store() -> Any:
    """A store that no other process sees."""
    return import_module("torch.distributed").HashStore()


def store_port(store: Any) -> int | None:
    """The port of the process that keeps a store; None for one without."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def rendezvous(*args: Any, **kwargs: Any) -> Any:
    """An iterator whose first entry is the store, the rank and how many there are."""
    return _c10d().rendezvous(*args, **kwargs)


def prefixed(store: Any, prefix: str) -> Any:
    """The keys of a store that begin with a prefix, as a store."""
    return _c10d().PrefixStore(prefix, store)


def new_group_helper(*args: Any, **kwargs: Any) -> Any:
    """What `torch.distributed.new_group` calls once it has made up a name."""
    return _c10d()._new_process_group_helper(*args, **kwargs)


def collectives_on_fakes() -> None:
    """Registers what functional collectives give on fake tensors: an import does it."""
    import_module("torch.distributed._functional_collectives")


# --- the DTensors of torch -------------------------------------------------------------------


def strided_shard() -> Any:
    """torch's placement for a dim that is cut into blocks first: the class `_StridedShard`."""
    return import_module("torch.distributed.tensor.placement_types")._StridedShard


def dtensor_spec_module() -> Any:
    """The module that defines `DTensorSpec` and `TensorMeta`."""
    return import_module("torch.distributed.tensor._dtensor_spec")


def spec_of(dtensor: Any) -> Any:
    """The `DTensorSpec` of a torch DTensor: mesh, placements and how they are read."""
    return dtensor._spec


def local_tensor_of(dtensor: Any) -> torch.Tensor:
    """The local tensor of a torch DTensor, outside of autograd."""
    return dtensor._local_tensor


# --- checkpoints -----------------------------------------------------------------------------


def storage_info_class() -> Any:
    """The record of where a piece of a checkpoint lies."""
    return import_module("torch.distributed.checkpoint.filesystem")._StorageInfo


def memory_format_class() -> Any:
    """The enum that stands for memory formats in the metadata of a checkpoint."""
    return import_module("torch.distributed.checkpoint.metadata")._MEM_FORMAT_ENCODING
