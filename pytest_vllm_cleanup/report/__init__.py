"""How results reach people and other programs."""
