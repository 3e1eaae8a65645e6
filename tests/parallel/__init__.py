"""Tests of fdtensor.parallel: styles, programs of one rank and saved activations."""
