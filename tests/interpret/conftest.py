"""The interpreter must be chosen before a kernel's module is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
