"""Tests of fdtensor.layouts: meshes, placements, layouts, types and errors."""
