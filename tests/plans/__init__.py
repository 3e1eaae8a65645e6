"""Tests of fdtensor.plans: laws of plans, their bytes, their prices and their text."""
