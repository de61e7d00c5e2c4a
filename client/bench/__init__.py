"""`gptoss-trt bench`: load on a server and what it did with it; the engine and its operators come from the runtime."""
