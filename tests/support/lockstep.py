"""Runs plain modules of all ranks in one process: each in a thread, their collectives by hand."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.process_groups import group_name


class Meeting:
    """Where the threads of the ranks wait for each other and see what all have brought."""

    def __init__(self, mesh: Mesh) -> None:
        self.names: dict[str, tuple[int, ...]] = {}
        for k in range(1, mesh.ndim + 1):
            for axes in itertools.combinations(mesh.axes, k):
                for coord in map(mesh.coord, mesh.ranks):
                    assert coord is not None
                    ranks = tuple(sorted(mesh.coset(axes, coord)))
                    self.names[group_name(ranks)] = ranks
        self.lock = threading.Condition()
        self.brought: dict[Any, dict[int, Any]] = {}
        self.failed: BaseException | None = None

    def met(self, rank: int, group: str, number: int, what: Any) -> list[Any]:
        """What each rank of a group has brought to its meeting of this number."""
        ranks = self.names[group]
        key = group, number
        with self.lock:
            here = self.brought.setdefault(key, {})
            here[rank] = what
            self.lock.notify_all()
            done = self.lock.wait_for(lambda: len(here) == len(ranks) or self.failed, timeout=60)
            if self.failed or not done:
                raise RuntimeError(f"rank {rank} waits for {set(ranks) - set(here)} in {group}")
            return [here[r] for r in ranks]


class _Rank(torch.fx.Interpreter):
    def __init__(self, module: Any, rank: int, meeting: Meeting, counts: dict[str, int]) -> None:
        super().__init__(module)
        self.rank, self.meeting, self.counts = rank, meeting, counts

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        op = target._schema.name.split("::")[1]
        if op == "wait_tensor":
            return args[0]
        x, *rest, group = args
        number = self.counts.get(group, 0)
        self.counts[group] = number + 1
        assert x.is_contiguous()
        brought = self.meeting.met(self.rank, group, number, (op, x.clone(), rest))
        place = self.meeting.names[group].index(self.rank)
        assert {b[0] for b in brought} == {op}
        terms = [b[1] for b in brought]
        match op:
            case "all_gather_into_tensor":
                assert rest == [len(terms)]
                return torch.cat(terms)
            case "all_reduce":
                return _reduced(terms, rest[0])
            case "reduce_scatter_tensor":
                return _reduced(terms, rest[0]).chunk(len(terms))[place].clone()
            case "all_to_all_single":
                pieces = [b[1].split(list(b[2][1]))[place] for b in brought]
                assert [len(p) for p in pieces] == list(rest[0])
                return torch.cat(pieces)
            case "broadcast":
                ranks = self.meeting.names[group]
                return terms[ranks.index(rest[0])].clone()
        raise AssertionError(op)


def _reduced(terms: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    stack = torch.stack(list(terms))
    return {
        "sum": lambda: stack.sum(0).to(stack.dtype),
        "avg": lambda: stack.mean(0),
        "max": lambda: stack.amax(0),
        "min": lambda: stack.amin(0),
        "product": lambda: stack.prod(0).to(stack.dtype),
        "band": lambda: functools.reduce(torch.bitwise_and, terms),
        "bor": lambda: functools.reduce(torch.bitwise_or, terms),
        "bxor": lambda: functools.reduce(torch.bitwise_xor, terms),
    }[reduce_op]()


def _flat(module: Any, args: Any, kwargs: Any) -> Sequence[Any]:
    """The arguments as the inputs of a graph, in order."""
    codegen = module.graph._codegen
    if not kwargs:
        return codegen.process_inputs(*args)
    return torch.fx._pytree.tree_flatten_spec((args, kwargs), codegen.pytree_info.in_spec)


def together(modules: Mapping[int, Any], mesh: Mesh, *args: Any, **kwargs: Any) -> dict[int, Any]:
    """What the module of each rank gives for these arguments; raises what one of them raises."""
    return apart(modules, mesh, {rank: _flat(modules[rank], args, kwargs) for rank in modules})


def apart(
    modules: Mapping[int, Any], mesh: Mesh, inputs: Mapping[int, Sequence[Any]]
) -> dict[int, Any]:
    """What the module of each rank gives for inputs of its own; raises what one of them raises."""
    meeting = Meeting(mesh)
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        module = modules[rank]
        try:
            with torch.no_grad():
                each = _Rank(module, rank, meeting, {})
                found = each.run(*inputs[rank], enable_io_processing=False)
                results[rank] = module.graph._codegen.process_outputs(found)
        except BaseException as error:
            with meeting.lock:
                meeting.failed = meeting.failed or error
                meeting.lock.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failed:
        raise meeting.failed
    return results
