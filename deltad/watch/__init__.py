"""Noticing checkpoints: names to numbers, what is settled, and the watcher that awaits it."""
