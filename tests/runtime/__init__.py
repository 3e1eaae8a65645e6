"""Tests of fdtensor.runtime: derivatives, Comms and exported graphs."""
