"""The CUDA backend. Importing it costs nothing; `open_backend` imports CuPy."""
