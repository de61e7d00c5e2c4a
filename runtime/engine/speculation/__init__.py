"""Speculative decoding: drafts of the next tokens, how many to try, and their exact verification."""
