"""The keys of config.json that depend on one another, in groups that families have or not."""
