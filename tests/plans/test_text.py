"""Bytes as people read them, and exact ones on request."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import Mesh, TensorType, plan
from fdtensor.plans import exact_bytes
from fdtensor.plans.text import bytes_text

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}


@given(st.integers(0, 63).flatmap(lambda bits: st.integers(0, 2**bits)))
def test_bytes_have_three_digits_or_all(count):
    number, unit = bytes_text(count).split()
    value = float(number) * UNITS[unit]
    assert value == count if count < 10_000 else abs(value - count) <= count / 190
    assert len(number.replace(".", "")) <= 4
    with exact_bytes():
        assert bytes_text(count) == f"{count} B"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (9_999, "9999 B"),
        (10_240, "10 KiB"),
        (48 * 2**20, "48 MiB"),
        (2**20 - 1, "1 MiB"),
        (999 * 2**10, "999 KiB"),
        (2**53, "8 PiB"),
        (2**73, "8192 EiB"),
    ],
)
def test_bytes_in_the_unit_that_suits_them(count, text):
    assert bytes_text(count) == text


def test_a_plan_prints_exact_bytes_within():
    mesh = Mesh(tp=4)
    cut = TensorType((1024, 64), torch.float32, mesh.layout("tp"))
    movement = plan(cut, cut.with_layout(mesh.layout()))
    assert str(movement).endswith("192 KiB received per rank")
    with exact_bytes():
        assert str(movement).endswith("196608 B received per rank")
    assert str(movement).endswith("192 KiB received per rank")
