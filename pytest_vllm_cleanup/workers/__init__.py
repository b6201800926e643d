"""Workers of pytest-xdist that know about devices: who gets which, who waits for whom, and who replaces whom."""
