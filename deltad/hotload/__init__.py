"""Hot loads: a trainer's client says "serve this snapshot now", and asks until every replica does.

Two public APIs, thin faces on one thing: a snapshot in a bucket becomes a version, and the fleet is followed until all
of it has read that version back from its engines. `ledger` decides, `snapshots` reads the bucket, `loading` does,
`coreweave` and `fireworks` speak.
"""
