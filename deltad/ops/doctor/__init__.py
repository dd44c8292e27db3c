"""`deltad doctor`: is this host fit for what its configuration asks of it.

`gather` looks at the host and changes nothing that stays; `examine` is pure and judges what was gathered.
"""

from deltad.ops.doctor.examine import examine
from deltad.ops.doctor.facts import Facts
from deltad.ops.doctor.finding import Finding, Level
from deltad.ops.doctor.gather import gather

__all__ = ["Facts", "Finding", "Level", "examine", "gather"]
