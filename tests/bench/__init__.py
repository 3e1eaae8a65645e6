"""`python -m tests.bench`: fdtensor, DTensor and calls by hand compared.

`redistribute` moves tensors between layouts:

cases      the eleven redistributions that everyone is measured on, and their tensors
hand       what one would write by hand for each of them, in several ways
count      the bytes that collectives bring, counted while they run
traffic    time and bytes on 4 gloo processes
planning   the time it takes to plan
overhead   the time of a call when its collectives are free
tables     what the terminal shows

`compute` runs ops and training steps on them, with collectives that are free:

models         an MLP and a transformer block, as plain functions
timing         calls timed in turns, and counted
compute_ops    each op of a table: plain torch, `call`, DTensor
compute_ways   a training step in nine ways, and compiled in four
compute_steps  the time of each
compute_trace  the time it takes to trace a GPT
compute        all of them

`choice` traces large functions:

choice_cases   an MLP and layers of Llama-3-8B, at their real sizes
choice         the program of each, and the time it takes to choose it
choice_others  the bytes that others receive, of which
choice_textbook  by formula,
choice_torch     with PyTorch, pretended,
choice_jax       with JAX, where a Python has it

`estimate` runs training steps on four gloo processes:

estimates  beside the seconds that a calibrated cost model says

`overlap` puts schedules beside the order of the function:

overlap  by the timelines of large programs, and on four gloo processes

`pipeline` puts pipelines beside those of torch:

pipelines  the same layers in each schedule, on four gloo processes

command    the command line of all
"""

from tests.bench.command import main

__all__ = ["main"]
