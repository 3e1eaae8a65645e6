"""Failures that are known and open: a pattern of their signature, and a sentence about each."""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[str, str] = {
    r"has internal overlap|mutation on a view chain": "Functionalization refuses these writes.",
    r"Output size is too small": "Torch's own shapes refuse a transposed convolution to size 0.",
}
"""A test that meets one of these is skipped, with its sentence."""
