"""The sum of gradients over `replica`, the slow link: in float32, or compressed."""
