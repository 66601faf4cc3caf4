"""What the model makes of text past its window: `make quality`."""
