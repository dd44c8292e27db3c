"""The protocols as decisions without IO: who may publish, what to pull, when to activate."""
