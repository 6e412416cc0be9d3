"""An OpenAI-compatible server in front of one engine process."""
