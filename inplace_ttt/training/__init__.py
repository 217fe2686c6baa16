"""Continued training of converted models: recipes, data, DeepSpeed through the Hugging Face Trainer."""
