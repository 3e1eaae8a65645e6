"""`python -m fdtensor bench redistribute`: fdtensor, DTensor and calls by hand compared.

cases      the eleven redistributions that everyone is measured on, and their tensors
hand       what one would write by hand for each of them, in several ways
count      the bytes that collectives bring, counted while they run
traffic    time and bytes on 4 gloo processes
planning   the time it takes to plan
overhead   the time of a call when its collectives are free
tables     what the terminal shows
command    the command line
"""

from fdtensor.bench.command import main

__all__ = ["main"]
