"""The EAGLE-3 draft: its shape, the model, its attention over TTT steps, and the loss."""
