"""The numba backend. Importing it costs what importing numba costs; `deltad.delta.backend.choose` does it late."""
