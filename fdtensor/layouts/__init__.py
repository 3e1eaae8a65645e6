"""Where a tensor lies: meshes, placements, layouts and types, as immutable values.

Nothing of the package lies below this room, and nothing in it moves or computes. It offers `Mesh`,
the placements, `Layout` and `TensorType`, and what every other room is built with: records of which
equal ones are one object, errors, texts, pytrees, the user's line, and the registry by which a
value is drawn by a room above its own.
"""
