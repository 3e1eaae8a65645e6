"""`assert_same_on_every_layout`, and `assert_same_on_layouts` for one choice of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.expected import no_mesh
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.words import shown
from fdtensor.ops.random_bits import Key
from fdtensor.programs.options import OnMissingRule
from fdtensor.testing.case import Case
from fdtensor.testing.checker import CaseFailure, Checker
from fdtensor.testing.compare import Tolerance
from fdtensor.testing.layout_case import LayoutCase, plain, smallest
from fdtensor.testing.report import told
from fdtensor.testing.script import integers, script, simple_values
from fdtensor.testing.strides import Strides

if TYPE_CHECKING:
    from fdtensor.cluster import LocalCluster

__all__ = ["assert_same_on_every_layout", "assert_same_on_layouts"]

_REAL = 3
"""How many settings that hold on simulated ranks run on real ones too."""

_LINEAR: tuple[ReduceOp, ...] = ("sum", "avg")
"""The reductions that may be pending in a value with a derivative."""


def assert_same_on_every_layout(
    f: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    max_ranks: int = 6,
    partial: bool | Collection[ReduceOp] = True,
    grad: bool = False,
    key: Key | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    max_examples: int = 30,
    seed: int = 0,
    on_missing_rule: OnMissingRule = "replicate",
    spread: Callable[..., Any] | None = None,
    ranks: LocalCluster | None = None,
    **kwargs: Any,
) -> None:
    """Runs `f(*args, **kwargs)` under random layouts and compares with the single process.

    The tensors among the arguments, pytrees, are laid out on random meshes of up to `max_ranks`
    ranks, or on `mesh`; sums and other reductions are pending in some, as `partial` says, and
    blocks lie in memory in any way. All ranks are simulated. Integers must be equal, floats close
    as for `torch.testing.assert_close`. With `grad` gradients by all floating tensors are compared
    too; `key` is what random ops draw from. Arguments must stay as they are.

        assert_same_on_every_layout(torch.softmax, torch.randn(4, 6), dim=1, grad=True)

    What is run is `spmd(f)`, or `spread`, a function of DTensors. With `ranks`, a cluster such as
    the fixture `gloo_ranks(4)`, meshes are of its ranks: what fails is run on it too, else three of
    the settings. The same `seed` draws the same. Arguments of `f` that are called like an option
    here can be bound by a lambda.

    Raises AssertionError for the smallest layouts that fail, by a result or by an error of their
    own: with fewest ranks, then fewest cuts and axes, then even blocks. Its text has the layouts,
    the worst element, the program and a script that fails the same way. What `f` itself raises for
    plain tensors comes out as it is.

    >>> fd.testing.assert_same_on_every_layout(lambda x: x.cumsum(0), torch.arange(6))
    """
    __tracebackhide__ = True
    if mesh is not None and not isinstance(mesh, Mesh):
        raise no_mesh(mesh)
    case = Case.of(
        f, args, kwargs, spread=spread, grad=grad, key=key, on_missing_rule=on_missing_rule
    )
    checker = Checker(case, Tolerance(rtol, atol))
    world = None if ranks is None else ranks.n
    if grad:
        partial = [op for op in _LINEAR if partial is True or (partial and op in partial)]
    most = min(max_ranks, world or max_ranks)
    drawn = _drawn(case.tensors, mesh, most, world, partial, max_examples, seed)
    for i, setting in enumerate(drawn):
        problem = checker.problem(setting)
        if problem is not None:
            story = f"setting {i + 1} of {len(drawn)}, seed {seed}"
            raise _failed(checker, setting, problem, story, mesh is not None, ranks)
    if ranks is not None:
        for setting in sorted(drawn, key=lambda s: -s.mesh.size)[:_REAL]:
            _assert_on(ranks, checker, setting)


def assert_same_on_layouts(
    f: Callable[..., Any],
    *args: Any,
    layouts: Sequence[Layout],
    seed: int = 0,
    grad: bool = False,
    key: Key | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    on_missing_rule: OnMissingRule = "replicate",
    spread: Callable[..., Any] | None = None,
    ranks: LocalCluster | None = None,
    strides: Sequence[Strides | None] = (),
    **kwargs: Any,
) -> None:
    """Runs `f(*args, **kwargs)` under these layouts and compares with the single process.

    `layouts` has one for each tensor among the arguments, in the order of the pytree, as `strides`
    does, where blocks are not contiguous; `seed` splits what is pending. The rest is as for
    `assert_same_on_every_layout`, which prints such calls. With `ranks` it runs on those real ranks
    too, and the error says whether they agree with the simulated ones.

        assert_same_on_layouts(torch.mm, x, w, layouts=[mesh.layout("dp"), mesh.layout()])

    >>> rows = Mesh(x=2).layout("x")
    >>> fd.testing.assert_same_on_layouts(lambda x: x.cumsum(0), torch.arange(6), layouts=[rows])
    """
    __tracebackhide__ = True
    case = Case.of(
        f, args, kwargs, spread=spread, grad=grad, key=key, on_missing_rule=on_missing_rule
    )
    _check_list(layouts)
    if len(layouts) != len(case.places):
        raise LayoutError(
            f"{len(layouts)} layouts for {len(case.places)} tensors.",
            tensors=", ".join(case.where()),
            hint="Give one layout for each tensor among the arguments.",
        )
    pairs = zip(case.tensors, layouts, strict=True)
    types = [TensorType(tuple(t.shape), t.dtype, layout) for t, layout in pairs]
    setting = LayoutCase(types, seed, strides or [None] * len(types))
    checker = Checker(case, Tolerance(rtol, atol))
    problem = checker.problem(setting)
    if problem is not None:
        real = None if ranks is None else _beside(ranks, checker, setting, problem)
        raise _told(checker, setting, problem, real)
    if ranks is not None:
        _assert_on(ranks, checker, setting)


def _check_list(layouts: object) -> None:
    if not isinstance(layouts, (list, tuple)):
        raise LayoutError(
            f"layouts={shown(layouts)} is no list of layouts.",
            hint="Give a list with one layout for each tensor among the arguments.",
        )


def _drawn(
    tensors: Sequence[torch.Tensor],
    mesh: Mesh | None,
    max_ranks: int,
    world: int | None,
    partial: bool | Collection[ReduceOp],
    max_examples: int,
    seed: int,
) -> list[LayoutCase]:
    """Different settings, at most `max_examples`: the plainest, then any, one of one rank."""
    from fdtensor.testing.drawing import drawn
    from fdtensor.testing.tensor_strategies import settings_of

    types = [(tuple(t.shape), t.dtype) for t in tensors]
    strategy = settings_of(types, mesh=mesh, max_ranks=max_ranks, world=world, partial=partial)
    drawn_mesh = mesh or Mesh(**{_AXIS: min(2, max_ranks)})
    first = plain(types, drawn_mesh, partial is True or (bool(partial) and "sum" in partial))
    settings: dict[object, LayoutCase] = {}
    for setting in (*first, *drawn(strategy, 3 * max_examples // 2, seed)):
        settings.setdefault(setting.types if setting.mesh.size > 1 else None, setting)
    return list(settings.values())[:max_examples]


_AXIS = "x"
"""That of the plainest meshes."""


def _failed(
    checker: Checker,
    setting: LayoutCase,
    problem: CaseFailure,
    story: str,
    same_mesh: bool,
    ranks: LocalCluster | None,
) -> AssertionError:
    """The error for the smallest setting that has the same kind of problem."""

    def fails(candidate: LayoutCase) -> bool:
        other = checker.problem(candidate)
        return other is not None and other.kind == problem.kind

    least, tried = smallest(setting, fails, same_mesh=same_mesh)
    simple = simple_values(checker.case, lambda case: _still(checker, case, least, problem))
    final = Checker(simple, checker.tolerance)
    last = final.problem(least)
    assert last is not None
    real = None if ranks is None else _beside(ranks, final, least, last)
    story = f"{story}; {tried} smaller ones tried"
    return _told(final, least, last, real, story, script(simple, least, checker.tolerance))


def _still(checker: Checker, case: Case, setting: LayoutCase, problem: CaseFailure) -> bool:
    """Whether other values have the same kind of problem."""
    try:
        other = Checker(case, checker.tolerance).problem(setting)
    except Exception:
        return False
    return other is not None and other.kind == problem.kind


def _told(
    checker: Checker,
    setting: LayoutCase,
    problem: CaseFailure,
    real: str | None = None,
    story: str = "",
    repro: str = "",
) -> AssertionError:
    """The error that says it all."""
    rounding = not problem.kind and not _still(checker, integers(checker.case), setting, problem)
    text = told(checker.case, setting, problem, rounding=rounding, real=real, story=story)
    if repro:
        text += f"\n\nThis script fails the same way:\n\n{repro}"
    error = AssertionError(text)
    if isinstance(problem.cause, Exception):
        error.__cause__ = problem.cause
    return error


def _beside(
    ranks: LocalCluster, checker: Checker, setting: LayoutCase, problem: CaseFailure
) -> str:
    """The verdict of real ranks on a problem of simulated ones."""
    real = checker.problem_on(ranks, setting)
    if real is None:
        return "agree with the single process: only simulated ranks fail"
    if str(real) == str(problem):
        return "agree with the simulated ones"
    return str(real)


def _assert_on(ranks: LocalCluster, checker: Checker, setting: LayoutCase) -> None:
    __tracebackhide__ = True
    failure = checker.problem_on(ranks, setting)
    if failure is not None:
        real = f"{failure}, though simulated ranks agree with the single process"
        raise _told(checker, setting, failure, real)
