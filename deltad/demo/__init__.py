"""One command that runs the whole path on this machine: two regions, a slow link, a real loop of RL.

The demo is a user of deltad like any other: it starts the programs that a user would start and talks to
them over their sockets. It may not reach into the daemon's modules.
"""
