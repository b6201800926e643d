"""Engines: who made them, and the one way out."""
