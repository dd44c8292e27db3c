"""The daemon: wires the parts together, supervises them, and drains them."""
