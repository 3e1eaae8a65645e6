"""`script`: a program as a Python file that needs torch and fdtensor alone, and fails likewise."""

from __future__ import annotations

import textwrap

import torch

from tests.hunt.plain import fulls, line_functions, smooth_inputs
from tests.hunt.records import Input, Line, Program, source
from tests.hunt.ways import Outcome

__all__ = ["script"]

HEAD = '''\
import torch
import torch.nn.functional as F
from fdtensor import *
from fdtensor import random
from fdtensor.testing.values import scatter
from math import inf, nan

mesh = {mesh!r}
comm = SimulatedComm(mesh)


def put(full, layout, seed=0, stored=lambda t: t):
    """A DTensor; pending terms are split at random."""
    type = TensorType(tuple(full.shape), full.dtype, layout)
    return from_local(tuple(stored(t) for t in scatter(full, type, seed)), type, comm)


def shown(run, *given):
    """The full results, or the error."""
    try:
        outs = run(*given)
        return [x.full().detach() if isinstance(x, DTensor) else x for x in outs]
    except Exception as error:
        return f"{{type(error).__name__}}: {{error.__cause__ or error}}"

'''

WEIGHTED = """
def weighted(*outs):
    total = torch.zeros((), dtype=torch.float64)
    for out in outs:
        if out.is_floating_point() or out.is_complex():
            real = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
            weights = torch.arange(real.numel()).remainder(7).sub(3).reshape(real.shape)
            total = total + (real.double() * weights).sum()
    return total

"""

GRAD = """
def loss(*given):
    return weighted(*f(*[t.clone() for t in given]))


g = torch.func.grad(loss, argnums={smooth})
step = spmd(g{options})
"""

HESSIAN = """
def loss(*given):
    return weighted(*f(*[t.clone() for t in given]))


def second(*given):
    return weighted(*torch.func.grad(loss, argnums={smooth})(*[t.clone() for t in given]))


g = torch.func.grad(second, argnums={smooth})
step = spmd(g{options})
"""

JVP = """
def g(*given):
    def of_smooth(*some):
        every = list(given)
        for i, t in zip({smooth}, some):
            every[i] = t
        return weighted(*f(*[t.clone() for t in every]))

    primals = tuple(given[i] for i in {smooth})
    return torch.func.jvp(of_smooth, primals, tuple(torch.ones_like(t) for t in primals))


step = spmd(g{options})
"""

RUN = """
def ran(*given):
    program = trace(f, *given{options})
    made = run(program, [x.local for x in given], comm)
    return [DTensor(v, t, comm) for v, t in zip(made, program.out_types)]

"""

MODULES = """
def modules(*given):
    from tests.support.lockstep import apart  # of the repository

    program = trace(f, *given{options})
    each = {{rank: program.to_fx(rank) for rank in mesh.ranks}}
    inputs = {{rank: [x.local[k] for x in given] for k, rank in enumerate(mesh.ranks)}}
    made = apart(each, mesh, inputs)
    values = [tuple(made[rank][i] for rank in mesh.ranks) for i in range(len(program.outs))]
    return [DTensor(v, t, comm) for v, t in zip(values, program.out_types)]

"""

KEYED = """
def alone(*given):
    plain = Mesh(alone=1)
    one = SimulatedComm(plain)
    given = [distribute(t, plain.layout(), one) for t in given]
    return [x.full() for x in spmd(f)(*given, key=random.key(7))]


def spread(*given):
    return spmd(f{options})(*given, key=random.key(7))

"""

GLOO = """
def on_rank(*given):
    return spmd(f{options})(*given)


def on_ranks(*given):
    with local_cluster({ranks}) as ranks:
        return ranks.run(on_rank, *given)[0]

"""

BACKWARD = """
def plain(*given):
    leaves = [t.requires_grad_(i in {smooth}) for i, t in enumerate(given)]
    weighted(*f(*[t.clone() for t in leaves])).backward()
    return [leaves[i].grad for i in {smooth}]


def held(*given):
    for i in {smooth}:
        given[i].requires_grad_()
    weighted(*[x.full() for x in step(*given)]).backward()
    return [[t.grad for t in given[i].local] for i in {smooth}]

"""

