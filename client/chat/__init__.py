"""`gptoss-trt chat`: a conversation with a served model, for terminals, pipes and scripts."""
