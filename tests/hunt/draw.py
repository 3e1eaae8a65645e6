"""`Draw`: a program in the making, run on plain tensors as it grows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, TypeVar

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from tests.hunt.layouts import drawn_layout
from tests.hunt.records import Input, Line, names_in
from tests.hunt.values import filled, forms_of, kind_of

__all__ = ["Draw", "Op", "Unfit"]

T = TypeVar("T")

DTYPES = {
    "f": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    "i": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    "c": (torch.complex128, torch.complex64),
    "b": (torch.bool,),
}
LARGEST = {torch.float16: 500.0, torch.bfloat16: 200.0, torch.float32: 1e5, torch.complex64: 1e5}
MOST_ELEMENTS = 500
MOST_INPUTS = 8


class Unfit(Exception):
    """What an op needs is not there: another one is drawn."""


@attrs.frozen(eq=False)
class Op:
    """An op of the table: the text of a call, or of a statement that writes in place."""

    name: str
    text: Callable[[Draw, str], str]
    """The source, given the name of the first operand."""
    kinds: str = "fic"
    """The kinds of dtype that the first operand may have; see `values.kind_of`."""
    exact: bool = True
    """Whether sums of its results are the same in any order, for moderate integers."""
    jumps: bool = False
    """Whether rounding may change its result by much: its operands must be exact."""
    distinct: bool = False
    """Whether it may say any of equal elements: the first operand must have none."""
    least: int = 0
    most: int = 5
    """The dims that the first operand may have."""
    writes: bool = False
    data: bool = False
    """Whether shapes depend on data."""
    fails: bool = False
    """Whether torch must raise."""
    weight: int = 1
    """How often it is drawn, beside others."""


class Draw:
    """Values, inputs and lines so far. What a choice is made of comes from `random` alone."""

    def __init__(
        self, random: Random, mesh: Mesh, dtype: torch.dtype, special: bool, formats: bool
    ) -> None:
        self.random, self.mesh, self.dtype = random, mesh, dtype
        self.special, self.formats = special, formats
        self.keyed = random.random() < 0.06
        self.values: dict[str, torch.Tensor] = {}
        self.exact: dict[str, bool] = {}
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.count = 0

    # choices

    def one(self, options: Iterable[T]) -> T:
        """One of some options."""
        every = list(options)
        if not every:
            raise Unfit
        return self.random.choice(every)

    def chance(self, part: float) -> bool:
        """True in this part of all cases."""
        return self.random.random() < part

    def between(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        if low > high:
            raise Unfit
        return self.random.randint(low, high)

    def dim(self, x: str) -> int:
        """A dim, counted from either end."""
        ndim = self[x].ndim
        if not ndim:
            raise Unfit
        return self.between(-ndim, ndim - 1)

    def dims(self, x: str) -> list[int]:
        """Some dims, none twice."""
        ndim = self[x].ndim
        some = self.random.sample(range(ndim), self.between(min(1, ndim), ndim))
        return [d - ndim if self.chance(0.3) else d for d in some]

    def keep(self) -> str:
        """A keepdim argument."""
        return self.one(("", "", ", keepdim=True"))

    def number(self, x: str) -> str:
        """A Python number that suits a tensor."""
        match kind_of(self[x].dtype):
            case "f":
                return self.one(("2", "3.0", "-1.5", "0.5", "0", "-1"))
            case "c":
                return self.one(("2", "1.5", "(1+2j)", "0", "-1"))
            case "b":
                return self.one(("True", "False"))
        return self.one(("1", "2", "3", "0"))

    # values

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(self[name].shape)

    def pick(self, fits: Callable[[torch.Tensor], bool]) -> str:
        """A value that fits, those of late rather than others."""
        names = [n for n, t in self.values.items() if fits(t)]
        if not names:
            raise Unfit
        if self.chance(0.5):
            names = names[-4:]
        return self.random.choice(names)

    def fresh(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, fill: str | None = None
    ) -> str:
        """A new input of this shape."""
        if math.prod(shape) > MOST_ELEMENTS:
            raise Unfit
        shape, dtype = tuple(shape), dtype or self.dtype
        fill = fill or self._fill(dtype)
        odd = fill in ("special", "wide")
        layout = drawn_layout(self.random, self.mesh, shape, dtype, fill != "special")
        pending = bool(layout.partial)
        form = self.one(("contiguous", *forms_of(shape, dtype, pending)))
        if not self.formats or (fill == "distinct" and form.startswith("expanded")):
            form = "contiguous"
        name = self._name()
        seed = self.random.randrange(10**6)
        given = Input(name, shape, dtype, fill, seed, form, layout)
        tensor = filled(given)
        self.inputs.append(given)
        self.values[name] = tensor
        self.exact[name] = fill != "real" and not (odd and kind_of(dtype) != "i")
        return name

    def _fill(self, dtype: torch.dtype) -> str:
        if self.special and kind_of(dtype) in "fc":
            return self.one(("special", "small"))
        if kind_of(dtype) == "i":
            return self.one(("small", "small", "distinct", "wide" if self.special else "small"))
        return self.one(("small", "small", "distinct", "unit", "real", "positive"))

    def _name(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def other(self, x: str) -> torch.dtype:
        """A dtype to combine with that of `x`: mostly the same."""
        if self.chance(0.85):
            return self[x].dtype
        return self.one(DTYPES[self.one("fib" if self[x].is_complex() is False else "fic")])

    def found(self, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """A value of this shape and dtype, sometimes, where there is one."""
        names = [n for n, t in self.values.items() if (*t.shape,) == (*shape,) and t.dtype == dtype]
        return self.random.choice(names) if names and self.chance(0.5) else None

    def sized(self, x: str, *shape: int) -> str:
        """A value of this shape and the dtype of `x`."""
        return self.found(shape, self[x].dtype) or self.fresh(shape, self[x].dtype)

    def partner(self, x: str, numbers: float = 0.3, same: bool = False) -> str:
        """What broadcasts with `x`, or to it where `same`: a number, a value, a new input."""
        if self.chance(numbers):
            return self.number(x)
        shape = self.shape(x)

        def fits(t: torch.Tensor) -> bool:
            if kind_of(t.dtype) != kind_of(self[x].dtype) and not self.chance(0.1):
                return False
            return _broadcasts(tuple(t.shape), shape, same)

        names = [n for n, t in self.values.items() if fits(t)]
        if names and self.chance(0.6):
            return self.random.choice(names)
        return self.fresh(self.thinner(shape), self.other(x))

    def thinner(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to this one."""
        found = [1 if n > 1 and self.chance(0.2) else n for n in shape]
        return found[self.between(0, len(found)) :] if self.chance(0.2) else found

    def twin(self, x: str, dtype: torch.dtype | None = None, fill: str | None = None) -> str:
        """A value of the shape and dtype of `x`, or of another dtype."""
        dtype = dtype or self[x].dtype
        known = self.found(self.shape(x), dtype) if fill is None else None
        return known or self.fresh(self.shape(x), dtype, fill)

    def mask(self, x: str, thin: bool = True) -> str:
        """Bools that broadcast to `x`, or have its shape."""
        shape = self.shape(x)
        known = self.found(shape, torch.bool)
        return known or self.fresh(self.thinner(shape) if thin else shape, torch.bool)

    def indices(self, shape: Sequence[int], below: int) -> str:
        """A tensor of integers in a range."""
        if below < 1 and math.prod(shape):
            raise Unfit
        dtype = torch.int64 if self.chance(0.8) else torch.int32
        return self.fresh(shape, dtype, f"index:{below}")

    # lines

    def attempt(self, op: Op) -> bool:
        """Adds a line of an op; False, and nothing changed, where it does not fit."""
        count = self.count
        try:
            x = self.pick(lambda t: self._takes(op, t))
            text = op.text(self, x)
            self._forget(count, names_in(text))
            if len(self.inputs) > MOST_INPUTS:
                raise Unfit
            line = self._line(op, x, text)
        except Unfit:
            self._forget(count, ())
            self.count = count
            return False
        self.lines.append(line)
        return True

    def _forget(self, since: int, kept: Sequence[str]) -> None:
        """Drops the values made since, but for those that are kept."""
        for name in [n for n in self.values if int(n[1:]) >= since and n not in kept]:
            del self.values[name], self.exact[name]
        self.inputs = [i for i in self.inputs if i.name in self.values]

    def _takes(self, op: Op, t: torch.Tensor) -> bool:
        if kind_of(t.dtype) not in op.kinds or not op.least <= t.ndim <= op.most:
            return False
        if op.writes and _overlaps(t):
            return False
        return not op.distinct or t.unique().numel() == t.numel()

    def _line(self, op: Op, x: str, text: str) -> Line:
        reads = names_in(text)
        exact = all(self.exact[n] for n in reads)
        if op.jumps and not exact:
            raise Unfit
        space = {**self.values, "torch": torch, "F": torch.nn.functional}
        space |= {"inf": math.inf, "nan": math.nan}
        exact = exact and op.exact and not self.special
        kept = self._storages() if op.writes or op.fails else []
        try:
            made = _ran(text, space, op.writes)
        except Exception as error:
            _restored(kept)
            if op.fails and not isinstance(error, (NameError, SyntaxError)):
                name, called = self._name(), f"{op.name}:{_called(text)}"
                return Line(called, f"{name} = {text}", (name,), (), False, op.data, True)
            raise Unfit from error
        results = [self[x]] if op.writes else _tensors(made)
        if op.fails or not results or not all(map(self._moderate, results)):
            _restored(kept)
            raise Unfit
        exact = exact and all(map(_whole, results))
        if op.writes:
            for name in self.aliases(x):
                self.exact[name] = self.exact[name] and exact
            return Line(op.name, text, (), (x,), not exact, op.data)
        return self._bound(op, text, made, results, exact)

    def _bound(
        self, op: Op, text: str, made: Any, results: list[torch.Tensor], exact: bool
    ) -> Line:
        binds = tuple(self._name() for _ in results)
        for name, t in zip(binds, results):
            self.values[name] = t
            self.exact[name] = exact if kind_of(t.dtype) in "fc" else True
        left = binds[0] if isinstance(made, torch.Tensor) else "".join(f"{n}, " for n in binds)
        return Line(op.name, f"{left.strip()} = {text}", binds, (), not exact, op.data)

    def aliases(self, x: str) -> list[str]:
        """The values that share the storage of this one, itself among them."""
        same = _storage(self[x])
        return [n for n, t in self.values.items() if _storage(t) == same]

    def _storages(self) -> list[tuple[Any, Any]]:
        every = {_storage(t): t.untyped_storage() for t in self.values.values()}
        return [(s, s.clone()) for s in every.values()]

    def _moderate(self, t: torch.Tensor) -> bool:
        if t.layout is not torch.strided or t.ndim > 5 or t.numel() > MOST_ELEMENTS:
            return False
        if kind_of(t.dtype) not in "fc" or self.special or not t.numel():
            return t.device.type == "cpu"
        most = LARGEST.get(t.dtype, 1e8)
        return bool(t.detach().abs().max() <= most)  # False for nan


