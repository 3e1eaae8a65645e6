"""The parts of a call of a function of DTensors: `spmd` and `call` stand on these.

`function` has `Spmd`, which holds what earlier calls have made. `arguments` takes what a call is
given; `key` says which calls run the same program, with `python_state` for Python values; `entry`
makes that program, and `replicas` runs what has none. `vjp` traces a backward with its forward, by
the `pullbacks` of torch and under the settings of the `moment` of the call, `halves` cuts the two
apart, and `adjoint` runs them.
"""
