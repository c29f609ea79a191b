"""What a checkpoint has of each replica, for a run with other replicas or other parts of them."""
