"""Measurements, one command each: `python -m bench NAME [--quick] [--json PATH]`. Not part of the wheel."""
