"""Settings that hold for every test."""

import os
import signal

from hypothesis import HealthCheck, settings

# Shared machines are noisy: what a test asserts is never time, so no deadline either.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
settings.register_profile("full", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A test run in the background of a shell ignores interrupts, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
