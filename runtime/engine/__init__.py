"""The engine process: scheduler, KV cache, sampler, steps and the protocol around them; token ids only."""
