"""A host's durable chunks, manifests, records and pointers, and the mirror built from them."""
