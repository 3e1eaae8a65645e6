"""Tests of what a user meets first: names, commands, training, notebooks, the rooms."""
