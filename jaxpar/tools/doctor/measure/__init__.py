"""What the machine's collectives, links and matmuls do."""
