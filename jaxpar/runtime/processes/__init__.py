"""The processes of a run: detect, launch, connect, watch and shut down."""
