"""The errors: one sentence with the values, the facts aligned, then what to do."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = [
    "CheckpointError",
    "CommError",
    "DataDependentError",
    "FallbackWarning",
    "FdtensorError",
    "IndexRangeError",
    "LayoutError",
    "MeshError",
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
    """A mesh that cannot be, or a rank or axis it does not have."""


class LayoutError(FdtensorError):
    """A placement, layout or tensor type that cannot be."""


class PlanError(FdtensorError):
    """A plan that cannot be: shapes or dtypes that differ, or a budget too small."""


class CommError(FdtensorError):
    """Something that cannot run on this Comm, or ranks that do not agree."""


class RuleError(FdtensorError):
    """An op without a rule for the layouts at hand, or a rule that cannot be."""


class TraceError(FdtensorError):
    """A function that cannot become a program."""


class DataDependentError(TraceError):
    """A function whose shapes or control flow depend on the values of tensors."""


class IndexRangeError(FdtensorError, IndexError, RuntimeError):
    """An index that is out of range: torch raises an IndexError for some ops, else RuntimeError."""


class OperandError(FdtensorError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
    """An operand that an op refuses for its values: a singular matrix, no probability."""


class FallbackWarning(UserWarning):
    """Said once of what runs, but costs more bytes, memory or time than what was asked for."""


class ValueTreeError(FdtensorError):
    """A pytree of values or layouts that do not fit together."""


class CheckpointError(FdtensorError):
    """Files of tensors that cannot be read or written, or do not hold what is asked of them."""
