"""The control plane, without processes: accounts of posts, and ledgers on a store in memory."""

import threading

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fdtensor.layouts.errors import CommError
from fdtensor.runtime.control.behind import put_behind
from fdtensor.runtime.control.board import Board
from fdtensor.runtime.control.kept import KEPT
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.noting import counting, noting
from fdtensor.runtime.control.posts import Account, Call, Post, account, parting
from fdtensor.runtime.control.sockets import listening_ports, shut
from fdtensor.runtime.control.watcher import _compare, _Seen

FACTS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


class Plane:
    """A plane without process groups, for one of the ranks of this process."""

    seconds = 0.5

    def __init__(self, store, rank):
        self.store, self.rank, self.tag, self.aborted, self.renewed = store, rank, 0, 0, 0
        self.ledgers, self.groups = [], self

    def unfit(self):
        return None

    def record(self):
        pass

    def abort(self, ranks):
        self.aborted += 1

    def is_cut(self, ranks):
        return self.aborted > 0

    def renew(self, error, back):
        self.renewed += not all(back.values())

    def put_behind(self, failed):
        for ledger in self.ledgers:
            put_behind(ledger, failed)


def ledgers(count: int) -> list[Ledger]:
    store = dist.HashStore()
    ranks = tuple(range(count))
    return [Ledger(ranks, "all", Plane(store, rank)) for rank in ranks]


def called(ledger: Ledger, facts: list[int]) -> Ledger:
    for fact in facts:
        ledger.noted(fact, f"call of {fact}", lambda: None)
    return ledger


@given(FACTS, FACTS)
def test_ledgers_are_alike_exactly_where_their_calls_are(a, b):
    first, second = (called(x, facts) for x, facts in zip(ledgers(2), (a, b), strict=True))
    assert (first.mark == second.mark) == (a == b)
    posts = {x.plane.rank: x.post("waiting", "") for x in (first, second)}
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    assert parting(posts) == (None if same is None else same + 1)


