"""Pure functions on tensors: every op has one definition (`reference`) and faster implementations.

Letters of shapes in names and signatures: B batch, T time, H heads, D width, V vocabulary, K block, S tokens in a
state, N rows or blocks.
"""
