"""The hunt: random programs, in many ways and on many layouts, beside single-process torch."""
