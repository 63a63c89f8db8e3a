"""
The experts that a mixture of experts chooses for each token.

`shapes` has their column and needs no torch; `recording` and `forcing` work on models of transformers.
"""
