"""Tests of fdtensor.inspect: what is shown, explained and measured."""
