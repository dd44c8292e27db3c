"""Publishing from inside the trainer: every rank hands over what changed of its own shards.

    publisher = Publisher("my-run", files="path/of/the/model")     # on every rank
    publisher.attach(optimizer)                                    # the next step waits until it has been read
    ...
    handle = publisher.publish(step, model)                        # returns at once
    handle.wait().version                                          # durable at this host's daemon

Nothing is gathered and nothing is written to a disk of the trainer's. Training never waits for a daemon: a step that
cannot be published is skipped, with the reason counted.
"""

from trainer_plugin.publisher.publisher import Counters, Handle, OnBusy, OnLate, Outcome, Publisher
from trainer_plugin.publisher.shards import Held

__all__ = ["Counters", "Handle", "Held", "OnBusy", "OnLate", "Outcome", "Publisher"]
