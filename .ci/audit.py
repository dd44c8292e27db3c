"""Asks pip-audit of the locked requirements: `audit.py PIP_AUDIT REQUIREMENTS`. Standard library only.

Ends with 1 where a known vulnerability is found. Where nobody could be asked (the tool is not there, or it reached no
database), it says so and ends with 0: that is a check that was skipped, not one that passed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SECONDS = 300


def verdict(answer: str) -> tuple[int, str]:
    """The exit code and the sentence for what pip-audit wrote as JSON."""
    try:
        found = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return 0, "audit skipped: pip-audit gave no answer; is its database within reach?"
    asked = [package for package in found if "skip_reason" not in package]
    if not asked:
        reason = found[0]["skip_reason"] if found else "there is nothing to ask for"
        return 0, f"audit skipped: {reason}"
    known = [(package["name"], package["version"], vuln["id"]) for package in asked for vuln in package["vulns"]]
    if known:
        return 1, "\n".join(f"{name} {version}: {identity}" for name, version, identity in known)
    return 0, f"no known vulnerability in {len(asked)} of {len(found)} packages"


def main(tool: Path, requirements: Path) -> int:
    """Run the tool; the exit code."""
    if not tool.exists():
        print(f"audit skipped: {tool} is not there, since it could not be installed")
        return 0
    command = [str(tool), "-r", str(requirements), "--disable-pip", "--require-hashes", "-f", "json", "--timeout", "15"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"audit skipped: no answer within {SECONDS} s")
        return 0
    code, sentence = verdict(ended.stdout)
    print(sentence)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
