"""`shard_map` and the named collectives that functions in it call.

`mapped` has `shard_map` itself, `arguments` what it is given, `result_types` the types of what it
gives, and `collectives` the named ones. `places` says what the place of a rank can do: `simulated`,
where `fibers` run all ranks in step, `real`, and `traced`, inside of a function that is traced,
where `stacked` has the tensors of all ranks as one. `varying` follows what varies from rank to
rank, and `moves` are the collectives as autograd functions. `program` is what all simulated ranks
run, and `joint` differentiates it as one function.
"""
