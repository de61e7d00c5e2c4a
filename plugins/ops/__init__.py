"""Operators as torch.ops.gptoss_trt.*: schemas, checks and the dispatch table.

Importing this package registers them with torch; `ops` is their namespace.
"""

from gptoss_trt.ops.registration import ops as ops
