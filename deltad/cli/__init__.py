"""The `deltad` command: options in, sentences and tables out.

Decides nothing about versions: what a command knows it reads from files or asks of a daemon through
`deltad.client`. Modules here import nothing heavy at the top, so that `deltad --help` is quick.
"""
