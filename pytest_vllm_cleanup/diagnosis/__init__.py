"""After a leak: which object, which process, which layer. Knows nothing of pytest."""
