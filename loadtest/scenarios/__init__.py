"""Routing policies against one another in virtual time: the router's own index, loads and choice, over simulated workers."""
