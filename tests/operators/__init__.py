"""The measure of all ops: torch's own database of them, on every layout, beside the plain op."""