STORED = {
    "channels_last": "lambda t: t.contiguous(memory_format=torch.channels_last{d})",
    "reversed": "lambda t: t.permute(*range(t.ndim)[::-1]).contiguous()"
    ".permute(*range(t.ndim)[::-1])",
    "rotated": "lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0)",
    "stepped": "lambda t: t.new_zeros([2 * n for n in t.shape])"
    "[(slice(None, None, 2),) * t.ndim].copy_(t)",
    "padded": "lambda t: t.new_zeros([n + 1 for n in t.shape])"
    "[(slice(1, None),) * t.ndim].copy_(t)",
    "offset": "lambda t: torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].view(t.shape)",
    "expanded": "lambda t: t.narrow({at}, 0, 1).contiguous().expand(t.shape) if t.numel() else t",
    "conjugated": "lambda t: t.conj().resolve_conj().clone().conj()",
    "negated": "lambda t: torch._neg_view(-t) if t.numel() else t",
}

WITHIN = {
    "no_grad": "with torch.no_grad():",
    "inference": "with torch.inference_mode():",
    "autocast": 'with torch.autocast("cpu", torch.bfloat16):',
}

BEFORE = {
    "float64": "torch.set_default_dtype(torch.float64)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "other_values": "# the next call has other values of the same types",
    "other_forms": "# the next call has blocks stored otherwise",
    "thread": "# the next call is made on another thread",
    "tracked": "# the inputs of the next call require grad",
}

AFTER = {
    "float64": "torch.set_default_dtype(torch.float32)",
    "deterministic": "torch.use_deterministic_algorithms(False)",
}


def script(program: Program, found: Outcome) -> str:
    """The file, which prints what torch gives and what fdtensor gives."""
    about = f"{found.kind} {found.op}: {found.text}".replace('"', "'").replace("\\", "/")
    parts = [*textwrap.wrap(f'"""{about[:400]}', 96), '"""', HEAD.format(mesh=program.mesh)]
    way = program.setting.way
    if way in ("grad", "hessian", "jvp") or "backward" in way:
        parts.append(WEIGHTED)
    if way.startswith("call"):
        parts += _steps(program)
    else:
        pins = dict(program.setting.pins)
        parts += [f"pin_{n} = {_on_mesh(program, layout)}" for n, layout in pins.items()]
        text = source(program.names, program.lines, program.outs, pinned=tuple(pins))
        parts.append("\n" + text + "\n\n")
    parts += [_input(i, t) for i, t in zip(program.inputs, fulls(program, 0))]
    parts += _defined(program)
    plain = ", ".join(f"{n}.clone()" for n in program.names)
    held = ", ".join(f"d{n}()" for n in program.names)
    first, second = _pair(program)
    for m in program.setting.moments:
        calls = [f'print("torch   ", shown({first}, {plain}))']
        calls.append(f'print("fdtensor", shown({second}, {held}))')
        parts += _at(m, calls)
    return "\n".join(parts) + "\n"


def _at(m: str, calls: list[str]) -> list[str]:
    """Calls at a moment."""
    if m in WITHIN:
        return [WITHIN[m], *[f"    {call}" for call in calls]]
    before, after = ([t[m]] if m in t else [] for t in (BEFORE, AFTER))
    return [*before, *calls, *after]


def _pair(program: Program) -> tuple[str, str]:
    """The names of the two functions that are compared."""
    match program.setting.way:
        case "spmd":
            return "f", "step"
        case "grad" | "hessian" | "jvp" | "vmap":
            return "g", "step"
        case "run":
            return "f", "ran"
        case "fx":
            return "f", "modules"
        case "gloo":
            return "f", "on_ranks"
        case "keyed":
            return "alone", "spread"
    return "plain", "held"


