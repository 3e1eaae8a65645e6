"""`shard_map` and the named collectives that functions in it call.

`mapped` has `shard_map` itself, `arguments` what it is given, `result_types` the types of what it
gives, and `collectives` the named ones; `fibers` runs all simulated ranks in step, `places` is the
place of a rank, `varying` follows what varies from rank to rank, and `moves` are the collectives as
autograd functions. `program` is what all simulated ranks run, `joint` differentiates it as one
function, and `copies` compares what is said to be replicated.
"""
