"""`read_record`: the last calls of a rank, from the file that `fd.io.dump_calls` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.json_fields import Malformed, items, parsed, real, record, whole
from fdtensor.layouts.kinds import is_dict
from fdtensor.runtime.control.posts import Call, Post

__all__ = ["CallSet", "RankRecord", "Stored", "read_record"]


@attrs.frozen
class CallSet:
    """The calls of a rank on a set of ranks, up to an error or since one.

    `errors` counts the errors before them; `seconds` has how long each call took, by its number,
    None where it did not end.
    """

    ranks: tuple[int, ...]
    errors: int
    calls: tuple[Call, ...]
    seconds: Mapping[int, float | None]

    @property
    def last(self) -> int:
        """The number of the last call; 0 where there is none."""
        return self.calls[-1].number if self.calls else 0

    def post(self, rank: int) -> Post:
        """What the rank says of itself."""
        return Post(rank, "waiting", self.last, calls=self.calls)

    def told(self, number: int) -> str:
        """A call in words: what it was, where, and how long it took."""
        for call in self.calls:
            if call.number == number:
                seconds = self.seconds[number]
                took = "not ended" if seconds is None else f"{1e3 * seconds:.1f} ms"
                return f"{call.text}, {took}"
        late = number > self.last
        return f"not there: the last is call {self.last}" if late else "no longer kept"


@attrs.frozen
class Stored:
    """A plan or a program that a rank ran, as JSON."""

    kind: str
    json: str


@attrs.frozen
class RankRecord:
    """The calls of a rank on each set of ranks, and what they ran, by fingerprint."""

    rank: int
    sets: Sequence[CallSet]
    ran: Mapping[str, Stored]


def read_record(path: Path) -> RankRecord:
    """The record in a file. Raises `CommError` where it is none."""
    try:
        rank, sets, ran = record(parsed(path.read_text()), "it", "rank", "sets", "ran")
        if not is_dict(ran):
            raise Malformed("'ran' is not an object")
        return RankRecord(
            whole(rank, "'rank'"),
            [_set(part) for part in items(sets, "'sets'")],
            {digest: _step(part) for digest, part in ran.items()},
        )
    except (Malformed, OSError, ValueError) as error:
        raise CommError(
            f"{path.name} is no record of calls: {error}.",
            path=str(path),
            hint="fd.io.dump_calls(comm, folder) writes one for each rank; leave this one out.",
        ) from error


def _set(value: object) -> CallSet:
    ranks, errors, _, calls = record(value, "a set", "ranks", "errors", "failed", "calls")
    each = [_call(call) for call in items(calls, "'calls'")]
    some = tuple(whole(rank, "a rank") for rank in items(ranks, "'ranks'"))
    seconds = {call.number: took for call, took in each}
    return CallSet(some, whole(errors, "'errors'"), tuple([call for call, _ in each]), seconds)


def _call(value: object) -> tuple[Call, float | None]:
    """A call, and how many seconds it took."""
    if is_dict(value):  # what it ran, and receives, is not read
        value = {key: part for key, part in value.items() if key not in ("ran", "bytes")}
    names = ("number", "mark", "what", "line", "began", "ended")
    number, mark, what, line, began, ended = record(value, "a call", *names)
    start = real(began, "'began'")
    took = None if ended is None else real(ended, "'ended'") - start
    texts = _text(what, "'what'"), _text(line, "'line'")
    return Call(whole(number, "'number'"), whole(mark, "'mark'"), *texts), took


def _step(value: object) -> Stored:
    kind, text = record(value, "a plan or a program", "kind", "json")
    return Stored(_text(kind, "'kind'"), _text(text, "'json'"))


def _text(value: object, where: str) -> str:
    """A text of any number of lines."""
    if not isinstance(value, str):
        raise Malformed(f"{where} is not a text")
    return value
