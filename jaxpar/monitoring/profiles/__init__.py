"""Profiles of a run: taken between steps, in a folder with facts about the program."""
