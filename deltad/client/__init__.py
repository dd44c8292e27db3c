"""What plugins and the command line use to talk to a daemon on the same host.

Standard library and msgspec only: importing it moves no pin of a trainer's or an engine's environment.
"""

from deltad.client.client import Client

__all__ = ["Client"]
