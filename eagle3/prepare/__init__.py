"""Stage 01: conversations to samples of token ids and loss mask."""
