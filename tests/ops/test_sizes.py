"""A recording on symbols gives at all sizes what a recording at these sizes gives."""

import random
import re
import warnings

import pytest
import torch

from fdtensor.layouts.tree import flatten
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.recorder import record
from fdtensor.ops.sizes import Sizes, new_symbol
from tests.operators.samples import Sample, entries, samples_of

pytestmark = pytest.mark.slow

OTHERS = (1, 2, 3, 4, 6, 7, 9, 0)


def flat(sample: Sample):
    """The function of a sample, from a list of tensors to one."""

    def f(tensors):
        return [t for t in flatten(sample.f(*tensors))[0] if isinstance(t, torch.Tensor)]

    return f


def text(graph: Graph) -> str:
    """The graph without the texts of faults, where a formula stands for a number."""
    return re.sub(r"'[^']* at \S+:\d+'", "TEXT", str(graph))


@pytest.mark.few(80)
@pytest.mark.parametrize("name", entries())
def test_a_template_gives_the_graph_at_any_sizes(name):
    chance = random.Random(name)
    for sample in samples_of(name, 2):
        fulls = [Full(shape, t.dtype) for shape, t in zip(sample.shapes, sample.tensors)]
        symbols = {n: new_symbol(f"n{n}") for t in fulls for n in t.shape if n > 1}
        shapes = [tuple([symbols.get(n, n) for n in t.shape]) for t in fulls]
        f, sizes = flat(sample), Sizes(shapes, fulls)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                record(f, fulls, checks=True)
                template = sizes.template(record(f, fulls, checks=True, sizes=sizes))
            except Exception:  # not recorded at all, or at one size alone
                continue
            assert template.values(fulls) is not None
            for _ in range(4):
                to = {n: chance.choice(OTHERS) for n in symbols}
                other = [Full(tuple([to.get(n, n) for n in t.shape]), t.dtype) for t in fulls]
                for there in (fulls, other):
                    values = template.values(there)
                    if values is not None:
                        graph = record(f, there, checks=True)
                        assert text(template.at(values)) == text(graph)
