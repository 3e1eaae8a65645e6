"""Tables and helpers that tests of several rooms share."""
