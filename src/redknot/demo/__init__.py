"""Documents and questions of the demo; written for this project."""
