"""The hosts of a run: a launcher on each, which find one another and form generations.

The launchers share a few texts through a store (`kv_store.py`): in the launcher's own process if
the run is on one host, else JAX's coordination service (`service.py`, `link.py`), in which they
sign what they write. From what it reads there, each launcher knows which hosts are alive
(`membership.py`) and what comes next (`generations.py`), and starts and ends the processes of its
own host (`agent.py`, `trainers.py`).
"""