@given(FACTS, FACTS)
def test_the_watcher_tells_a_call_that_differs(a, b):
    pair = [called(x, facts) for x, facts in zip(ledgers(2), (a, b), strict=True)]
    number = min(len(a), len(b))
    for ledger in pair:
        _compare(ledger, _Seen(), number)
    assert pair[0].board.rings() == (a[:number] != b[:number])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["raised", "interrupted", "waiting", "busy", "ended", None]),
            st.integers(0, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_an_account_names_every_rank_and_says_what_to_do(some):
    posts = {}
    for rank, (kind, number, odd) in enumerate(some):
        if kind is not None:
            calls = [Call(n, n + 100 * (odd and n > 1), f"step {n}") for n in range(1, number + 1)]
            text = "KeyError: 'x'" if kind == "raised" else ""
            posts[rank] = Post(rank, kind, number, "a.py:3 in f", text, tuple(calls))
    drawn = account(range(len(some)), posts, 4.0)
    assert Account.from_json(drawn.to_json()) == drawn
    assert list(drawn.facts) == [f"rank {rank}" for rank in range(len(some))]
    assert drawn.sentence.endswith(".")
    assert "\n" not in drawn.sentence
    assert drawn.hint
    marks = [{c.number: c.mark for c in post.calls} for post in posts.values()]
    parts = any(len({m[n] for m in marks if n in m}) > 1 for n in range(1, 4))
    assert ("do not agree on call" in drawn.sentence) == parts
    if not parts and any(kind == "raised" for kind, _, _ in some):
        assert "KeyError: 'x'" in drawn.sentence or "interrupted" in drawn.sentence
    for post in posts.values():
        assert Post.from_json(post.to_json()) == post


@given(FACTS)
def test_calls_that_are_noted_once_they_have_run_are_those_of_others(facts):
    open_ones, brief = (called(x, facts[:1]) for x in ledgers(2))
    for fact in facts[1:]:
        open_ones.noted(fact, "call", lambda: None)
        counting(brief, fact, "call", lambda: None)()
    for name in ("number", "done", "mark"):
        assert getattr(open_ones, name) == getattr(brief, name)
    for one, other in zip(open_ones.entries(), brief.entries(), strict=True):
        assert one[:2] == other[:2]
        assert None not in (one[-1], other[-1])  # both have ended


@pytest.mark.parametrize("brief", [False, True])
def test_an_error_on_one_rank_is_the_error_of_all_and_then_they_go_on(brief):
    first, second = (called(x, [1, 2]) for x in ledgers(2))
    fails = lambda: {}["lost"]  # noqa: E731
    third = counting(first, 3, "third", fails) if brief else noting(first, 3, "third", True, fails)
    with pytest.raises(KeyError):
        third()
    assert second.board.rings()
    second.told()
    with pytest.raises(ValueError, match="rank 0 raised KeyError: 'lost'"):
        second.begin(3, "third")
    for ledger in (first, second):
        counting(ledger, 4, "fourth", lambda: None)() if brief else called(ledger, [4])
        assert (ledger.epoch, ledger.number, ledger.plane.renewed) == (1, 1, 1)
    assert first.mark == second.mark


def test_a_late_rank_makes_the_calls_that_one_with_an_error_has_ended():
    """An error that comes up on all ranks alike is that of each, however late one of them is."""
    first, second = (called(x, [1]) for x in ledgers(2))
    called(first, [2, 3])
    error = KeyError("the same on all")
    assert first.failure(error) is error
    second.told()
    called(second, [2, 3])
    assert second.failure(error) is error
    for ledger in (first, second):
        called(ledger, [4])
        assert (ledger.epoch, ledger.number, ledger.plane.renewed) == (1, 1, 0)


def test_a_late_rank_makes_no_further_calls():
    first, second = (called(x, [1]) for x in ledgers(2))
    called(first, [2])
    first.failure(KeyError("of one rank"))
    second.told()
    called(second, [2])
    with pytest.raises(CommError, match="of one rank"):
        second.begin(3, "third")


def test_an_error_before_any_call_after_the_last_error_is_told_too():
    first, second = (called(x, [1]) for x in ledgers(2))
    for ledger in (first, second):
        ledger.failure(KeyError("the same on all"))
    again = ValueError("of one rank")
    wrapped = RuntimeError("around it")
    wrapped.__context__ = again
    assert first.failure(again) is again
    assert first.failure(wrapped) is wrapped  # it is the same error for the others
    assert first.epoch == 1
    called(second, [2])
    second.told()
    with pytest.raises(CommError, match="of one rank"):
        called(second, [3])
    for ledger in (first, second):
        called(ledger, [4])
        assert (ledger.epoch, ledger.number) == (2, 1)


def test_errors_before_anything_is_sent_leave_the_groups_alone():
    pair = ledgers(2)
    for ledger in pair:
        called(ledger, [1])
        error = ValueError("the same on all")
        assert ledger.failure(error) is error
    for ledger in pair:
        called(ledger, [2])
        assert (ledger.epoch, ledger.plane.aborted, ledger.plane.renewed) == (1, 0, 0)


def test_a_ledger_of_some_of_its_ranks_begins_anew_after_one_that_failed():
    """One rank has cut its groups, the other raised before it sent anything: both make new ones."""
    store, planes = dist.HashStore(), []
    for rank in range(2):
        plane = Plane(store, rank)
        plane.ledgers = [Ledger((0, 1), "pair", plane), Ledger((0, 1, 2), "all", plane)]
        planes.append(plane)
    third = Ledger((0, 1, 2), "all", Plane(store, 2))
    for i, ledger in enumerate([*(p.ledgers[1] for p in planes), third]):
        called(ledger, [1])
        error = ValueError("on purpose") if i else RuntimeError("Connection closed by peer")
        if i:
            ledger.failure(error)
        else:
            ledger.begin(2, "second")
            ledger.fail("waiting", "", clean=False)
    for plane in planes:
        pair, whole = plane.ledgers
        assert (pair.stop, whole.failed, plane.renewed) == (True, True, 0)
        called(pair, [1])
        assert (pair.stop, pair.epoch, plane.renewed) == (False, 0, 1)
        assert (whole.failed, whole.epoch) == (True, 0)  # the third one may be gone


def test_a_rank_that_does_not_raise_is_named():
    first, _ = ledgers(2)
    with pytest.raises(KeyError):
        first.noted(1, "first", lambda: {}["lost"])
    with pytest.raises(ValueError, match=r"not all ranks have raised(.|\n)*missing: 1"):
        first.begin(2, "second")


def test_another_thread_is_told_so():
    (ledger,) = ledgers(1)
    called(ledger, [1])
    told = []

    def use():
        try:
            ledger.begin(2, "second")
        except ValueError as error:
            told.append(str(error))

    thread = threading.Thread(target=use, name="reader")
    thread.start()
    thread.join()
    assert "'reader' uses the Comm of another thread" in told[0]
    called(ledger, [2])  # nothing has happened


def test_a_ledger_may_be_handed_over_by_a_thread_that_ends():
    made = []
    thread = threading.Thread(target=lambda: made.append(called(ledgers(1)[0], [1])))
    thread.start()
    thread.join()
    called(made[0], [2])
    assert made[0].number == 2


def test_the_last_calls_are_kept_and_no_more():
    (ledger,) = ledgers(1)
    for fact in range(KEPT + 10):
        ledger.noted(fact, "call", int)
    assert len(ledger.records) == KEPT
    assert [call.number for call in ledger.calls(3)] == [KEPT + 8, KEPT + 9, KEPT + 10]
    assert ledger.calls(1)[0].line.startswith("test_control.py:")


def test_a_board_has_the_first_account_only():
    board = Board(dist.HashStore(), "all/0")
    told = []
    for seconds in (1.0, 2.0):
        for rank in range(2):
            board.put(Post(rank, "waiting", 1))
        told.append(board.account(range(2), seconds))
    assert told[0] == told[1]
    assert "1 s" in told[0].sentence
    assert [board.mark(1, 5), board.mark(1, 6)] == [5, 5]
    board.forget(1)
    assert board.mark(1, 6) == 6


def test_waits_on_sockets_end_where_they_are_shut():
    import socket

    before = listening_ports()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        port = server.getsockname()[1]
        assert listening_ports() - before == {port}
        client.connect(("127.0.0.1", port))
        other, _ = server.accept()
        with other:
            assert shut([], [1]) == 0
            assert shut([], [port]) == 1  # the client's end
            assert other.recv(1) == b""
        assert port in listening_ports()
