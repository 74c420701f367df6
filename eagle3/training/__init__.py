"""Training the draft: supervision, packing, metrics and the DeepSpeed loop."""
