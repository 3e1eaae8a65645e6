"""`unshared`: a graph whose views of inputs are taken anew for each use.

Inputs that are gathered are freed after each use and gathered again, and so are views of them.
"""

from __future__ import annotations

from fdtensor.ops.graph import Call, Full, Graph, Var, is_view, substituted

__all__ = ["unshared", "views_of_inputs"]


def views_of_inputs(graph: Graph) -> frozenset[Var]:
    """The inputs of a graph and all views of them."""
    views = set(graph.inputs)
    for call in graph.calls:
        if is_view(call) and call.ins[0] in views:
            views.update(v for v in call.outs if v is not None)
    return frozenset(views)


def unshared(graph: Graph) -> Graph:
    """The graph with views of inputs taken anew for each use, straight from the input."""
    views = {v: call for call in graph.calls for v in call.outs if v is not None}
    of_inputs = views_of_inputs(graph) - set(graph.inputs)
    types: list[Full] = list(graph.types)
    calls: list[Call] = []

    def fresh(v: Var) -> Var:
        if v not in of_inputs:
            return v
        call = views[v]
        copy = Var(len(types))
        types.append(types[v.index])
        args, kwargs = substituted((call.args, call.kwargs), fresh)
        outs = tuple(copy if o is v else None for o in call.outs)
        calls.append(Call(call.op, args, kwargs, outs, call.mark))
        return copy

    for call in graph.calls:
        if any(v in of_inputs for v in call.outs if v is not None):
            continue
        args, kwargs = substituted((call.args, call.kwargs), fresh)
        calls.append(Call(call.op, args, kwargs, call.outs, call.mark))
    outs = tuple(fresh(v) for v in graph.outs)
    return Graph(graph.inputs, graph.constants, tuple(calls), outs, tuple(types))
