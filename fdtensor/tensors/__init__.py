"""Tensors on a mesh, and what computes with them.

It imports from all rooms up to `runtime`. It offers `DTensor`, `distribute`, `redistribute`,
`call`, `spmd` and `shard_map`, and what stands on these: random numbers, parameters drawn in
shards, gradients and their norms, loss scales, and `optim`.
"""
