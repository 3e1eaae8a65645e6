"""Tests of fdtensor.tensors: DTensors, spmd, shard_map, random numbers and optimizers."""
