"""`Post`: what a rank says of itself after a fault; `account`: what all of that amounts to.

All ranks raise the same error, so one of them draws up the account for all.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from weakref import ref

import attrs

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.text import spans
from fdtensor.plans.fused import Fused
from fdtensor.plans.planner import Plan
from fdtensor.programs.program import Program

__all__ = [
    "Account",
    "Call",
    "Kind",
    "Post",
    "Ran",
    "account",
    "described",
    "not_back",
    "of_other_thread",
    "parting",
    "without_store",
]

Kind = Literal["raised", "interrupted", "waiting", "busy", "ended"]
"""What a rank does: `busy` is one that computes outside of this library's waits."""


@attrs.frozen
class Ran:
    """A program that was run, which is not kept for that, nor are tensors that it holds."""

    text: str
    digest: str
    mesh: Mesh
    sends: bool
    received_bytes: int
    program: Callable[[], Program | None] = attrs.field(eq=False, repr=False)
    """The program, while somebody else has it."""

    @classmethod
    def of(cls, program: Program) -> Ran:
        """The record of a program."""
        moves = [str(step.collective) for step in program.collectives[:4]]
        text = program.name + (f": {_some(moves, len(program.collectives))}" if moves else "")
        facts = program.digest, program.mesh, bool(moves), program.received_bytes
        return cls(text, *facts, ref(program))

    def __str__(self) -> str:
        return self.text


@attrs.frozen
class Call:
    """One call of a rank: its number, the fingerprint up to it, what it was and where."""

    number: int
    mark: int
    what: str
    line: str = ""

    @property
    def text(self) -> str:
        """What it was, and where."""
        return f"`{self.what}`" + (f" {self.line}" if self.line else "")

    def __str__(self) -> str:
        return f"call {self.number} {self.text}"


@attrs.frozen
class Post:
    """What a rank says of itself."""

    rank: int
    kind: Kind
    number: int
    """Its last call; 0 before the first."""
    line: str = ""
    """Where its user's code is."""
    text: str = ""
    """The error that it raised."""
    calls: tuple[Call, ...] = ()
    """Its last calls, in order."""
    done: int = 0
    """The last call that it has ended."""

    def to_json(self) -> str:
        """The post as JSON text."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Post:
        """The post that `to_json` wrote."""
        facts = json.loads(text)
        calls = tuple([Call(**call) for call in facts.pop("calls")])
        return cls(**facts, calls=calls)

    @property
    def what(self) -> str:
        """What its last call was."""
        return self.calls[-1].what if self.calls else ""

    @property
    def call(self) -> str:
        """Its last call, in a few words."""
        last = next((call for call in reversed(self.calls) if call.number == self.number), None)
        return f"call {self.number}" if last is None else str(last)

    @property
    def at(self) -> str:
        """Where it is, in a few words."""
        where = self.call
        line = f", {self.line}" if self.line and not where.endswith(self.line) else ""
        match self.kind:
            case "raised":
                return f"raised {self.text} after {where}{line}"
            case "interrupted":
                return f"was interrupted at {where}{line}"
            case "waiting":
                return f"waited at {where}{line}"
            case "busy" if not self.number:
                return f"has made no call {self.text or 'since its last error'}{line}"
            case "busy":
                return f"was busy after {where}{line}"
            case "ended":
                return f"ended after {where}" + (f": {self.text}" if self.text else "")


@attrs.frozen
class Account:
    """What has gone wrong, for the one error that all ranks raise."""

    sentence: str
    facts: Mapping[str, str]
    hint: str

    def to_json(self) -> str:
        """The account as JSON text."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Account:
        """The account that `to_json` wrote."""
        return cls(**json.loads(text))

    def error(self) -> CommError:
        """The error of all ranks."""
        return CommError(self.sentence, hint=self.hint, **self.facts)


def described(what: Any) -> str:
    """A call in a few words: the name of a program, what a plan does, numbers, or the text."""
    match what:
        case Plan():
            return f"redistribute {what.src} -> {what.dst}"
        case Fused():
            return f"redistribute of {len(what.plans)} tensors"
        case (about, *numbers):
            some = [*dict.fromkeys(numbers)] if len(numbers) > 8 else numbers
            return f"{about}: {_some([repr(number) for number in some], len(some), 8)}"
        case _:
            return str(what)


def _some(texts: Sequence[str], count: int, most: int = 3) -> str:
    """The first of `count` texts."""
    more = count - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def account(ranks: Sequence[int], posts: Mapping[int, Post], seconds: float) -> Account:
    """The account of what the ranks of a set say; one without a post does not answer.

    `seconds` is how long they wait for each other.
    """
    facts = {
        f"rank {rank}": posts[rank].at if rank in posts else "does not answer" for rank in ranks
    }
    sentence, hint = _cause(ranks, posts, seconds)
    return Account(sentence, facts, hint)


