"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

from __future__ import annotations


def register() -> None:
    """Make the load format `deltad` known. May be called any number of times."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from rollout_plugin.engines.vllm.loader import FORMAT, InPlaceLoader

    if _LOAD_FORMAT_TO_MODEL_LOADER.get(FORMAT) is not InPlaceLoader:
        register_model_loader(FORMAT)(InPlaceLoader)
