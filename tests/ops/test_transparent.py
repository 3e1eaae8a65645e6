"""What is set while a function is recorded is as before when all threads are done."""

import threading
import time

import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.programs.tracer import trace

TYPE = TensorType((4,), torch.float32, Mesh(x=2).layout("x"))


def state():
    return (
        torch._C._get_mkldnn_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.compiler.is_compiling(),
        torch.masked.MaskedTensor.__new__,
    )


def test_threads_that_record_at_once_leave_the_settings_of_torch():
    before, inside = state(), threading.Event()

    def first(x):
        inside.set()
        time.sleep(0.1)
        return x + 1

    def second(x):
        time.sleep(0.2)
        return x + 2

    threads = [
        threading.Thread(target=lambda: trace(first, TYPE)),
        threading.Thread(target=lambda: inside.wait() and trace(second, TYPE)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state() == before
