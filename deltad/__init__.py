"""deltad moves an RL policy from the cluster that trains it to the fleets that sample from it.

Importing this package is cheap on purpose (no numpy, torch or aiohttp): trainers and inference
engines import it inside their own processes.
"""

__version__ = "0.1.0"
