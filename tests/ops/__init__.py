"""Tests of fdtensor.ops: every row of every rule, decompositions, writes, draws and checks."""
