"""`Dynamic`: a function that is recorded once for all sizes of some dims of its arguments.

Each recording is a template for the sizes that meet its conditions: those that the function asked
about, as where it branches on one. The program at the first of these sizes says what layouts
another one has, so that results come out alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from fdtensor.layouts.callsite import user_line, warn_user
from fdtensor.layouts.errors import FallbackWarning
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.words import first_sentence
from fdtensor.ops.graph import Full
from fdtensor.ops.rewrite import rewritten
from fdtensor.ops.sizes import Computed, Shape, Sizes, Template
from fdtensor.programs.program import Program
from fdtensor.programs.recording import Recorded

__all__ = ["Dynamic", "Recording"]


@attrs.define(eq=False)
class Recording:
    """A function as it was recorded for all sizes that meet the conditions of a template."""

    recorded: Recorded
    """With `Computed` where numbers depend on sizes."""
    template: Template
    program: Program | None = None
    """The program at the first of these sizes."""

    @property
    def in_shapes(self) -> tuple[Shape, ...]:
        """The shapes of what the function takes."""
        return self.template.shapes

    @property
    def out_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the tensors that it returns."""
        graph = self.template.graph
        return tuple([graph.types[v.index].shape for v in graph.outs])

    def at(self, values: Mapping[Any, Any]) -> Recorded:
        """The function at these sizes, as a recording there would give it."""
        statics = [s.at(values) if isinstance(s, Computed) else s for s in self.recorded.statics]
        graph = rewritten(self.template.at(values))
        return attrs.evolve(self.recorded, graph=graph, statics=tuple(statics))


@attrs.frozen(eq=False)
class Dynamic:
    """What a function was recorded as at earlier sizes, and what is known of those of a call."""

    recordings: list[Recording]
    """The later ones are added to these."""
    shapes: Sequence[Shape]
    """Of each tensor of the call."""
    told: set[str] = attrs.field(factory=lambda: set[str]())
    """Why a recording is of one size alone, as far as it was said."""

    def recorded(
        self, name: str, types: Sequence[TensorType | FreeType], record: Callable[..., Recorded]
    ) -> tuple[Recorded, Recording | None]:
        """The function at these sizes, and the recording that it comes from, if there is one.

        `record(sizes=...)` records it. Where it cannot be, or asks for a number, that is told.
        """
        fulls = [Full(t.shape, t.dtype) for t in types]
        for recording in self.recordings:
            values = recording.template.values(fulls)
            if values is not None:
                return recording.at(values), recording
        sizes, failure = Sizes(self.shapes, fulls), ""
        try:
            recorded = record(sizes=sizes)
        except Exception as error:  # which may be of torch itself, where it takes numbers alone
            recorded, failure = None, first_sentence(error)
        if recorded is None:
            recorded = record()
            self._tell(name, f"it does not take a symbol for one: {failure}")
            return recorded, None
        recording = Recording(recorded, sizes.template(recorded.graph))
        values = recording.template.values(fulls)
        if values is None:
            return record(), None
        self.recordings.append(recording)
        fixed = {c.fixes: c.place for c in recording.template.conditions if c.fixes}
        for size, place in fixed.items():
            self._tell(name, f"{place} asks which number {size} is")
        return recording.at(values), recording

    def _tell(self, name: str, why: str) -> None:
        """Says, once, that a function is recorded for each size, and why."""
        if why not in self.told:
            self.told.add(why)
            text = f"{name} is recorded again for each size, since {why}"
            warn_user(f"{text} ({user_line() or 'not known'})", FallbackWarning)
