"""Text → token ids and back: tokenizers and chat templates, as a model's files have them."""
