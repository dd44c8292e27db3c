"""Publishing from inside a framework's own trainer: one module a framework, which alone imports it."""
