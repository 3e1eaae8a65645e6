"""Running plans and programs: one interpreter, on real ranks or on all of them in one process.

It imports from `layouts`, `plans`, `ops` and `programs`, and it alone talks through
`torch.distributed`. It offers `Comm` with its two kinds, `FuncolComm` and `SimulatedComm`, `run`
and `run_fused`, the process groups of a mesh, and the lines of one rank as a `torch.fx` module.
`control` is what ranks tell each other beside the data, so that none waits forever.
"""
