"""Distributed tensors in files, and in torch's own kind.

It imports from all rooms up to `tensors`. It offers checkpoints through
`torch.distributed.checkpoint`, safetensors read by blocks, and `to_torch` and `from_torch`.
"""
