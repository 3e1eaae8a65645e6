"""The ops of torch: functions as lists of ops, and the layouts in which each op can compute.

It imports from `layouts` and `plans`. It offers the recorder, which turns a function into a
`Graph` of ops; rules, which are rows of placements, and the notation that they are written in;
decompositions into simpler ops; the lift of rows to several mesh axes; and random bits that depend
on a key and on the position of an element alone.
"""
