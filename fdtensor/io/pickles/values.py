"""`value_of`: what `torch.save` wrote: plain values, tensors, and objects of types opted in."""

from __future__ import annotations

import codecs
import enum
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from fdtensor.io.pickles.archive import Archive
from fdtensor.io.pickles.machine import Known, Names, check_key, name_of
from fdtensor.io.pickles.opcodes import unpickled
from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.kinds import is_iterable

__all__ = ["DTYPES", "Objects", "check_objects", "size_of", "value_of"]

Objects = Sequence[Callable[..., Any]]
"""Types, and functions that make objects, that files may name: they run with what the file says."""

DTYPES = {
    f"torch.{name}": Known(dtype)
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
}
"""The dtypes by all their names."""

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}


def check_objects(objects: object) -> None:
    """Raises `ArgumentError` for what are no types, nor functions that have a name."""
    given = objects if is_iterable(objects) else [objects]
    for thing in given:
        if not (callable(thing) and hasattr(thing, "__qualname__")):
            hint = "Write objects=(Thing,), with the classes that files may make values of."
            raise no_argument("objects", objects, "tuple of types", hint)


def value_of(
    data: memoryview,
    *,
    what: str,
    size: int,
    objects: Objects = (),
    check: bool = True,
    share: bool = False,
) -> Any:
    """The value that `torch.save` wrote to these bytes, which lie in a file of `size` bytes.

    Raises `CheckpointError` for objects of types that are not in `objects`, and, where `check`,
    for records that are not what their checksums say. Where `share`, tensors are views of `data`.
    """
    archive = Archive.of(data, what)
    names = _names(archive, check, share)
    value, _ = unpickled(
        archive.record("data.pkl"),
        names.with_more({name_of(thing): _opted(thing) for thing in objects}),
        what=what,
        size=size,
        hint="Objects run code of their types when they are made. If you trust the file with this "
        "one, pass objects=(...) with what has that name.",
        storage=_as_it_is,
    )
    return value


# --- the table -------------------------------------------------------------------------------


def size_of(sizes: Iterable[int] = ()) -> torch.Size:
    """A `torch.Size` of ints that are no bools, and not negative."""
    if type(sizes) not in (tuple, list) or not all(
        type(n) is int and 0 <= n < 2**63 for n in sizes
    ):
        raise ValueError("a size is no tuple of sizes")
    return torch.Size(sizes)


