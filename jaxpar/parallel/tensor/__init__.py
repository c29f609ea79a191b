"""The tensor axis: sequences sharded over it, and collectives built from permutes."""
