"""Ways of parallelism: styles by the names of modules, pipelines, exported programs of one rank.

It imports from all rooms up to `tensors`. It offers the styles with `layouts_for`, `pipeline`,
`tensor_parallel`, which cuts an exported program, and `input_reshard`, under which activations
wait for the backward in shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdtensor.layouts.lazy import lazy_names

if TYPE_CHECKING:
    from fdtensor.parallel.module_layouts import layouts_for
    from fdtensor.parallel.partition import tensor_parallel
    from fdtensor.parallel.pipelines.pipeline import pipeline
    from fdtensor.parallel.resharded import input_reshard, remove_input_reshard
    from fdtensor.parallel.styles import (
        Colwise,
        Rowwise,
        SequenceParallel,
        VocabParallel,
    )

__all__ = [
    "Colwise",
    "Rowwise",
    "SequenceParallel",
    "VocabParallel",
    "input_reshard",
    "layouts_for",
    "pipeline",
    "remove_input_reshard",
    "tensor_parallel",
]

if not TYPE_CHECKING:  # checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "parallel.module_layouts": ["layouts_for"],
            "parallel.partition": ["tensor_parallel"],
            "parallel.pipelines.pipeline": ["pipeline"],
            "parallel.resharded": ["input_reshard", "remove_input_reshard"],
            "parallel.styles": [
                "Colwise",
                "Rowwise",
                "SequenceParallel",
                "VocabParallel",
            ],
        },
    )
