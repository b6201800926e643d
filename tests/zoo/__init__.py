"""The leak zoo: one tiny test module a kind of leak or look-alike, and what must be said of it."""
