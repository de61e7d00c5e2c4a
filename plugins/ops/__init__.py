"""Operators as torch.ops.gptoss_trt.*: schemas, checks and the dispatch table.

Importing this package registers them with torch.
"""

from gptoss_trt.ops import registration as registration
