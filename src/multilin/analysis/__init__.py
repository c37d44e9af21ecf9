"""Analysis of trained models: scores, explanations of what they read, costs, and comparisons."""