def _called(text: str) -> str:
    """The function at the head of a call, as far as it has one: `index_select`, or `[]`."""
    head = re.match(r"(?:torch\.|F\.|v\d+\.)?(?:linalg\.)?(\w+)\(", text)
    return head.group(1) if head else "[]"


def _ran(text: str, space: dict[str, Any], statement: bool) -> Any:
    if statement:
        return exec(text, space)
    return eval(text, space)


def _tensors(made: Any) -> list[torch.Tensor]:
    """The tensors of a result: one, or a flat sequence of them; none for anything else."""
    every = [made] if isinstance(made, torch.Tensor) else made
    if not isinstance(every, (list, tuple)) or len(every) > 8:
        return []
    return list(every) if all(isinstance(t, torch.Tensor) for t in every) else []


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _restored(kept: Sequence[tuple[Any, Any]]) -> None:
    for storage, before in kept:
        storage.copy_(before)


def _overlaps(t: torch.Tensor) -> bool:
    """Whether two elements share their memory: what a write to them gives is undefined."""
    places = torch.arange(t.untyped_storage().nbytes() // max(1, t.itemsize))
    held = places.as_strided(t.shape, t.stride(), t.storage_offset())
    return held.unique().numel() != held.numel()


def _whole(t: torch.Tensor) -> bool:
    if kind_of(t.dtype) in "ib":
        return True
    real = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    scaled = real.double() * 32
    return bool((scaled == scaled.round()).all()) and bool(scaled.isfinite().all())


def _broadcasts(small: Sequence[int], large: Sequence[int], onto: bool) -> bool:
    try:
        shape = torch.broadcast_shapes(small, large)
    except RuntimeError:
        return False
    return tuple(shape) == tuple(large) or (not onto and math.prod(shape) <= MOST_ELEMENTS)
