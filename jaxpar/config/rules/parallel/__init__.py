"""Rules about ways to use an axis of the mesh: pipeline schedules, and replicas on their own."""
