"""The interpreter must be chosen before a kernel's module is imported; every test draws the same random numbers."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(20_251)
