"""Pipelines: schedules, the programs of stages, and one step of all of them."""