def _cause(ranks: Sequence[int], posts: Mapping[int, Post], seconds: float) -> tuple[str, str]:
    """One sentence, and what to do."""
    number = parting(posts)
    if number is not None:
        return _difference(number, _groups(number, posts))
    raised = [post for post in posts.values() if post.kind in ("raised", "interrupted")]
    if raised:
        first = raised[0]
        what = f"raised {first.text}" if first.kind == "raised" else "was interrupted"
        line = f" at {first.line}" if first.line else ""
        return f"rank {first.rank} {what}{line}.", "All ranks stop with it."
    missing = [rank for rank in ranks if rank not in posts]
    if missing:
        return (
            f"{_named(missing)} {_do(missing, 'does', 'do')} not answer: the process has ended, is "
            f"stopped, or cannot be reached.",
            "Start it again, or connect a mesh of the ranks that are left.",
        )
    gone = [post.rank for post in posts.values() if post.kind == "ended"]
    if gone:
        by = next((f" by {posts[rank].text}" for rank in gone if posts[rank].text), "")
        return (
            f"{_named(gone)} {_do(gone, 'has', 'have')} ended{by} while others waited.",
            "Every rank must run the same calls, in the same order.",
        )
    last = max(post.number for post in posts.values())
    late = [post.rank for post in posts.values() if post.kind == "busy" or post.number < last]
    return (
        f"{_named(late or list(posts))} did not come to what others waited for within "
        f"{seconds:g} s.",
        "Every rank must run the same calls. Where one may take longer, connect(mesh, timeout=...) "
        "waits longer; where one may raise an error that it catches, write fail_together(comm).",
    )


def parting(posts: Mapping[int, Post]) -> int | None:
    """The first call that was not the same on all ranks, as far as their last calls tell."""
    numbers = {call.number for post in posts.values() for call in post.calls}
    return next((n for n in sorted(numbers) if len(_groups(n, posts)) > 1), None)


def _groups(number: int, posts: Mapping[int, Post]) -> list[tuple[list[int], Call]]:
    """The different calls of this number, each with its ranks; those of few ranks first."""
    groups: dict[int, tuple[list[int], Call]] = {}
    for rank, post in posts.items():
        for call in post.calls:
            if call.number == number:
                groups.setdefault(call.mark, ([], call))[0].append(rank)
    return sorted(groups.values(), key=lambda group: len(group[0]))


def _difference(number: int, parts: Sequence[tuple[Sequence[int], Call]]) -> tuple[str, str]:
    """The sentence about ranks that differ in a call, and what to do."""
    hint = "Every rank must run the same calls, of the same types, in the same order."
    if len({call.what for _, call in parts}) > 1:
        texts = [f"{_named(some)} {_do(some, 'is', 'are')} at {call.text}" for some, call in parts]
        return f"the ranks do not agree on call {number}: {', '.join(texts)}.", hint
    groups = " and ".join(_named(some) for some, _ in parts)
    return (
        f"the ranks do not agree on call {number}: {groups} differ in {parts[0][1].text}.",
        "Their types, Python arguments, keys or costs differ, or what the function itself reads. "
        + hint,
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks, ', ')}"


def _do(ranks: Sequence[Any], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def not_back(ranks: Sequence[int], back: Sequence[int], seconds: float) -> CommError:
    """The error where some ranks have not raised the last error in that time."""
    return CommError(
        f"not all ranks have raised the last error within {seconds:g} s.",
        missing=spans([rank for rank in ranks if rank not in back], ", "),
        hint="Connect a mesh of the ranks that are left, or start all of them again.",
    )


def of_other_thread(ranks: Sequence[int]) -> CommError:
    """The error for a call on a Comm that another thread makes calls on."""
    error = CommError(
        f"thread {threading.current_thread().name!r} uses the Comm of another thread.",
        ranks=spans(ranks),
        hint="Make a Comm in each thread by connect(mesh): calls of two on one would "
        "meet in any order.",
    )
    error.common = True
    return error


def without_store(ranks: Sequence[int], post: Post, problem: str) -> CommError:
    """The error of a rank, with its post, where nobody hears of the others any more."""
    return CommError(
        "the store through which ranks find each other does not answer: the process that keeps "
        "it has ended or cannot be reached.",
        ranks=", ".join(map(str, ranks)),
        **{f"rank {post.rank}": post.at},
        problem=problem.partition("\n")[0],
        hint="Rank 0 keeps it where torchrun does not. Start all ranks again.",
    )
