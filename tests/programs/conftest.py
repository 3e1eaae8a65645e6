"""Tests of programs choose layouts anew: that is what they test."""

import pytest


@pytest.fixture(autouse=True)
def chosen_anew(monkeypatch):
    monkeypatch.setenv("FDTENSOR_CACHE", "off")
