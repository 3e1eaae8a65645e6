"""Pickles of files that nobody vouches for, read without running what they ask for.

A pickle is a program for a small machine, and Python's own machine calls whatever it names. The one
here has the same opcodes, but knows a table of names and nothing else, so that no file can run
code, and keeps account of memory, so that none can ask for much more than its own size.

    machine   the stack, the table of names and the account
    literals  the opcodes of plain values
    opcodes   the others
    archive   the zip files that `torch.save` writes, as records of bytes
    values    the table of what such a file may hold: plain values, tensors, types opted in
"""

from fdtensor.io.pickles.archive import Archive
from fdtensor.io.pickles.machine import Known, Names
from fdtensor.io.pickles.opcodes import unpickled
from fdtensor.io.pickles.values import Objects, check_objects, value_of

__all__ = ["Archive", "Known", "Names", "Objects", "check_objects", "unpickled", "value_of"]
