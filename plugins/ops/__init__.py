"""Operators as torch.ops.gptoss_trt.*: schemas, checks and the dispatch table."""
