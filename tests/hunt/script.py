"""`script`: a program as a Python file that needs torch and fdtensor alone, and fails likewise."""

from __future__ import annotations

import torch

from tests.hunt.plain import fulls, line_functions, smooth_inputs
from tests.hunt.records import Input, Program, source
from tests.hunt.ways import Outcome

__all__ = ["script"]

HEAD = """\
import contextlib
import threading
import torch
import torch.nn.functional as F
from math import inf, nan
from fdtensor import *
from fdtensor.testing.values import gather_full, scatter

mesh = {mesh!r}
comm = SimulatedComm(mesh)
"""

PUT = '''
def put(full, layout, seed=0, stored=lambda t: t):
    """A DTensor; pending terms are split at random."""
    type = TensorType(tuple(full.shape), full.dtype, layout)
    return from_local(tuple(stored(t) for t in scatter(full, type, seed)), type, comm)


def weighted(outs):
    total = torch.zeros((), dtype=torch.float64)
    for out in outs:
        if out.is_floating_point() or out.is_complex():
            real = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
            weights = torch.arange(real.numel()).remainder(7).sub(3).reshape(real.shape)
            total = total + (real.double() * weights).sum()
    return total


def shown(f):
    try:
        return f()
    except Exception as error:
        root = error.__cause__ or error
        return f"{type(root).__name__}: {str(root).splitlines()[0] if str(root) else ''}"

'''

STORED = {
    "channels_last": "lambda t: t.contiguous(memory_format=torch.channels_last{d})",
    "reversed": "lambda t: t.permute(*range(t.ndim)[::-1]).contiguous().permute(*range(t.ndim)[::-1])",
    "rotated": "lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0)",
    "stepped": "lambda t: t.new_zeros([2 * n for n in t.shape])[(slice(None, None, 2),) * t.ndim].copy_(t)",
    "padded": "lambda t: t.new_zeros([n + 1 for n in t.shape])[(slice(1, None),) * t.ndim].copy_(t)",
    "offset": "lambda t: torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].view(t.shape)",
    "expanded": "lambda t: t.narrow({at}, 0, 1).contiguous().expand(t.shape) if t.numel() else t",
    "conjugated": "lambda t: t.conj().resolve_conj().clone().conj()",
    "negated": "lambda t: torch._neg_view(-t) if t.numel() else t",
}

MOMENTS = {
    "plain": "contextlib.nullcontext()",
    "no_grad": "torch.no_grad()",
    "inference": "torch.inference_mode()",
    "autocast": 'torch.autocast("cpu", torch.bfloat16)',
    "float64": "default_float64()",
    "deterministic": "deterministic()",
    "other_values": "contextlib.nullcontext()  # the second time with other values",
    "other_forms": "contextlib.nullcontext()  # the second time with blocks stored otherwise",
    "thread": "contextlib.nullcontext()  # on another thread",
    "tracked": "contextlib.nullcontext()  # the inputs require grad",
}

SWITCHES = {
    "float64": """
@contextlib.contextmanager
def default_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
""",
    "deterministic": """
@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
""",
}


def script(program: Program, found: Outcome) -> str:
    """The file, which prints what torch gives and what fdtensor gives."""
    about = f"{found.kind} {found.op}: {found.text}".replace('"', "'").replace("\\", "/")
    parts = [f'"""{about[:300]}"""\n', HEAD.format(mesh=program.mesh), PUT]
    parts += [SWITCHES[m] for m in SWITCHES if m in program.setting.moments]
    parts.append("\n" + source(program.names, program.lines, program.outs) + "\n\n")
    parts += [_input(i, t) for i, t in zip(program.inputs, fulls(program, 0))]
    parts.append(_calls(program))
    return "".join(parts)


def _input(i: Input, full: torch.Tensor) -> str:
    kind, _, at = i.form.partition(":")
    stored = STORED.get(kind, "").format(d="_3d" if len(i.shape) == 5 else "", at=at)
    layout = repr(i.layout).replace(repr(i.layout.mesh), "mesh")
    values = str(full.tolist())
    if 0 in i.shape:
        made = f"torch.zeros({list(i.shape)}, dtype={i.dtype})"
    else:
        made = f"torch.tensor({values}, dtype={i.dtype})"
    extra = f", stored={stored}" if stored else ""
    return f"{i.name} = {made}\nd{i.name} = lambda: put({i.name}, {layout}, {i.seed}{extra})\n"


