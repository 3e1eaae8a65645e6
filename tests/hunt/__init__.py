"""The hunt: random programs, run in many ways on many layouts, beside plain single-process torch."""
