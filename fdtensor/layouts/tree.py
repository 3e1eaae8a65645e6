"""Pytrees, by optree, in the namespace "fdtensor": the one file that names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import optree
import optree.dataclasses
import torch

from fdtensor.layouts.torch_private import torch_pytree

__all__ = [
    "argument",
    "broadcast_prefix",
    "flatten",
    "flatten_admitting",
    "key_orders",
    "mismatches",
    "paths",
    "register",
    "register_value",
    "unflatten",
]

NAMESPACE = "fdtensor"


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of a pytree and its structure; None is a node without leaves."""
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    return leaves, spec


def flatten_admitting(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of a pytree and its structure.

    Dataclasses in it and what torch has for nodes, as results of Hugging Face, are nodes from now
    on.
    """
    while True:
        leaves, spec = flatten(tree, is_leaf)
        kinds: set[Any] = {type(x) for x in leaves if is_leaf is None or not is_leaf(x)}
        if not [kind for kind in kinds if _admitted(kind)]:
            return leaves, spec


def _admitted(kind: Any) -> bool:
    """Whether a kind of leaf is a node from now on."""
    node: Any = torch_pytree.SUPPORTED_NODES.get(kind)
    if node is not None and kind is not torch.Size:  # a value, as numbers are

        def apart(value: Any) -> tuple[Any, _Context]:
            children, context = node.flatten_fn(value)
            return children, _Context(context)

        def whole(context: Any, children: Any) -> Any:
            return node.unflatten_fn([*children], context.value)

        optree.register_pytree_node(  # pyright: ignore[reportUnknownMemberType]  # optree's own
            kind, apart, whole, namespace=NAMESPACE
        )
    elif hasattr(kind, "__dataclass_fields__"):
        optree.dataclasses.register_node(kind, namespace=NAMESPACE)
    else:
        return False
    return True


class _Context:
    """What torch keeps of a node beside its children, which may have no hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)


def key_orders(tree: Any) -> tuple[tuple[Any, ...], ...]:
    """The keys of each dict of a tree in their order, and whether they are 1 or 1.0.

    In neither does the structure of a tree differ.
    """
    orders: list[tuple[Any, ...]] = []
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        values = node
        if node.__class__ is dict:
            values = node.values()
            keys = [key if key.__class__ is str else (key.__class__, repr(key)) for key in node]
            if len(node) > 1 or (keys and keys[0].__class__ is tuple):
                orders.append(tuple(keys))
        nodes += [value for value in values if value.__class__ in _PLAIN_NODES]
    return tuple(orders)


_PLAIN_NODES = frozenset({dict, list, tuple})


def unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The pytree of this structure with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """One entry of `prefix` for each leaf of `tree`, of which it may be a prefix.

    Raises ValueError where it is none.
    """
    return optree.broadcast_prefix(prefix, tree, is_leaf=is_leaf, namespace=NAMESPACE)


def mismatches(
    prefix: Any,
    tree: Any,
    is_leaf: Callable[[Any], bool],
    name: str,
    *,
    is_tree: bool = False,
) -> dict[str, str]:
    """Every place where `prefix` is no prefix of `tree`, with what is wrong.

    It is told of the one called `name`: the prefix, or the tree where it `is_tree`.
    """
    places: dict[str, str] = {}
    for error in optree.prefix_errors(prefix, tree, is_leaf=is_leaf, namespace=NAMESPACE):
        text = str(error(name))
        what, place, *_ = [*text.split("\n"), name]
        what = what.removeprefix("pytree structure error: ").removesuffix(" at key path")
        told = _difference(text, is_tree)
        places[place.strip().removesuffix(" tree root")] = told or what
    return places


def _difference(text: str, is_tree: bool) -> str:
    """How a prefix differs from a tree, by the words of optree, told of one of both."""
    has, lacks = (re.search(rf"{kind} key.*\n *\[(.*)\]", text) for kind in ("missing", "extra"))
    if has or lacks:
        has, lacks = (lacks, has) if is_tree else (has, lacks)
        told = f"lacks {lacks[1]}" if lacks else "", f"has {has[1]} beside" if has else ""
        return "different keys: " + ", ".join(filter(None, told))
    sides = re.findall(r"with (\d+) child", text) or re.findall(r"<class '(.*)'>", text)
    if len(sides) != 2:
        return ""
    own, other = reversed(sides) if is_tree else sides
    if own.isdigit():
        return f"{own} in place of {other} entries"
    own, other = ("leaf" if kind == "int" else kind for kind in (own, other))  # of a skeleton
    return f"a {own} in place of a {other}"


def paths(spec: optree.PyTreeSpec, name: str) -> list[str]:
    """Where each leaf is, as source: `tree['w'][0]`."""
    return [accessor.codify(name) for accessor in spec.accessors()]


def register(
    kind: type[Any],
    flatten: Callable[[Any], tuple[tuple[Any, ...], Any, tuple[str, ...]]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Makes a kind a node of these children, of static data besides, and of their attributes."""
    optree.register_pytree_node(  # pyright: ignore[reportUnknownMemberType]  # optree's own type
        kind, flatten, unflatten, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE
    )


def register_value(kind: type) -> None:
    """Makes a hashable kind of value a node without leaves."""
    optree.register_pytree_node(  # pyright: ignore[reportUnknownMemberType]  # optree's own type
        kind, _as_aux, _of_aux, namespace=NAMESPACE
    )


def _as_aux(value: Any) -> tuple[tuple[()], Any]:
    return (), value


def _of_aux(value: Any, _: object) -> Any:
    return value


def argument(path: str) -> str:
    """Where an argument is: `args[0][1]` as `argument 1`."""
    inner = path.removeprefix("args")
    if inner.startswith("[0]["):
        number, _, rest = inner.removeprefix("[0][").partition("]")
        return f"argument {number}{rest}"
    return f"argument {inner.removeprefix('[1]')}"
