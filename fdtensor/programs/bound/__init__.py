"""The least seconds that any choice of layouts of a graph can take, by the cost model.

The choice is an integer program over all combinations of rows of all axes, too many to write down.
Its relaxation is solved by the generation of columns (Dantzig and Wolfe, 1960, Decomposition
Principle for Linear Programs): `relaxation` solves it with some combinations of each call, `space`
has all of them as arrays, in which the multipliers of that solution find those that would lower it.
Whatever the multipliers, what the calls take least by them is a bound (`least`), since a move never
costs less than what they give and take for it.
Each move starts from where a value is computed. That a copy may come cheaper from another copy is
known to the assembly of a program, and not to its choice.
"""
