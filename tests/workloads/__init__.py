"""Research at real size: plain functions beside the best programs by hand."""
