"""From one type to another: the collectives that take a tensor there, as a value.

It imports from `layouts`. It offers the closed set of collectives, `plan` with its lower bound,
bytes, peak and seconds, `transition` for one axis, and `fuse` for plans that travel together.
Nothing here holds a tensor: what is found by arithmetic on types is run by `runtime`.
"""
