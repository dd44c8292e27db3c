"""What a request must be for any engine. Raises UsageError before the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence

from deltad.errors import UnavailableError, UsageError
from deltad.types import Version
from rollout_plugin.engines import Sampling


def check_tokens(token_ids: Sequence[int], *, at_least: int, longest: int, vocabulary: int) -> None:
    """Raises UsageError for too few or too many tokens, and for one that the model does not have."""
    if not at_least <= len(token_ids) <= longest:
        raise UsageError("token ids", expected=f"{at_least} to {longest} of them", found=f"{len(token_ids)}")
    if not all(0 <= token < vocabulary for token in token_ids):
        raise UsageError("token ids", expected=f"0 to {vocabulary - 1}", found="one outside")


def check_sampling(prompt: int, sampling: Sampling, *, longest: int) -> None:
    """Raises UsageError for a sampling that cannot work after `prompt` tokens."""
    usable = sampling.temperature == 0 or 0.01 <= sampling.temperature <= 100
    if sampling.n < 1 or sampling.max_new_tokens < 1 or not usable:
        raise UsageError(
            "sampling", expected="n ≥ 1, max_new_tokens ≥ 1, temperature 0 or 0.01 to 100", found=f"{sampling}"
        )
    if prompt + sampling.max_new_tokens > longest:
        raise UsageError(
            "sampling",
            expected=f"at most {longest} tokens",
            found=f"a prompt of {prompt} and {sampling.max_new_tokens} new ones",
        )


def diverged(version: Version) -> UnavailableError:
    """The error of weights that give no log-probs."""
    return UnavailableError(
        f"policy {version}",
        expected="log-probs",
        found="NaN",
        hint="the weights that were published diverged",
    )
