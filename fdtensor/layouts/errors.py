"""The errors: one sentence with the values, the facts aligned, then what to do."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CommError",
    "DataDependentError",
    "FallbackWarning",
    "FdtensorError",
    "IndexRangeError",
    "LayoutError",
    "MeshError",
    "NotTorchError",
    "OperandError",
    "PlanError",
    "RuleError",
    "TraceError",
    "ValueTreeError",
]


class FdtensorError(ValueError):
    """The error of this library: one sentence with the values, facts and a hint.

    `sentence` ends with a full stop and holds the offending values; each of `facts` becomes one
    aligned line; `hint` says what to do. A fact of several lines is indented as a block.

    >>> raise fd.FdtensorError("3 blocks for 4 ranks.", blocks=[5, 5, 2], hint="Give one a rank.")
    Traceback (most recent call last):
        ...
    fdtensor.FdtensorError: 3 blocks for 4 ranks.
    ...
    """

    __module__ = "fdtensor"

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = "fdtensor"  # the name that users import it by, and read in a traceback

    def __init__(self, sentence: str, *, hint: str = "", **facts: object) -> None:
        self.sentence = sentence
        self.hint = hint
        self.facts: dict[str, str] = {name: str(value) for name, value in facts.items()}
        super().__init__(sentence)

    def __str__(self) -> str:
        blocks = [self.sentence]
        if self.facts:
            width = max(len(name) for name in self.facts) + 2
            lines: list[str] = []
            for name, value in self.facts.items():
                first, *rest = value.split("\n")
                lines.append(f"  {name + ':':<{width}}{first}")
                lines += [" " * (width + 2) + line for line in rest]
            blocks.append("\n".join(lines))
        if self.hint:
            blocks.append(self.hint)
        return "\n\n".join(blocks)

    def __reduce__(self) -> tuple[Callable[..., FdtensorError], tuple[object, ...]]:
        return _rebuild, (type(self), self.sentence, self.hint, self.facts)


def _rebuild(
    kind: type[FdtensorError], sentence: str, hint: str, facts: dict[str, str]
) -> FdtensorError:
    return kind(sentence, hint=hint, **facts)


class MeshError(FdtensorError):
    """A mesh that cannot be, or a rank or axis it does not have.

    >>> Mesh(dp=2, tp=0)
    Traceback (most recent call last):
        ...
    fdtensor.MeshError: mesh axis 'tp' has size 0.
    ...
    """


class LayoutError(FdtensorError):
    """A placement, layout or tensor type that cannot be.

    >>> TensorType((8, 16), torch.float32, Mesh(x=2).layout(None, None, "x"))
    Traceback (most recent call last):
        ...
    fdtensor.LayoutError: mesh axis 'x' shards dim 2 of a tensor that has 2 dims.
    ...
    """


class PlanError(FdtensorError):
    """A plan that cannot be: shapes or dtypes that differ, or a budget too small.

    >>> types = [TensorType((n,), torch.float32, Mesh(x=2).layout("x")) for n in (4, 6)]
    >>> plan(*types)
    Traceback (most recent call last):
        ...
    fdtensor.PlanError: a plan moves a tensor, it does not change it from f32[4] to f32[6].
    ...
    """


class CommError(FdtensorError):
    """Something that cannot run on this Comm, or ranks that do not agree.

    >>> mesh = Mesh(x=2)
    >>> rows = TensorType((4,), torch.int64, mesh.layout("x"))
    >>> from_local((torch.arange(2), torch.arange(3)), rows, connect(mesh))
    Traceback (most recent call last):
        ...
    fdtensor.CommError: from_local cannot start: rank 1 has shape (3,), expected (2,).
    ...
    """

    common = False
    """Whether all ranks of a call have raised it together, so that none waits for another."""


class RuleError(FdtensorError):
    """An op without a rule for the layouts at hand, or a rule that cannot be.

    >>> rule(torch.relu)(lambda x: [((Replicate(),), Replicate())])
    Traceback (most recent call last):
        ...
    fdtensor.RuleError: relu is no op, so it can have no rule.
    ...
    """


class TraceError(FdtensorError):
    """A function that cannot become a program.

    >>> rows = TensorType((4,), torch.float32, Mesh(x=2).layout("x"))
    >>> trace(torch.rand_like, rows)
    Traceback (most recent call last):
        ...
    fdtensor.TraceError: aten.rand_like.default draws random numbers, and has no key to draw from.
    ...
    """


class DataDependentError(TraceError):
    """A function whose shapes or control flow depend on the values of tensors.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), connect(mesh))
    >>> spmd(torch.nonzero)(x)
    Traceback (most recent call last):
        ...
    fdtensor.DataDependentError: the shape of what nonzero gives depends on ...
    ...
    """


class IndexRangeError(FdtensorError, IndexError, RuntimeError):
    """An index that is out of range: torch raises an IndexError for some ops, else RuntimeError.

    >>> comm = connect(Mesh(x=2))
    >>> table, i = (distribute(torch.tensor(v), Mesh(x=2).layout(), comm) for v in ([5, 7], [0, 2]))
    >>> spmd(lambda table, i: table[i])(table, i)
    Traceback (most recent call last):
        ...
    fdtensor.IndexRangeError: 1 entry where it must not be: index of index, -2 to 1.
    ...
    """


class OperandError(FdtensorError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
    """An operand that an op refuses for its values: a singular matrix, no probability.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.ones(2, 2), mesh.layout("x"), connect(mesh))
    >>> spmd(torch.linalg.inv)(x)
    Traceback (most recent call last):
        ...
    fdtensor.OperandError: 1 entry where it must not be: matrix of linalg.inv, regular.
    ...
    """


class ArgumentError(FdtensorError, TypeError):
    """A call without an argument that a function needs, or with one that it does not have.

    >>> spmd(torch.relu, out_layout=None)
    Traceback (most recent call last):
        ...
    fdtensor.ArgumentError: spmd has no argument 'out_layout'.
    ...
    """


class NotTorchError(FdtensorError, TypeError, AttributeError):
    """A record of this library used as what torch has: a DTensor as a tensor, an optimizer.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), connect(mesh))
    >>> x.add_(1)
    Traceback (most recent call last):
        ...
    fdtensor.NotTorchError: a DTensor has no attribute 'add_'.
    ...
    """


class FallbackWarning(UserWarning):
    """Said once of what runs, but costs more bytes, memory or time than what was asked for.

    Also said of what is lost: a value that a function writes to an argument and nothing reads, a
    gradient of a tensor that it closes over.

    >>> import warnings
    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), connect(mesh))
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     y = spmd(torch.nonzero, on_data_dependent="replicate")(x)
    >>> print(said[0].category.__name__, y.shape)
    FallbackWarning torch.Size([3, 1])
    """


class ValueTreeError(FdtensorError):
    """A pytree of values or layouts that do not fit together.

    >>> mesh = Mesh(x=2)
    >>> params = {"w": distribute(torch.arange(4), mesh.layout("x"), connect(mesh))}
    >>> redistribute(params, {"b": mesh.layout()})
    Traceback (most recent call last):
        ...
    fdtensor.ValueTreeError: the layouts do not have the structure of the tree.
    ...
    """


class CheckpointError(FdtensorError):
    """Files of tensors that cannot be read or written, or do not hold what is asked of them.

    >>> fd.checkpoint_contents("nowhere")
    Traceback (most recent call last):
        ...
    fdtensor.CheckpointError: there is no checkpoint at 'nowhere'.
    ...
    """
