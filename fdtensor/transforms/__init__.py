"""Transforms: from modules and exported programs to those of one rank."""