def _defined(program: Program) -> list[str]:
    """What is made once."""
    setting, smooth = program.setting, smooth_inputs(program)
    options = ""
    if setting.out_layouts:
        wanted = "".join(f"{_on_mesh(program, w)}, " for w in setting.out_layouts)
        options = f", out_layouts=({wanted})"
    if setting.on_missing_rule != "replicate":
        options += f", on_missing_rule={setting.on_missing_rule!r}"
    match setting.way:
        case "spmd":
            return [f"step = spmd(f{options})"]
        case "grad":
            return [GRAD.format(smooth=smooth, options=options)]
        case "hessian" | "jvp":
            which = HESSIAN if setting.way == "hessian" else JVP
            return [which.format(smooth=smooth, options=options)]
        case "vmap":
            both = "torch.vmap(f)(*(torch.stack([t, t]) for t in x))"
            return [f"def g(*x):\n    return {both}\n\n", f"step = spmd(g{options})"]
        case "run":
            return [RUN.format(options=options.replace(", on_", ", on_"))]
        case "fx":
            return [MODULES.format(options=options)]
        case "keyed":
            return [KEYED.format(options=options)]
        case "gloo":
            return [GLOO.format(ranks=program.mesh.size, options=options)]
        case "backward":
            return [f"step = spmd(f{options})", BACKWARD.format(smooth=smooth)]
    return []


def _on_mesh(program: Program, layout: object) -> str:
    return repr(layout).replace(repr(program.mesh), "mesh")


def _input(i: Input, full: torch.Tensor) -> str:
    kind, _, at = i.form.partition(":")
    stored = STORED.get(kind, "").format(d="_3d" if len(i.shape) == 5 else "", at=at)
    layout = repr(i.layout).replace(repr(i.layout.mesh), "mesh")
    made = f"torch.tensor({full.tolist()}, dtype={i.dtype})"
    if 0 in i.shape:
        made = f"torch.zeros({list(i.shape)}, dtype={i.dtype})"
    extra = f", stored={stored}" if stored else ""
    return f"{i.name} = {made}\nd{i.name} = lambda: put({i.name}, {layout}, {i.seed}{extra})"


def _steps(program: Program) -> list[str]:
    """Each line as a function of its own, and all of them one after the other."""
    parts = []
    for k, text in enumerate(line_functions(program.lines)):
        parts.append(text.replace("def f(", f"def f{k}(", 1) + "\n\n")
    for name, how in (("plain", "f{k}({clones})"), ("held", "call(f{k}, {given})")):
        body = [_step(program, line, how, k) for k, line in enumerate(program.lines)]
        body.append(f"return [{', '.join(program.outs)}]")
        if "backward" in program.setting.way:
            body = _tracked(program, body, name)
        parts.append(f"def {name}({', '.join(program.names)}):\n    " + "\n    ".join(body))
        parts.append("\n")
    return parts


def _step(program: Program, line: Line, how: str, k: int) -> str:
    clones = ", ".join(f"{n}.clone()" for n in line.reads)
    pins = dict(program.setting.pins)
    wanted = [_on_mesh(program, pins.get(n)) for n in (*line.binds, *line.writes)]
    given = ", ".join(line.reads)
    if set(wanted) != {"None"}:
        given += f", out_layouts=({', '.join(wanted)},)"
    made = how.format(k=k, clones=clones, given=given)
    names = "".join(f"{n}, " for n in (*line.binds, *line.writes))
    return f"{names}= {made}" if names else made


def _tracked(program: Program, body: list[str], name: str) -> list[str]:
    smooth = [program.names[i] for i in smooth_inputs(program)]
    leaves = ", ".join(f"{n}.requires_grad_()" for n in smooth)
    full = "" if name == "plain" else ".full()"
    outs = ", ".join(f"{n}{full}" for n in program.outs)
    grads = (
        "x.grad for x in leaves" if name == "plain" else "t.grad for x in leaves for t in x.local"
    )
    return [f"leaves = [{leaves}]", *body[:-1], f"weighted({outs}).backward()", f"return [{grads}]"]
