"""RedKnot: reuse of document state and head-aware K/V for Hugging Face language models."""
