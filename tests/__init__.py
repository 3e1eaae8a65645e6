"""The tests, in the rooms of fdtensor; laws across rooms and on real ranks have their own."""
