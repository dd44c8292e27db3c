"""From a version's tensors to an engine's live weights."""
