"""Faults on purpose: one rank of four does something wrong, in each phase of a program.

`python -m tests.faults` runs all of them and prints the table that RESULTS.md has; a few run as
tests. Each file defines one thing:

    phases     what ranks do, one phase after the other
    partition  two hosts, and the cable between them
    rank       the life of a rank: the phases, with a fault in one of them
    cell       a phase and a fault, run on four processes: what each rank had to say
    table      all cells as a table
"""
