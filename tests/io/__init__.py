"""Tests of fdtensor.io: checkpoints, safetensors, torch's DTensor."""
