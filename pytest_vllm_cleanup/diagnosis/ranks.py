"""How much a person can do about a root."""

from __future__ import annotations

USERS = 0  # the user's code, a fixture, a frame, a thread
KNOWN = 1  # a known holder of vLLM
LIBRARY = 2
UNKNOWN = 3  # no root was found
