"""Tests of fdtensor.testing: what the other tests stand on."""
