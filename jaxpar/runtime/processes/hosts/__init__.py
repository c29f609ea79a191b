"""The hosts of an elastic run: a launcher on each, which find one another and form generations.

The launchers share a few texts through a store, JAX's coordination service (`service.py`,
`link.py`, `store.py`). From what it reads there, each launcher knows which hosts are alive
(`liveness.py`) and what to do next (`generations.py`), and starts and ends the processes of its own
host (`agent.py`).
"""
