"""The version graph: which edges lead where, and the cheapest path. Pure: no files, clock, sockets or asyncio."""

from deltad.store.graph.edge import Edge, Hop, Path
from deltad.store.graph.joins import joins
from deltad.store.graph.versions import VersionGraph

__all__ = ["Edge", "Hop", "Path", "VersionGraph", "joins"]
