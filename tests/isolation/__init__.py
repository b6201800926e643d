"""Tests that run in processes of their own: inner runs of pytest, with real processes."""
