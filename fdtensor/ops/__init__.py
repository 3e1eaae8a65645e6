"""What torch's ops allow: functions as lists of ops, and the layouts that each op computes in.

It imports from `layouts` and `plans`. It offers the recorder, which turns a function into a
`Graph` of ops; rules, which are rows of placements, and the notation that they are written in;
decompositions into simpler ops; the lift of rows to several mesh axes; and random bits that depend
on a key and on the place of an element alone.
"""
