"""RULER (Hsieh et al. 2024, arXiv 2404.06654): its thirteen tasks, made offline.

Prompts have any length, in the model's own tokens.
"""
