"""The demo checkpoint: synthetic conversations, the trainer, the packed weights and their expansion."""
