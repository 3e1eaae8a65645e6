"""`shard_map` and the named collectives that functions in it call.

`mapped` has `shard_map` itself and `collectives` the named ones; `fibers` runs all simulated ranks
in step, `places` is the place of a rank, `varying` follows what varies from rank to rank, `moves`
are the collectives as autograd functions, and `joint` writes a run down as a program.
"""
