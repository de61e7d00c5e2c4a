"""Offline: checkpoint -> engine directory (read, quantize, shard, plan, write), one stage per module."""
