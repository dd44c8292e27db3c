"""What slime and miles do with cwtrain's hook: a baseline, then one call for each version. Run by .venv-peers' Python.

python slime_hook.py HF_CHECKPOINT DISK_DIR VERSION_DIR...      prints the metrics of each call
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from cwtrain import HotLoader  # type: ignore[import-not-found]
from cwtrain.integrations import slime  # type: ignore[import-not-found]


def main(hf_checkpoint: str, disk_dir: str, *versions: str) -> None:
    HotLoader.__init__.__kwdefaults__["poll_interval"] = 0.1  # nobody waits five seconds here
    args = SimpleNamespace(rank=0, hf_checkpoint=hf_checkpoint, update_weight_disk_dir=disk_dir)
    print(json.dumps([slime.hook(args, directory, []) for directory in (disk_dir, *versions)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
