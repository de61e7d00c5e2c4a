"""`gptoss-trt top`: a live view of a server's metrics page."""
