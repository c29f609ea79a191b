"""The tensor axis: a sequence that is cut over it, collectives by permutes."""
