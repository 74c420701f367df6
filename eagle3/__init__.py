"""EAGLE-3 draft pipeline: the library behind the four numbered scripts."""
