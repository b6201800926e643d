"""Whether a test, or a part of one, gave its GPU memory back."""
