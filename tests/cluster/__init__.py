"""Tests of fdtensor.cluster: real ranks for a notebook or a script."""
