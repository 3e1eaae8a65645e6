"""Failures that are known and open: a pattern of their signature, and a sentence about each."""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[str, str] = {}
"""A test that meets one of these is skipped, with its sentence."""
