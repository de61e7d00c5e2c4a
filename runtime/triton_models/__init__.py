"""What the Triton models share: tensors in, engine requests out, and coalesced responses back."""
