"""Ways of parallelism: styles by the names of modules, and exported programs of one rank.

It imports from all rooms up to `tensors`. It offers the styles with `layouts_for`,
`tensor_parallel`, which cuts an exported program, and `input_reshard`, under which activations
wait for the backward in shards.
"""
