"""The version graph: which edges lead where, the cheapest path, and what to fold, cut and drop.

Pure: no files, clock, sockets or asyncio.
"""

from deltad.store.graph.actions import Action, Budget, CutAnchor, Drop, Encode, Fold, Plan, PutOff, Reader
from deltad.store.graph.edge import Edge, Hop, Path
from deltad.store.graph.joins import joins
from deltad.store.graph.policy import line_to, plan
from deltad.store.graph.versions import VersionGraph

__all__ = [
    "Action",
    "Budget",
    "CutAnchor",
    "Drop",
    "Edge",
    "Encode",
    "Fold",
    "Hop",
    "Path",
    "Plan",
    "PutOff",
    "Reader",
    "VersionGraph",
    "joins",
    "line_to",
    "plan",
]
