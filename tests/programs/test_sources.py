"""Where the lines of programs come from: modules, lines of the user, and what they amount to."""

import gzip
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call, grad

from fdtensor import Mesh, Program, TensorType, TraceError, cost, trace
from fdtensor.plans.traffic import most_received
from fdtensor.programs.sources import by_module, sources

MESH = Mesh(dp=2)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, layers, parallel):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(layers)])
        self.sides = torch.nn.ModuleDict({f"side{i}": Block() for i in range(parallel)})
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for side in self.sides.values():
            x = x + side(x)
        return self.head(x).tanh()


def traced(model, gradient=False, cut="dp"):
    params = {
        k: TensorType(tuple(v.shape), v.dtype, MESH.layout()) for k, v in model.named_parameters()
    }
    x = TensorType((4, 8), torch.float32, MESH.layout(cut))

    def value(params, x):
        return functional_call(model, params, (x,)).sum()

    return trace(grad(value) if gradient else value, params, x)


@given(st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_every_line_of_a_module_has_its_path(layers, parallel, gradient):
    model = Model(layers, parallel)
    program = traced(model, gradient)
    every = sources(program)
    known = {path for path, _ in model.named_modules()} | {"Model"}
    assert {s.module for s in every} <= known | {""}
    linear = sorted(path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    named = [(str(e.op), s) for e, s in zip(program.eqns, every, strict=True)]
    forward = [s for op, s in named if op == "aten.addmm.default"]
    assert sorted(s.module for s in forward) == linear
    assert not any(s.is_backward for s in forward)
    backward = [s for op, s in named if op == "aten.mm.default"]  # of input and weight
    assert sorted(s.module for s in backward) == (sorted(linear * 2) if gradient else [])
    assert all(s.is_backward for s in backward)
    assert all(s.line.startswith("test_sources.py:") for s in every if s.module)


@given(st.integers(1, 3), st.integers(0, 2), st.integers(1, 12), st.booleans())
def test_modules_together_are_the_program(layers, parallel, most, gradient):
    program = traced(Model(layers, parallel), gradient)
    shares = by_module(program, most)
    assert sum(share.lines for share in shares) == len(program.eqns)
    assert sum(share.received_bytes for share in shares) == sum(
        most_received(eqn.steps) for eqn in program.eqns if eqn.steps
    )
    times = cost.timeline(program)
    assert sum(share.computing for share in shares) == pytest.approx(times.computing)
    assert sum(share.sending for share in shares) == pytest.approx(times.sending)
    names = [share.module for share in shares]
    assert len(set(names)) == len(names)


def test_a_summary_is_one_screen_however_deep_the_model():
    texts = [str(traced(Model(n, 0), True).summary()) for n in (2, 6)]
    assert len(texts[0].splitlines()) == len(texts[1].splitlines()) < 24
    assert "layers.*.mlp.* x6" in texts[0]
    assert "layers.*.mlp.* x18" in texts[1]
    plain = trace(torch.sum, TensorType((4,), torch.float32, MESH.layout("dp")))
    assert "module" not in plain.summary()


def test_a_program_tells_the_source_of_a_value():
    model = Model(1, 0)
    program = traced(model)
    source = program.source(program.outs[0])
    assert re.fullmatch(r"test_sources.py:\d+", source.line)
    assert program.source("a").line == ""
    assert str(source) == source.line
    norm = next(e for e in program.eqns if "layer_norm" in str(e.op)).outs[0]
    assert program.source(norm).module == "layers.0.norm"
    assert "layers.0.norm, test_sources.py" in program.explain(str(norm))
    with pytest.raises(TraceError, match="no value 'zzz'"):
        program.source("zzz")
    again = Program.from_json(traced(Block()).to_json())
    assert not any(map(str, sources(again)))
    assert again.summary().count("\n") < 4


def test_modules_one_after_the_other_and_errors_in_them_are_told_apart():
    first, second = torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8))

    class Raises(torch.nn.Module):
        def forward(self, x):
            raise KeyError("on purpose")

    def f(x):
        try:
            x = first(Raises()(x))
        except KeyError:
            x = first(x)
        return second(x) * 2

    program = trace(f, TensorType((4, 8), torch.float32, MESH.layout("dp")))
    modules = {s.module for s in sources(program)}
    assert modules == {"Linear", "0", ""}


def test_compiled_modules_have_the_paths_of_what_was_written():
    model = torch.nn.Sequential(torch.compile(torch.nn.Sequential(torch.nn.ReLU())))
    program = trace(torch.compile(model), TensorType((4, 8), torch.float32, MESH.layout("dp")))
    assert [s.module for s in sources(program)] == ["0.0"]


def test_modules_around_a_trace_do_not_count():
    class Around(torch.nn.Module):
        def forward(self, x):
            return trace(torch.nn.Sequential(torch.nn.ReLU()), x)

    program = Around()(TensorType((4, 8), torch.float32, MESH.layout("dp")))
    assert [s.module for s in sources(program)] == ["0"]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_timeline_is_saved_with_what_was_measured(tmp_path, name):
    program = traced(Model(1, 0), True)
    times, path = cost.timeline(program), tmp_path / name
    times.save(path)

    def read(path):
        content = path.read_bytes()
        return json.loads(gzip.decompress(content) if name.endswith("gz") else content)

    events = read(path)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(program.eqns)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * times.seconds)
    assert sum(e["dur"] for e in spans if e["tid"] == 1) == pytest.approx(1e6 * times.sending)
    measured = [{"name": f"fdtensor {program.name}", "ts": t, "dur": 5, "ph": "X"} for t in (7, 90)]
    other = tmp_path / f"m{name}"
    text = json.dumps({"traceEvents": measured, "displayTimeUnit": "ms"}).encode()
    other.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    times.save(path, beside=other)
    both = read(path)
    assert both["displayTimeUnit"] == "ms"
    assert both["traceEvents"][:2] == measured
    assert min(e["ts"] for e in both["traceEvents"][2:] if e["ph"] == "X") == pytest.approx(90)
    for content in (b"", b"[]", b"{}", json.dumps({"traceEvents": []}).encode()):
        other.write_bytes(content)
        with pytest.raises(TraceError):
            times.save(path, beside=other)
