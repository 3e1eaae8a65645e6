"""`EVERY`: all workloads, by name."""

from __future__ import annotations

from tests.workloads.detection import DETECTION
from tests.workloads.experts import EXPERTS
from tests.workloads.generation import GENERATION
from tests.workloads.language import LANGUAGE
from tests.workloads.optimizers import OPTIMIZERS
from tests.workloads.samples import SAMPLES
from tests.workloads.science import SCIENCE
from tests.workloads.sequences import SEQUENCES
from tests.workloads.serving import SERVING
from tests.workloads.vision import VISION

__all__ = ["EVERY"]

EVERY = {
    w.name: w
    for w in (
        *LANGUAGE,
        *GENERATION,
        *SERVING,
        *EXPERTS,
        *SEQUENCES,
        *OPTIMIZERS,
        *SCIENCE,
        *SAMPLES,
        *VISION,
        *DETECTION,
    )
}