def _names(archive: Archive, check: bool, share: bool) -> Names:
    """The table of what a file of torch may name: storage is read from the archive."""
    kept: dict[str, torch.Tensor] = {}

    def storage(key: Any, count: int) -> torch.Tensor:
        if type(key) is not str:
            raise ValueError("a storage has no name")
        if key not in kept:
            record = archive.record(f"data/{key}", check)
            kept[key] = _bytes_of(record, share)
        if type(count) is not int or not 0 <= count <= kept[key].numel():
            raise ValueError(f"storage {key!r} has {kept[key].numel()} bytes, not {count}")
        return kept[key][:count]

    def second(id: Any, *rest: Any) -> torch.Tensor:
        return _tensor(storage, id, *rest)

    def third(id: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
        _, _, dtype, *bits = rest
        return _tensor(storage, id, offset, size, stride, None, None, *bits, dtype=dtype)

    return _PLAIN.with_more(
        {
            "torch._utils._rebuild_tensor_v2": Known(second, second),
            "torch._utils._rebuild_tensor_v3": Known(third, third),
        }
    )


def _as_it_is(id: Any) -> Any:
    """A persistent id: what it stands for is read when a tensor is made of it."""
    if type(id) is not tuple or len(id) != 5 or id[0] != "storage":
        raise ValueError("it refers to what is no storage")
    return id


def _bytes_of(record: memoryview, share: bool) -> torch.Tensor:
    if not len(record):
        return torch.empty(0, dtype=torch.uint8)
    read = torch.frombuffer(record, dtype=torch.uint8)
    return read if share else read.clone()


def _tensor(
    storage: Callable[[Any, int], torch.Tensor],
    id: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _requires_grad: Any,
    _hooks: Any,
    bits: Any = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A tensor of a storage: a view of its bytes, which cannot leave them."""
    _, kind, key, device, count = _as_it_is(id)
    kind = kind if isinstance(kind, torch.dtype) else None
    dtype = dtype or kind or torch.uint8
    width = (kind or torch.uint8).itemsize
    if type(count) is not int or count < 0 or not isinstance(dtype, torch.dtype):
        raise ValueError("a storage has no size")
    size, stride = size_of(size), size_of(stride)
    if type(offset) is not int or offset < 0 or len(size) != len(stride) or len(size) > 64:
        raise ValueError("a tensor has no shape")
    flat = storage(key, count * width)
    flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    last = offset + sum((n - 1) * by for n, by in zip(size, stride, strict=True))
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    if last >= flat.numel():
        raise ValueError(f"a tensor of shape {tuple(size)} leaves its storage")
    tensor = flat.as_strided(size, stride, offset)
    bits = bits if isinstance(bits, dict) else {}
    tensor = tensor.conj() if bits.get("conj") else tensor
    tensor = -tensor if bits.get("neg") else tensor
    return tensor if device == "cpu" else tensor.to(torch.device(str(device)))


def _parameter(tensor: torch.Tensor, requires_grad: Any, _hooks: Any = None) -> torch.nn.Parameter:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("a parameter is no tensor")
    return torch.nn.Parameter(tensor, bool(requires_grad))


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError(f"it has layout {name}")
    return torch.strided


def _gathered(kind: type, items: Any = ()) -> Any:
    """A set or frozenset of a list."""
    if type(items) not in (list, tuple):
        raise ValueError("a set is made of no list")
    for item in items:
        check_key(item)
    return kind(items)


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes are made of no text")
    return text.encode("latin-1")


def _copied(kind: type, source: Any = b"", encoding: Any = None) -> Any:
    """Bytes of bytes: of an int they would be as many zeros."""
    if encoding is not None:
        source = _encoded(source, encoding)
    if not isinstance(source, (bytes, bytearray, list)):
        raise ValueError("bytes are made of no bytes")
    return kind(source)


def _counted(source: Any = None) -> Counter[Any]:
    if source is not None and type(source) is not dict:
        raise ValueError("a Counter is made of no dict")
    return Counter(source)


def _defaulting(factory: Any = None) -> defaultdict[Any, Any]:
    if factory not in (None, int, float, str, list, dict, set, tuple, bool):
        raise ValueError("a defaultdict has a default that it may not have")
    return defaultdict(factory)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("a complex number is made of no floats")
    return complex(real, imaginary)


def _device(*args: Any) -> torch.device:
    return torch.device(*args)


def _attributes(ordered: Any, state: Any) -> None:
    """Puts back the versions that a state dict of a module carries."""
    if type(state) is not dict or set(state) - {"_metadata"}:
        raise ValueError("an OrderedDict has attributes that it may not have")
    ordered.__dict__.update(state)


_PLAIN = Names(
    {
        **DTYPES,
        **{f"torch.{name}Storage": Known(dtype) for name, dtype in _STORAGES.items()},
        "torch.storage.UntypedStorage": Known(torch.UntypedStorage),
        "torch._utils._rebuild_parameter": Known(_parameter, _parameter),
        "torch.serialization._get_layout": Known(_layout, _layout),
        "torch.Size": Known(torch.Size, size_of, size_of),
        "torch.device": Known(torch.device, _device),
        "torch.strided": Known(torch.strided),
        "collections.OrderedDict": Known(
            OrderedDict, lambda: OrderedDict(), lambda: OrderedDict(), _attributes
        ),
        "collections.Counter": Known(Counter, _counted),
        "collections.defaultdict": Known(defaultdict, _defaulting),
        "builtins.set": Known(set, partial(_gathered, set)),
        "builtins.frozenset": Known(frozenset, partial(_gathered, frozenset)),
        "builtins.bytes": Known(bytes, partial(_copied, bytes)),
        "builtins.bytearray": Known(bytearray, partial(_copied, bytearray)),
        "builtins.complex": Known(complex, _complex),
        **{f"builtins.{t.__name__}": Known(t) for t in (int, float, str, bool, list, dict, tuple)},
        "builtins.long": Known(int),
        "builtins.unicode": Known(str),
        "_codecs.encode": Known(codecs.encode, _encoded),
    }
)


# --- types that are opted in -----------------------------------------------------------------


def _opted(thing: Any) -> Known:
    """A type, or a function that makes objects, as pickle itself would use it."""
    new = partial(thing.__new__, thing) if isinstance(thing, type) else None
    return Known(thing, thing, None if isinstance(thing, enum.EnumMeta) else new, _with_state)


def _with_state(target: Any, state: Any) -> None:
    setter = getattr(target, "__setstate__", None)
    if setter is not None:
        setter(state)
        return
    slots = None
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        target.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(target, name, value)
