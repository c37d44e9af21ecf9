"""Train several models on the same text with the same budget, and report which conclusions the results allow."""
