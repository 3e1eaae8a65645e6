"""Mutants of JSON texts: what a damaged file, a careless hand or an attacker would give."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["mutant", "mutants"]

NUMBERS = (
    *(-1, 0, 1, 2, 3, 7, 64, 10**6, 2**31, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 10**30, 10**4000),
    *(0.0, -0.0, 0.5, 1.0, 2.0, -1.5, 1e308, 1e400, -1e400, float("nan")),
)
WORDS = (
    *("", "x", "dp", "tp", "a b", "sum", "avg", "product", "max", "min", "band", "bor", "bxor"),
    *("R", "S(0)", "S(1)", "S(2)", "S(0, f=2)", "S(0, f=1000000)", "S(0, [1,2])", "S(0, [2,1])"),
    *("P(sum)", "P(avg)", "P(max)", "P(min)", "S(0, 0:1 1:2)", "S(0, 0:2 1:3)", "S(-1)", "Q"),
    *("AllGather", "AllReduce", "AllToAll", "Broadcast", "Exchange", "Mask", "Pad", "Scale"),
    *("ReduceScatter", "Slice", "Step", "Record", "Local", "Layout", "annotations", "__doc__"),
    *("peer_to_peer", "all_to_all", "f32", "i64", "bool", "bf16", "c64", "f8", "Tensor", "nccl"),
    *("aten::relu", "aten::add.Tensor", "aten::from_file", "os.system", "__import__('os')", "\0"),
)
OTHERS = (None, True, False, [], {}, [[]], [None], {"": 0})

Path = tuple[Any, ...]


def mutants(texts: Sequence[str], count: int, seed: int) -> Iterator[str]:
    """`count` mutants, each of one of the texts, in which parts of others may be."""
    chance = random.Random(seed)
    for _ in range(count):
        text, other = chance.choice(texts), chance.choice(texts)
        yield mutant(text, other, chance)


def mutant(text: str, other: str, chance: random.Random) -> str:
    """The text with one to three changes to what it says, or to its characters."""
    if chance.random() < 0.15:
        return damaged(text, chance)
    tree = json.loads(text)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice(CHANGES)(tree, json.loads(other), chance)
    made = json.dumps(tree)
    if chance.random() < 0.03:
        return deepened(made, chance)
    if chance.random() < 0.03:
        return said_twice(made, tree, chance)
    return made


def places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Where each value in a tree is, those inside of others too."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Any, path: Path, value: Any) -> None:
    if path:
        at(tree, path[:-1])[path[-1]] = value


def some_place(tree: Any, chance: random.Random, kind: Any = object) -> Path:
    """A place in the tree whose value is of a kind; the root where there is none."""
    found = [path for path in places(tree) if isinstance(at(tree, path), kind)]
    return chance.choice(found) if found else ()


# --- changes to what a text says ---------------------------------------------------------------


def another_value(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance, (str, int, float, type(None)))
    pool = chance.choice((NUMBERS, WORDS, OTHERS))
    put(tree, path, copy.deepcopy(chance.choice(pool)))


def another_of_its_kind(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance, (str, int, float))
    value = at(tree, path)
    pool: Sequence[Any] = WORDS if isinstance(value, str) else NUMBERS
    put(tree, path, chance.choice(pool))


def a_little_more_or_less(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance, (int, float))
    value = at(tree, path)
    if isinstance(value, (int, float)):
        whole = min(value, 10**300)  # the largest that a float can be near
        put(tree, path, chance.choice((value + 1, value - 1, 2 * value, -value, float(whole))))


def a_value_from_elsewhere(tree: Any, other: Any, chance: random.Random) -> None:
    """The value of another place of the same kind, in this text or in another one."""
    path = some_place(tree, chance)
    source = chance.choice((tree, other))
    kind = type(at(tree, path))
    put(tree, path, copy.deepcopy(at(source, some_place(source, chance, kind))))


def the_same_place_of_another(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance)
    try:
        put(tree, path, copy.deepcopy(at(other, path)))
    except (KeyError, IndexError, TypeError):
        another_value(tree, other, chance)


def two_swapped(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance, (dict, list))
    inside = at(tree, path)
    keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    if len(keys) > 1:
        a, b = chance.sample(keys, 2)
        inside[a], inside[b] = inside[b], inside[a]


def one_left_out(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance)
    if path:
        del at(tree, path[:-1])[path[-1]]


def one_twice(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance, list)
    inside = at(tree, path)
    if isinstance(inside, list) and inside:
        i = chance.randrange(len(inside))
        inside.insert(chance.randrange(len(inside) + 1), copy.deepcopy(inside[i]))


def one_more(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance, (dict, list))
    inside, value = at(tree, path), copy.deepcopy(chance.choice((*WORDS, *NUMBERS, *OTHERS)))
    if isinstance(inside, list):
        inside.append(value)
    else:
        inside[chance.choice((*WORDS, *inside))] = value


def reversed_order(tree: Any, other: Any, chance: random.Random) -> None:
    path = some_place(tree, chance, list)
    if path:
        at(tree, path).reverse()


CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    another_value,
    another_of_its_kind,
    another_of_its_kind,
    a_little_more_or_less,
    a_little_more_or_less,
    a_value_from_elsewhere,
    a_value_from_elsewhere,
    the_same_place_of_another,
    two_swapped,
    one_left_out,
    one_twice,
    one_more,
    reversed_order,
)


# --- changes to its characters -----------------------------------------------------------------


def damaged(text: str, chance: random.Random) -> str:
    """The text with some characters changed, lost, doubled or cut off."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        i = chance.randrange(len(text))
        j = min(len(text), i + chance.choice((1, 1, 1, 2, 8, 60)))
        piece = text[i:j]
        made = chance.choice(
            ("", piece + piece, chance.choice('0123456789[]{},":-e.\\nR\0\ud800'), piece[::-1])
        )
        text = text[:i] + made + text[j:] or "0"
    return text[: chance.randrange(len(text) + 1)] if chance.random() < 0.1 else text


def deepened(text: str, chance: random.Random) -> str:
    """The text with a value that is nested very deep, or the text itself so."""
    depth = chance.choice((10, 1000, 10**5, 10**6))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}")))
    i = text.find(":", chance.randrange(len(text))) + 1
    return text[:i] + opening * depth + "1" + closing * depth + chance.choice((",", "")) + text[i:]


def said_twice(text: str, tree: Any, chance: random.Random) -> str:
    """The text with a key of the outermost object twice, with different values."""
    if not isinstance(tree, dict) or not tree:
        return text
    key = chance.choice(list(tree))
    return text[:-1] + f", {json.dumps(key)}: {json.dumps(chance.choice((1, *OTHERS)))}" + "}"
