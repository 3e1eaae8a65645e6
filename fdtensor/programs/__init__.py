"""A function as the program of every rank: local ops and collectives, each with its type.

It imports from `layouts`, `plans` and `ops`. It offers `trace` and `Program`: rows are chosen so
that the whole takes the least time, the lines assembled and put in an order that hides traffic;
the program prints, is priced, verifies itself, and goes to JSON and back.
"""
