"""Reinforcement learning on a small model, end to end: a trainer whose rollouts come from a remote replica."""
