"""gptoss-trt: gpt-oss engines for H200 GPUs, served from NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
