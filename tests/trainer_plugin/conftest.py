"""The tiny model, shared with the replica's tests."""

from tests.rollout_plugin.conftest import _one_thread, region, start_replica, tiny

__all__ = ["_one_thread", "region", "start_replica", "tiny"]
