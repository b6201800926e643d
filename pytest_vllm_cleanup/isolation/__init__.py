"""A test, or a function, in a fresh Python process that ends with it."""
