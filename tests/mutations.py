"""`python -m tests.mutations`: faults put into a copy of fdtensor, and whether the tests see them.

python -m tests.mutations [--deep] [names...]

Each fault is one line that reads otherwise, in the one file that has it, and the tests of some
folders must fail. What is missed is a hole in the default run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
TAKEN = ("fdtensor", "tests", "notebooks", "pyproject.toml", "README.md", "CONTRIBUTING.md")


@attrs.frozen
class Fault:
    """A line of fdtensor that no other file or line has, what it reads instead, who must see it."""

    name: str
    line: str
    instead: str
    tests: str
    """Folders or files of tests, with blanks between them."""


FAULTS = (
    Fault(
        "a guard does not look at the settings of torch",
        "matched is None or ambient() != self.settings or (reads",
        "matched is None or (reads",
        "mesh/test_guards.py",
    ),
    Fault(
        "a guard lets a tensor through that is given twice",
        "    if len({*map(id, tensors)}) < len(tensors):",
        "    if False:",
        "mesh/test_guards.py",
    ),
    Fault(
        "a guard does not look at what a function reads besides its arguments",
        " or (reads and reads.key()) != self.reads:\n",
        ":\n",
        "mesh/test_guards.py",
    ),
    Fault(
        "attributes of what a function reads do not count",
        "                chain = attrs.evolve(chain, attributes=(*chain.attributes, name))\n",
        "                chain = None\n",
        "tensors/test_reads.py",
    ),
    Fault(
        "what helper functions read does not count",
        "                    todo += [(g, own, g) for g, own in runs(used, names, self._run)]\n",
        "",
        "tensors/test_reads.py",
    ),
    Fault(
        "what functions in containers read does not count",
        "        for part in parts_within(value):\n",
        "        for part in ():\n",
        "tensors/test_runs.py",
    ),
    Fault(
        "a container has the functions that it had",
        "are_same(parts_within(latest[i]), within) for i, within in self._filled",
        "True for _ in self._filled",
        "tensors/test_runs.py",
    ),
    Fault(
        "a method of another object is taken for the same",
        "            latest[i] = method if value.first is method.first else value\n",
        "            latest[i] = method\n",
        "tensors/test_reads.py",
    ),
    Fault(
        "hooks of modules do not count",
        "            run = [part.__class__.forward, *module_hooks(part)]\n",
        "            run = [part.__class__.forward]\n",
        "tensors/test_reads.py",
    ),
    Fault(
        "equal ranges are one",
        "    if kind is slice or kind is range:",
        "    if kind is slice:",
        "tensors/test_reads.py",
    ),
    Fault(
        "call knows arguments without their names",
        "    key += _BY_NAME, tuple(named)\n",
        "",
        "mesh/test_quick_calls.py",
    ),
    Fault(
        "a checkpoint takes tensors of two meshes for one",
        "_all_alike([*claims, _meshes(values, comm)], comm)",
        "_all_alike(claims, comm)",
        "io/test_checkpoint_same.py",
    ),
    Fault(
        "a word on lost gradients wherever something requires grad is closed over",
        "        result[:] = [tree, statics, new, followed != created]\n",
        "        result[:] = [tree, statics, new, True]\n",
        "tensors/test_lost_gradients.py",
    ),
    Fault(
        "a rank that plans does not say so",
        "                tell_of_planning(plane.store)\n",
        "                pass\n",
        "mesh/test_patience.py",
    ),
    Fault(
        "a wait for a rank that plans ends as any other",
        "        if self.said not in (None, said):\n",
        "        if False:\n",
        "mesh/test_patience.py",
    ),
    Fault(
        "an agreement never ends by itself",
        "    if is_open and _is_out_of_patience(ledger):\n",
        "    if False:\n",
        "mesh/test_patience.py",
    ),
    Fault(
        "groups keep the timeout that they began with",
        "                    set_timeout(group.handle, seconds)\n",
        "                    pass\n",
        "mesh/test_process_groups.py",
    ),
    Fault(
        "choosing layouts is no planning",
        "    with neutral(), planning():",
        "    with neutral():",
        "mesh/test_patience.py",
    ),
    Fault(
        "a pipeline runs the program of other settings of torch",
        "        key = *key, draws, cost, device, ambient()\n",
        "        key = *key, draws, cost, device\n",
        "parallel/test_pipeline.py",
    ),
    Fault(
        "ranks wait for messages outside of any call",
        "    ledger.done = max(ledger.number - 1, 0)\n",
        "",
        "mesh/test_pipeline.py",
    ),
    Fault(
        "an error of a pipeline is told on one mesh alone",
        "return [*dict.fromkeys(some)]",
        "return [meshes]",
        "mesh/test_pipeline.py",
    ),
    Fault(
        "what a loop carries is held to the end",
        "    kept = {*outs, *again.get(len(lines), ())}\n",
        "    kept = {*outs, *again.get(len(lines), ())}\n"
        "    kept.update(v for x in lines if isinstance(x.op, Round) for v in x.outs)\n",
        "programs/test_local_calls.py",
    ),
    Fault(
        "lines that nobody reads any more run under a budget",
        "        eqns = _needed(self.eqns, outs)\n",
        "        eqns = tuple(self.eqns)\n",
        "programs/test_budget.py",
    ),
    Fault(
        "a batch may have other rows than its samples",
        "    if not x.ndim or len(x) != read:\n",
        "    if False:\n",
        "io/test_batches.py",
    ),
    Fault(
        "values of all ranks stay in the order of another mesh",
        "return comm.value([held[rank] for rank in dst])",
        "return value",
        "tensors/test_several_meshes.py",
    ),
    Fault(
        "a region around a call pins what is recorded",
        "with ALONE, no_region(), contextlib.ExitStack() as stack:",
        "with ALONE, contextlib.ExitStack() as stack:",
        "tensors/test_several_meshes.py",
    ),
    Fault(
        "a choice is read for a question with other constraints",
        "(joint.prices.mesh, joint.prices.cost, joint.constraints)",
        "(joint.prices.mesh, joint.prices.cost)",
        "programs/test_choice_cache.py",
    ),
    Fault(
        "a rank that was forked has the random numbers of its neighbour",
        "    torch.default_generator.seed()\n",
        "",
        "cluster/test_fork_server.py",
    ),
    Fault(
        "the way for one size is taken for others",
        "ways = [[min(leg, key=lambda w: w.seconds(size)) for leg in legs] for legs in self._ways]",
        "ways = [[min(leg, key=lambda w: w.seconds(1)) for leg in legs] for legs in self._ways]",
        "programs/test_together.py",
    ),
    Fault(
        "no word on a tensor that a function closes over and gives no gradient",
        "if lost is None or not torch.is_grad_enabled():",
        "if lost is None or torch.is_grad_enabled():",
        "tensors/test_lost_gradients.py",
    ),
    Fault(
        "a gradient to a result without derivative is dropped",
        "if not come.isdisjoint(refused):",
        "if come.issubset(refused):",
        "tensors/test_lost_gradients.py",
    ),
    Fault(
        "ranks of a machine choose each for itself",
        "_locked(file, fcntl.LOCK_SH, PATIENCE)",
        "_locked(file, fcntl.LOCK_SH)",
        "programs/test_choice_cache.py",
    ),
    Fault(
        "torch takes derivatives of the lines of any function that moves nothing",
        "cut = both.still or both.apart or refused or not _is_of_torch(f)",
        "cut = both.still",
        "mesh/test_tensor_like.py",
    ),
    Fault(
        "what is detached gets a gradient of zeros",
        "grad = None if i in adjoint.apart else by_input.get(i)",
        "grad = by_input.get(i)",
        "tensors/test_tensor_like.py",
    ),
    Fault(
        "a function of autograd takes a DTensor that requires a gradient",
        'see("an autograd.Function", args)',
        "pass",
        "tensors/test_tensor_like.py",
    ),
    Fault(
        "that a tensor is saved in a step of a scan counts as a read of it",
        "hooks.pack_hook = _unseen(pack)",
        "hooks.pack_hook = pack",
        "ops/test_control_flow.py",
    ),
    Fault(
        "two axes may cut one dim each by sizes of its own",
        "elif any(map(_ragged_twice, (*ins, *outs))):",
        "elif False:",
        "programs/test_together.py",
    ),
    Fault(
        "a move inside of a cut that stays is priced as if it cut first",
        "moving |= {*was[stays:], *will[stays:]}",
        "moving |= set()",
        "programs/test_nested.py",
    ),
    Fault(
        "calls do not take the order of axes that was chosen",
        "order = () if nested is None else nested.calls[i]",
        "order = ()",
        "programs/test_nested.py",
    ),
    Fault(
        "an index that begins or ends elsewhere counts its dim",
        "return isinstance(start, int) and start == 0 and isinstance(step, int) and step == 1",
        "return isinstance(start, int) and isinstance(step, int)",
        "ops/test_counted_index.py",
    ),
    Fault(
        "a collective in shard_map gathers what an axis of a vmap around cuts",
        "return attrs.evolve(self, at=self.at + 1, maps=(axis_of_map(), *self.maps))",
        "return attrs.evolve(self, at=self.at + 1, maps=(None, *self.maps))",
        "tensors/test_shard_map_vmap.py",
    ),
    Fault(
        "a gate of a tensor from around belongs to a transform inside of a step",
        "with within_transforms(self.level):  # it outlives those inside",
        "with within_transforms(99):  # it outlives those inside",
        "ops/test_scan_transforms.py",
    ),
    Fault(
        "a branch that reads a tensor without a derivative first has none of it later",
        "with torch.enable_grad():  # it may be read outside of a no_grad too",
        "with torch.no_grad():  # it may be read outside of a no_grad too",
        "ops/test_scan_transforms.py",
    ),
    Fault(
        "an order that takes less time may hold more than it may",
        "if bytes_held(other).max() <= max_bytes:",
        "if bytes_held(other).max() >= 0:",
        "programs/test_schedule.py",
    ),
    Fault(
        "the last rows of an uneven cut are nobody's",
        "step = -(-size // count)",
        "step = size // count",
        "layouts",
    ),
    Fault(
        "a strided cut counts its parts from the end",
        "low, high = chunk(min(step, size - start), count, index)",
        "low, high = chunk(min(step, size - start), count, count - 1 - index)",
        "layouts testing",
    ),
    Fault(
        "an all_reduce is said to receive half of its bytes",
        "return step.src.local_nbytes(rank) * 2 * (count - 1) // count",
        "return step.src.local_nbytes(rank) * (count - 1) // count",
        "plans",
    ),
    Fault(
        "a price takes the fastest of the axes",
        "return max(a for a, _ in links + plain), min(b for _, b in links + plain)",
        "return min(a for a, _ in links + plain), max(b for _, b in links + plain)",
        "plans",
    ),
    Fault(
        "the links that a mesh names go before those of the cost model",
        "named = [(axis, NAMED_LINKS[link]) for axis, link in mesh.links if axis not in own]",
        "named = [(axis, NAMED_LINKS[link]) for axis, link in mesh.links]",
        "plans",
    ),
    Fault(
        "an all_gather puts blocks the other way round",
        "return [torch.cat(list(given))] * count",
        "return [torch.cat(list(given)[::-1])] * count",
        "plans",
    ),
    Fault(
        "a simulated rank gets what another computed of other operands",
        "key = tuple([id(operand) for operand in operands])",
        "key = tuple([id(operand) for operand in operands[:1]])",
        "runtime",
    ),
    Fault(
        "an average is not divided",
        "divide(total, len(terms))",
        "divide(total, 1)",
        "plans runtime",
    ),
    Fault(
        "the identity of a minimum is minus infinity",
        'return filled.fill_(float("-inf") if reduce_op == "max" else float("inf"))',
        'return filled.fill_(float("-inf"))',
        "plans runtime",
    ),
    Fault(
        "the cotangent of an average is not shared out",
        "return grad * ctx.count if ctx.back else grad / ctx.count, None, None",
        "return grad, None, None",
        "runtime",
    ),
    Fault(
        "a mean of blocks is taken for a mean of all",
        '_reduction("mean mean.dim", P, passes=linear_in, local=_mean)',
        '_reduction("mean mean.dim", P, passes=linear_in)',
        "ops",
    ),
    Fault(
        "a softmax may be cut along its dim",
        'if d != named["dim"] % x.ndim:',
        'if d != named["dim"]:',
        "ops",
    ),
    Fault(
        "a halo is one too narrow",
        "return (self.at(start)[0], self.at(stop - 1)[-1] + 1) if start < stop else (0, 0)",
        "return (self.at(start)[0], self.at(stop - 1)[-1]) if start < stop else (0, 0)",
        "ops",
    ),
    Fault(
        "programs under autocast are those without",
        "return torch.get_default_device(), casts()",
        "return (torch.get_default_device(),)",
        "ops",
    ),
    Fault(
        "readers leave terms where the whole cotangent is asked for",
        "if cotangents is None or cotangents.is_closed:",
        "if cotangents is None:",
        "tensors/test_by_op.py",
    ),
    Fault(
        "a sum that is looked at without gradients has none later",
        "with torch.set_grad_enabled(tracked or torch.is_grad_enabled()):",
        "with torch.set_grad_enabled(torch.is_grad_enabled()):",
        "tensors/test_by_op.py",
    ),
    Fault(
        "a backward that failed leaves its terms to the next one",
        "if self._task != current_graph_task():",
        "if self._task is None:",
        "tensors/test_by_op.py",
    ),
    Fault(
        "each reader of a sum reduces it",
        "self._sum, self.terms = value, None",
        "self.edges = ()",
        "tensors/test_by_op.py",
    ),
    Fault(
        "indices that are out of range are not counted",
        "count = (~inside).sum(dtype=torch.float32)",
        "count = (~inside).sum(dtype=torch.float32) * 0",
        "ops",
    ),
    Fault(
        "collectives that travel together come back in another order",
        "return Eqn(Together(steps), ins, (), tuple(eqn.outs[0] for eqn in eqns))",
        "return Eqn(Together(steps), ins, (), tuple(eqn.outs[0] for eqn in eqns[::-1]))",
        "programs",
    ),
    Fault(
        "a move is priced as if no other axis cut the value",
        "shape[p.dim] = -(-shape[p.dim] // size)",
        "shape[p.dim] = shape[p.dim]",
        "programs inspect",
    ),
    Fault(
        "a key is not folded with the place of a block",
        "return draw(Places(type.shape, type.box(coord)), on)",
        "return draw(Places.all(type.local_shape(rank)), on)",
        "tensors",
    ),
    Fault(
        "replicas count several times in a norm",
        "for x in tensors if (t := _block(x, rank, replicas)) is not None and t.numel()",
        "for x in tensors if (t := _block(x, rank, True)) is not None and t.numel()",
        "tensors",
    ),
    Fault(
        "the rows of a vocabulary are cut as columns",
        'dim = role.read if role.kind == "embedding" else role.made',
        "dim = role.made",
        "parallel",
    ),
    Fault(
        "a piece of a checkpoint is taken from the start of its block",
        "local = local.narrow(dim, start, stop - start)",
        "local = local.narrow(dim, 0, stop - start)",
        "io",
    ),
    Fault(
        "replicas that differ are stored without a word",
        "return all(total % 2**32 == 0 for total in summed.tolist())",
        "return True",
        "io",
    ),
    Fault(
        "the cheapest moves are told first",
        "for spent, eqn in sorted(sent, key=lambda move: -move[0])[:MOST]:",
        "for spent, eqn in sorted(sent, key=lambda move: move[0])[:MOST]:",
        "inspect",
    ),
    Fault(
        "gradients are not compared on every layout",
        "for name, a, b in zip(smooth, actual.grads, expected.grads, strict=True):",
        "for name, a, b in zip(smooth, expected.grads, expected.grads, strict=True):",
        "testing",
    ),
    Fault(
        "ranks of a cluster get each other's arguments",
        "arguments = zip(*values, strict=True) if values else [()] * self.n",
        "arguments = zip(*[v[::-1] for v in values]) if values else [()] * self.n",
        "cluster",
    ),
    Fault(
        "a move of pending terms is said to take a term more at least",
        "sent = (terms - 1) * np.where(without_sums == 0, wide, 1.0)",
        "sent = terms * np.where(without_sums == 0, wide, 1.0)",
        "programs/test_bound.py",
    ),
    Fault(
        "a branch that was solved before a price was known counts as it is",
        "if cost_of is not None and cost_of(solution.x) > least * (1 + WHOLE):",
        "if cost_of is not None and cost_of(solution.x) > least * 2:",
        "programs/test_bound.py",
    ),
    Fault(
        "what moves cost is divided among takers, each of whom bears the rest",
        "rest = np.maximum(0.0, seconds - needed) / len(self.edges)",
        "rest = np.maximum(0.0, seconds - needed)",
        "programs/test_bound.py",
    ),
    Fault(
        "digests of ranks are not compared",
        "ledger.begin(int(digest[:15], 16), about)",
        "ledger.begin(0, about)",
        "mesh",
    ),
    Fault(
        "calls of ranks are not compared while they wait",
        "if ledger.board.mark(number, record[1]) != record[1]:",
        "if not record:",
        "faults runtime/test_control.py",
    ),
    Fault(
        "an error of one rank is not told to the others",
        'self.fail("raised", told_of(error), clean, raised_at(error))',
        "pass",
        "faults runtime/test_control.py",
    ),
    Fault(
        "biases and norms decay",
        "decay = {name: self.decay if len(p.shape) > 1 else 0.0 for name, p in params.items()}",
        "decay = {name: self.decay for name, p in params.items()}",
        "top/test_train.py",
    ),
    Fault(
        "results that nothing reads are not held",
        "most = max(most, held + _unread_bytes(call, graph))",
        "most = max(most, held)",
        "programs/test_local_calls.py",
    ),
    Fault(
        "a negative NaN travels below all numbers",
        'return -count if reduce_op == "max" else count',
        "return 0",
        "plans/test_collectives.py",
    ),
)


def put(fault: Fault, package: Path) -> Path:
    """The file of the package that has the line, which now reads otherwise."""
    files = [path for path in sorted(package.rglob("*.py")) if fault.line in path.read_text()]
    counts = [path.read_text().count(fault.line) for path in files]
    if counts != [1]:
        where = ", ".join(str(path.relative_to(package)) for path in files) or "no file"
        raise SystemExit(f"{fault.name}: {fault.line!r} is in {where}, {sum(counts)} times.")
    (path,) = files
    path.write_text(path.read_text().replace(fault.line, fault.instead))
    return path


def seen_by(fault: Fault, arguments: Sequence[str]) -> str | None:
    """The first test that fails with the fault, or None."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        for name in TAKEN:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, there / name)
        put(fault, there / "fdtensor")
        places = [f"tests/{place}" for place in fault.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
        done = subprocess.run(
            [*command, *arguments, *places],
            cwd=there,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1, 2) or (done.returncode and not told):
        raise SystemExit(f"{fault.name}: pytest ended with {done.returncode}.\n{done.stdout}")
    return told[0].partition(" - ")[0] if told else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Puts in one fault after the other, prints who saw it, and returns how many nobody did."""
    parser = argparse.ArgumentParser("python -m tests.mutations", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="let the deep tests look")
    parser.add_argument("names", nargs="*", help="parts of the names of faults")
    asked = parser.parse_args(arguments)
    some = [f for f in FAULTS if not asked.names or any(name in f.name for name in asked.names)]
    missed = 0
    for fault in some:
        begun = time.perf_counter()
        by = seen_by(fault, ["--deep"] if asked.deep else [])
        missed += by is None
        took = f"{time.perf_counter() - begun:.0f} s"
        print(f"{'caught' if by else 'MISSED'}  {fault.name} ({fault.tests}, {took})", flush=True)
        print(f"        {by or ''}", flush=True)
    print(f"{len(some) - missed} of {len(some)} caught")
    return missed


if __name__ == "__main__":
    sys.exit(min(1, main()))
