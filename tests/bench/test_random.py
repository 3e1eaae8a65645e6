"""The bench of random draws on few elements: what it measures and shows, never how long."""

import json

from tests.bench import main
from tests.bench.draws import DRAWS, Effort, _peak, measure


def test_every_draw_is_measured_and_as_large_as_that_of_torch():
    found = measure(Effort(100, rounds=2, large=0))
    assert [row.name for row in found.drawn] == list(DRAWS)
    for ours, theirs in DRAWS.values():
        a, b = ours(50), theirs(50)
        assert (a.shape, a.dtype.itemsize) == (b.shape, b.dtype.itemsize)


def test_the_command_shows_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.bench.draws.QUICK", Effort(100, rounds=1, large=0))
    file = tmp_path / "random.json"
    assert main(["random", "--quick", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in DRAWS)
    assert [row["name"] for row in json.loads(file.read_text())["drawn"]] == list(DRAWS)


def test_the_memory_of_a_draw_is_measured_in_a_process_of_its_own():
    gained = _peak("uniform f32", 1 << 22)
    assert 0.9 < gained < 4  # the result itself is written at least