def _calls(program: Program) -> str:
    setting, smooth = program.setting, smooth_inputs(program)
    plain = ", ".join(f"{n}.clone()" for n in program.names)
    held = ", ".join(f"d{n}()" for n in program.names)
    options = f", out_layouts={_wanted(program)}" if setting.out_layouts else ""
    if setting.on_missing_rule != "replicate":
        options += f", on_missing_rule={setting.on_missing_rule!r}"
    if setting.way.startswith("call"):
        return _by_line(program)
    if setting.way == "grad":
        grad = f"torch.func.grad(lambda *x: weighted(f(*x)), argnums={smooth})"
        lines = [f"g = {grad}", f"step = spmd(g{options})"]
        pair = f"g({plain})", f"[x.full() for x in step({held})]"
    elif setting.way == "backward":
        lines = [f"step = spmd(f{options})", *BACKWARD.format(smooth=smooth).splitlines()]
        pair = f"plain_grads({plain})", f"held_grads({held})"
    else:
        lines = [f"step = spmd(f{options})"]
        pair = f"f({plain})", f"[gather_full(x.local, x.type) for x in step({held})]"
    for m in setting.moments:
        lines.append(f"with {MOMENTS[m]}:")
        lines.append(f'    print("torch:   ", shown(lambda: {pair[0]}))')
        lines.append(f'    print("fdtensor:", shown(lambda: {pair[1]}))')
    return "\n".join(lines) + "\n"


BACKWARD = """
def plain_grads(*given):
    leaves = [t.requires_grad_(i in {smooth}) for i, t in enumerate(given)]
    weighted(f(*[t.clone() for t in leaves])).backward()
    return [leaves[i].grad for i in {smooth}]

def held_grads(*given):
    for i in {smooth}:
        given[i].requires_grad_()
    weighted([x.full() for x in step(*given)]).backward()
    return [[t.grad for t in given[i].local] for i in {smooth}]
"""


def _wanted(program: Program) -> str:
    every = program.setting.out_layouts or ()
    text = ", ".join(repr(w).replace(repr(program.mesh), "mesh") for w in every)
    return f"({text},)"


def _by_line(program: Program) -> str:
    """Each line through `call`, beside the line alone."""
    parts = []
    for k, (line, text) in enumerate(zip(program.lines, line_functions(program.lines))):
        parts.append(text.replace("def f(", f"def f{k}(", 1))
        made = "".join(f"{n}, " for n in (*line.binds, *line.writes)) or "_, "
        given = ", ".join(line.reads)
        parts.append(f"held{k} = call(f{k}, {', '.join(f'd{n}' for n in line.reads)})")
        if made != "_, ":
            parts.append(f"{''.join(f'd{n}, ' for n in (*line.binds, *line.writes))}= held{k}")
            parts.append(f"{made}= f{k}({', '.join(f'{n}.clone()' for n in line.reads)})")
        assert given is not None
    ready = [f"d{n} = d{n}()" for n in program.names]
    if program.setting.way == "call_backward":
        smooth = [program.names[i] for i in smooth_inputs(program)]
        ready += [f"d{n}.requires_grad_(), {n}.requires_grad_()" for n in smooth]
        ready += [f"dleaf_{n}, leaf_{n} = d{n}, {n}" for n in smooth]
        parts.append(f"weighted([{', '.join(program.outs)}]).backward()")
        parts.append(
            f"weighted([x.full() for x in [{', '.join('d' + n for n in program.outs)}]]).backward()"
        )
        parts += [f'print("{n}", leaf_{n}.grad, [t.grad for t in dleaf_{n}.local])' for n in smooth]
    else:
        parts += [f'print("{n}", {n}, gather_full(d{n}.local, d{n}.type))' for n in program.outs]
    body = "\n".join(parts)
    held = [m for m in program.setting.moments if m != "plain"]
    if held:
        indented = "\n".join(f"    {row}" for row in body.splitlines())
        body = f"with {MOMENTS[held[-1]]}:\n{indented}"
    return "\n".join([*ready, body]) + "\n"
