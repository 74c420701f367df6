"""Stage 02: the target's hidden states at every token of the prepared samples."""
