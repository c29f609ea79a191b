"""Fields whose value is a text with a list: reads each into its parts."""
