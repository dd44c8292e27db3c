"""vLLM as the engine of a replica: its own process, its own tensors, no fork of it and nothing patched into torch."""
