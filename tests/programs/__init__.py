"""Tests of fdtensor.programs: laws of programs, choices, schedules and their text."""
