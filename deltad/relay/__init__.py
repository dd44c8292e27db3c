"""Daemon to daemon over HTTP: a server that only offers, and a puller that believes nothing it is told."""
