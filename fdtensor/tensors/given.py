"""`Given`: what `distribute` is given, as tensors with their layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.prefixes import layout_of_each, whole_without_dims
from fdtensor.layouts.tree import flatten, flatten_admitting, paths, unflatten
from fdtensor.tensors.dtensor import is_dtensor

__all__ = ["Given"]


@attrs.frozen(eq=False)
class Given:
    """The tensors of a pytree, their layouts, and where they stand."""

    tensors: Sequence[Any]
    """Those of other libraries as tensors of torch; a DTensor, or None, as it is."""
    layouts: Sequence[Any]
    names: Sequence[str]
    """Such as `tree['w']`; the empty text for a single tensor."""
    leaves: Sequence[Any] = ()
    places: Sequence[int] = ()
    spec: Any = None
    """The structure; None for a single tensor."""

    @classmethod
    def of(cls, tree: Any, layouts: Any, absent: bool) -> Given:
        """What is given for all leaves; a rank where it is `absent` may give None."""
        single = cls([tree], [layouts], [""])
        if isinstance(tree, torch.Tensor) or (isinstance(layouts, Layout) and tree is None):
            return single
        if tree is None and absent:
            leaves, spec = flatten(layouts)
            return cls(
                [None] * len(leaves), leaves, paths(spec, "tree"), leaves, range(len(leaves)), spec
            )
        leaves, spec = flatten_admitting(tree, is_leaf=is_dtensor)
        if spec.is_leaf():
            return cls([_tensor(tree)], [layouts], [""])
        places = [i for i, leaf in enumerate(leaves) if is_dtensor(leaf) or _is_array(leaf)]
        if not places:
            return single if leaves else cls([], [], [], leaves, places, spec)
        wanted, names = layout_of_each(layouts, spec), paths(spec, "tree")
        tensors = {i: _tensor(leaves[i]) for i in places}
        ndims = [tensors[i].ndim if i in tensors else 1 for i in range(len(leaves))]
        wanted = whole_without_dims(layouts, spec, wanted, ndims)
        return cls(
            [*tensors.values()],
            [wanted[i] for i in places],
            [names[i] for i in places],
            leaves,
            places,
            spec,
        )

    def with_tensors(self, tensors: Sequence[Any]) -> Any:
        """The same pytree with these in place of its tensors."""
        if self.spec is None:
            return tensors[0]
        leaves = list(self.leaves)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        return unflatten(self.spec, leaves)


def _is_array(leaf: object) -> bool:
    """Whether a leaf is a tensor, or an array of another library."""
    return isinstance(leaf, (torch.Tensor, np.ndarray)) or hasattr(leaf, "__dlpack__")


def _copied(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor of an array, which may be reversed or of another byte order."""
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def _tensor(leaf: Any) -> Any:
    """An array as a tensor; anything else as it is."""
    if isinstance(leaf, torch.Tensor) or is_dtensor(leaf) or not _is_array(leaf):
        return leaf
    try:
        return _copied(leaf) if isinstance(leaf, np.ndarray) else torch.from_dlpack(leaf)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise LayoutError(
            f"an array of {getattr(leaf, 'dtype', 'no dtype')} is no tensor of torch.",
            error=error,
            hint="Convert it to a dtype that torch has.",
        ) from error
